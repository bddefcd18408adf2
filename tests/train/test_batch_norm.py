"""Batch norm under bf16 and fp16: its statistics are float32's, and backward keeps its input as it came."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.batch_norm import synchronize_batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.train.build import batch_norm_in_fp32

LOW = [torch.bfloat16, torch.float16]
FORMATS = [torch.contiguous_format, torch.channels_last]


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy as DeepSpeed casts it: parameters only, buffers keep their type."""
    low = copy.deepcopy(model)
    for p in low.parameters():
        p.data = p.data.to(dtype)
    if dtype != torch.float32:
        batch_norm_in_fp32(low)
    return low


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_torch(dtype, momentum):
    torch.manual_seed(0)
    reference = nn.BatchNorm1d(3, momentum=momentum)
    low = in_precision(reference, dtype)
    for _ in range(5):
        x = (torch.randn(64, 3) + 2).to(dtype)
        reference(x.float())
        low(x)
    assert low.num_batches_tracked == 5
    torch.testing.assert_close(low.running_mean, reference.running_mean)
    torch.testing.assert_close(low.running_var, reference.running_var)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_round_only_what_goes_out(dtype, layout, affine, training):
    torch.manual_seed(0)
    model = nn.BatchNorm2d(4, affine=affine).train(training)
    low, reference = in_precision(model, dtype), model
    x = torch.randn(8, 4, 5, 5).to(dtype).contiguous(memory_format=layout).requires_grad_()
    exact = x.detach().float().requires_grad_()
    gradient = torch.randn(8, 4, 5, 5).to(dtype)
    got, wanted = low(x), reference(exact)
    got.backward(gradient)
    wanted.backward(gradient.float())
    assert got.dtype == x.grad.dtype == dtype
    assert torch.equal(got, wanted.to(dtype))
    torch.testing.assert_close(x.grad, exact.grad.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    if affine:
        torch.testing.assert_close(low.weight.grad, reference.weight.grad.to(dtype))
        torch.testing.assert_close(low.bias.grad, reference.bias.grad.to(dtype))


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the numbers that backward keeps of one forward, but for the model's own and max pooling's indices."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_keeps_half_the_bytes_of_float32(dtype):
    """But for the small vectors that stay float32: mean, deviation and weight, a number each a channel."""
    inputs = ImageInputs(channels=3, size=64, classes=10)
    torch.manual_seed(0)
    model = build(find("resnet18"), inputs, {})
    x = torch.randn(4, 3, 64, 64)
    full = saved_bytes(in_precision(model, torch.float32), x)
    low = saved_bytes(in_precision(model, dtype), x.to(dtype))
    channels = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert full > 6_000_000
    assert full / 2 < low <= full / 2 + 3 * 4 * channels


def test_synchronized_on_one_rank_is_torchs():
    torch.manual_seed(0)
    for dims, kind in ((2, nn.BatchNorm1d), (4, nn.BatchNorm2d)):
        reference = kind(3)
        nn.init.normal_(reference.weight)
        mine = copy.deepcopy(reference)
        synchronize_batch_norms(mine)
        for training in (True, True, False):
            x = (torch.randn(6, 3, *[4] * (dims - 2)) + 1).requires_grad_()
            y = x.detach().clone().requires_grad_()
            out, wanted = mine.train(training)(x), reference.train(training)(y)
            gradient = torch.randn_like(out)
            out.backward(gradient)
            wanted.backward(gradient)
            torch.testing.assert_close(out, wanted)
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.weight.grad, reference.weight.grad)
            torch.testing.assert_close(mine.bias.grad, reference.bias.grad)
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(dict(mine.named_buffers())[name], buffer)


def test_synchronized_on_two_ranks_is_one_process_with_the_whole_batch(pools, tmp_path):
    how = {"model": "resnet18-small", "model_args": {"width": 4}, "data": "digits", "steps": 4, "global_batch": 8}
    how |= {"micro_batch": 4, "optimizer": "sgd", "lr": 0.05, "schedule": "constant", "warmup_steps": 0}
    how |= {"weight_decay": 0.0, "sync_batch_norm": True}
    trained = pools(2).train(tmp_path / "run", ds_config="zero2", **how)
    data = open_data(Run(model="lenet", data="digits"), "image", None, Reporter())
    order = Order.of(data.train, 0)
    torch.manual_seed(0)
    model = build(find(how["model"]), data.inputs, how["model_args"])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(4):
        batch = data.train.batch(order.indices(8 * step, 8 * step + 8), range(8))
        loss = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    for name, tensor in load_file(trained.folder.model / "model.safetensors").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-3, atol=1e-5)
