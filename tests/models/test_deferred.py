"""Models built parameter by parameter: the same weights to the last bit, and the memory of one tensor at a time."""

import pytest
import torch
import torchvision
from torch import nn

from tests.models.small import TRANSFORMERS, inputs_of
from zerofit.models.build import build, why_whole
from zerofit.models.catalog import ModelSource, find
from zerofit.models.deferred import NotDeferrableError, Stored, build_deferred, store_parameters
from zerofit.models.layers import as_layers

BF16 = Stored(dtype=torch.bfloat16, device=torch.device("cpu"))


class Encoder(nn.Module):
    """What own models do: tied and shared weights, copies of layers, tables, and initialization in a second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.mix = nn.Linear(16, 16)
        nn.init.orthogonal_(self.mix.weight)
        self.register_buffer("mask", torch.triu(torch.ones(8, 8), 1).bool())
        self.scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        self.apply(self.begin)
        self.tokens = nn.Parameter(torch.randn(3, 16) * 0.02, requires_grad=False)
        self.tokens.no_decay = True

    def begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not self.mix:
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.bias, 0.5)


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.largest = float(self.layer.weight.detach().max())


class KeepsTensorsInAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tables = [torch.ones(3)]


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 3)


def vision(name):
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10)


@pytest.mark.versions(of="torch")
@pytest.mark.parametrize("make", [Encoder, vision("resnet18"), vision("vit_b_16"), vision("swin_t")])
def test_the_weights_are_those_of_the_whole_model(make):
    torch.manual_seed(3)
    whole, after_whole = make(), torch.rand(1)
    torch.manual_seed(3)
    model, after = build_deferred(make, BF16), torch.rand(1)
    assert torch.equal(after, after_whole)  # the random stream goes on where it would
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    for name, tensor in whole.state_dict().items():
        expected = tensor.bfloat16() if name in parameters else tensor
        assert state[name].dtype == expected.dtype and torch.equal(state[name], expected), name
    assert len(list(model.parameters())) == len(list(whole.parameters()))  # what was tied is tied
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in whole.parameters()]


def test_attributes_of_tensors_and_plain_tensors_stay():
    torch.manual_seed(3)
    model = build_deferred(Encoder, BF16)
    assert model.tokens.no_decay and model.head.weight is model.embed.weight
    assert torch.equal(model.scale, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


@pytest.mark.parametrize("make", [AsksForValues, KeepsTensorsInAList, Seeds])
def test_what_cannot_be_deferred_says_why_and_draws_nothing(make):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with pytest.raises(NotDeferrableError, match=r"value|attribute|seeds"):
        build_deferred(make, BF16)
    if make is not Seeds:
        assert torch.equal(torch.rand(1), expected)


def test_a_model_that_cannot_be_deferred_is_built_whole():
    source = ModelSource(name=f"{__name__}:AsksForValues", family="custom", origin="given", task="custom")
    assert "value" in (why_whole(source, None, {}) or "")
    torch.manual_seed(3)
    expected = AsksForValues().layer.weight.bfloat16()
    torch.manual_seed(3)
    assert torch.equal(build(source, None, {}, stored=BF16).layer.weight, expected)


def test_own_models_that_can_be_deferred_are():
    source = ModelSource(name=f"{__name__}:Encoder", family="custom", origin="given", task="custom")
    assert why_whole(source, None, {}) is None


@pytest.mark.versions
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_are_stored_as_they_are_drawn(case):
    name, args = TRANSFORMERS[case]
    source = find(name)
    torch.manual_seed(21)
    whole = build(source, inputs_of(source.task), args)
    torch.manual_seed(21)
    model = build(source, inputs_of(source.task), args, stored=BF16)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.versions
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "vit"])
def test_pretrained_folders_are_stored_as_they_are_read(case, tmp_path):
    name, args = TRANSFORMERS[case]
    source = find(name)
    build(source, inputs_of(source.task), args).save_pretrained(tmp_path)
    saved = find(str(tmp_path))
    whole = build(saved, inputs_of(source.task), {})
    model = build(saved, inputs_of(source.task), {}, stored=BF16)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name
    half = {name for name, _ in list(whole.named_parameters())[::2]}
    part = build(saved, inputs_of(source.task), {}, stored=BF16, keep=half)
    for name, parameter in part.named_parameters():
        assert parameter.is_meta == (name not in half), name
        assert parameter.is_meta or torch.equal(parameter, whole.get_parameter(name).bfloat16()), name


def test_only_what_is_to_be_kept_is_drawn_into_memory():
    torch.manual_seed(3)
    whole = vision("resnet18")()
    keep = {name for layer in as_layers(whole)[:4] for name in layer.names.values()}
    torch.manual_seed(3)
    model = build_deferred(vision("resnet18"), BF16, keep)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name not in keep)
        assert parameter.is_meta or torch.equal(parameter, whole.get_parameter(name).bfloat16())
    for name, parameter in store_parameters(whole, BF16, keep).named_parameters():
        assert parameter.is_meta == (name not in keep)


class Wide(nn.Module):
    """Eight layers of 4 MB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


def test_beside_what_is_stored_memory_is_taken_for_one_tensor():
    """Counted by torch's profiler, which sees every allocation on the CPU."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        model = build_deferred(Wide, BF16)
    live, peak = 0, 0
    for size in _allocations(profiler):
        live += size
        peak = max(peak, live)
    kept = sum(p.nbytes for p in model.parameters())
    assert kept == 8 * 2 * 1024 * 1024
    assert peak < kept + 4 * 1024 * 1024 + 100_000  # and the random stream's state


def _allocations(profiler) -> list[int]:
    """Return the bytes of the profile's allocations, and less than 0 of its releases, in order."""
    found, todo = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found)]
