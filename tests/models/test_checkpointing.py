"""Activation checkpointing changes memory, and nothing else: not even batch norm's running statistics."""

import copy

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.small import IMAGES, TRANSFORMERS, batch_of, inputs_of
from zerofit.models.build import build, forward_logits
from zerofit.models.catalog import ModelError, find
from zerofit.models.checkpointing import checkpoint_model, cut_into_blocks, keep_on_host

CNNS = [
    "simplecnn",
    "lenet",
    "mlp",
    "resnet18-small",
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "regnet_y_400mf",
]


def trained_once(name, args, checkpointing):
    source = find(name)
    inputs = inputs_of(source.task)
    torch.manual_seed(2)
    model = build(source, inputs, args, checkpointing=checkpointing).train()
    torch.manual_seed(3)  # dropout
    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logits, aux = forward_logits(model, batch_of(inputs))
    (logits.square().mean() + (0 if aux is None else aux)).backward()
    return model, logits, saved


KINDS = [*((case, True) for case in (*CNNS, *TRANSFORMERS)), *((case, "selective") for case in TRANSFORMERS)]


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_same_outputs_gradients_and_statistics(case, kind):
    name, args = TRANSFORMERS.get(case, (case, {}))
    plain, expected, all_saved = trained_once(name, args, False)
    model, got, saved = trained_once(name, args, kind)
    assert torch.equal(got, expected)
    assert saved < all_saved
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    for key, tensor in plain.state_dict().items():
        if "running" in key or "num_batches" in key:
            assert torch.equal(model.state_dict()[key], tensor), key


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_every_second_product_of_a_block():
    """Llama's block has seven products, and the recomputation ends before the last; llama-tiny has four blocks."""
    counts = {}
    for kind in (False, "selective", True):
        with Products() as products:
            trained_once("llama-tiny", {}, kind)
        counts[kind] = products.count
    assert counts["selective"] - counts[False] == 4 * 3
    assert counts[True] - counts[False] == 4 * 6


def test_selective_needs_a_model_of_transformers():
    with pytest.raises(ModelError) as caught:
        build(find("resnet18-small"), IMAGES, {}, checkpointing="selective")
    assert caught.value.kind == "model-checkpointing"


def test_statistics_move_once_a_step():
    model, *_ = trained_once("resnet18", {}, True)
    counts = {int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {1}


def test_names_and_copies_are_untouched():
    model, *_ = trained_once("resnet18", {}, True)
    plain, *_ = trained_once("resnet18", {}, False)
    assert list(model.state_dict()) == list(plain.state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    x = batch_of(IMAGES)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert not torch.equal(twin.eval()(x), plain.eval()(x))


def test_vgg_recomputes_between_poolings():
    with torch.device("meta"):
        model = build(find("vgg16"), None, {})
    names = list(model.state_dict())
    checkpoint_model(model)
    assert len(cut_into_blocks(model)) == 5
    assert list(model.state_dict()) == names
    assert model.eval()(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 1000)


def test_a_user_s_transformer_is_checkpointed_layer_by_layer():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 3), torch.nn.Linear(8, 2))
    assert cut_into_blocks(model) == list(model[0].layers)


def test_a_model_without_blocks():
    with pytest.raises(ModelError) as caught:
        checkpoint_model(torch.nn.Linear(2, 2))
    assert caught.value.kind == "model-checkpointing"


@pytest.fixture
def kept(monkeypatch):
    """Shapes of the tensors that go to host memory."""
    shapes = []

    def save_on_cpu(pin_memory):
        def pack(tensor):
            if (
                tensor.numel() or TorchVersion(torch.__version__) >= "2.14"
            ):  # older ones keep one of no elements besides
                shapes.append(tuple(tensor.shape))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)

    monkeypatch.setattr("zerofit.models.checkpointing.save_on_cpu", save_on_cpu)
    return shapes


@pytest.mark.parametrize(("name", "blocks"), [("llama-tiny", 4), ("resnet18-small", 8)])
def test_exactly_the_blocks_inputs_go_to_host_memory(name, blocks, kept):
    source = find(name)
    inputs = inputs_of(source.task)
    model = build(source, inputs, {}, checkpointing=True).train()
    keep_on_host(model)
    logits, _ = forward_logits(model, batch_of(inputs))
    logits.sum().backward()
    assert len(kept) == blocks and all(len(shape) >= 3 for shape in kept)


def test_inputs_of_groups_between_poolings_go_to_host_memory(kept):
    nn = torch.nn
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 4, 3), nn.MaxPool2d(2))
    checkpoint_model(model)
    keep_on_host(model)
    model.features(torch.ones(1, 1, 14, 14, requires_grad=True)).sum().backward()
    assert kept == [(1, 1, 14, 14), (1, 2, 6, 6)]
