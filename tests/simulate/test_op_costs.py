"""Memory that kernels take while they run, against what torch's CPU allocator is asked for."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.simulate.costs.kernels import call_of
from zerofit.simulate.ops.costs import scratch_on
from zerofit.simulate.ops.tracker import AllocationTracker

FLOAT, HALF, WHOLE = (torch.ones(100, 100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64))
COLUMN, TRUTH = HALF[:, :1], FLOAT > 0


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("add.Tensor", (FLOAT, HALF)),
        ("add_.Tensor", (FLOAT.clone(), HALF)),
        ("mul_.Tensor", (HALF.clone(), FLOAT)),
        ("mul.Tensor", (FLOAT, COLUMN)),
        ("addcmul", (FLOAT, HALF, FLOAT)),
        ("lt.Tensor", (HALF, FLOAT)),
        ("where.self", (TRUTH, FLOAT, HALF)),
        ("add.Tensor", (WHOLE, TRUTH)),
        ("div.Tensor", (WHOLE, WHOLE)),
        ("sqrt", (WHOLE,)),
        ("masked_fill.Scalar", (FLOAT, TRUTH, 0.0)),
        ("where.self", (TRUTH.any(), HALF, FLOAT)),
        ("add.Tensor", (HALF, HALF)),
        ("copy_", (FLOAT.clone(), HALF)),
    ],
)
def test_operands_of_another_type_are_copied_on_a_cpu(op, args):
    overload = getattr(getattr(torch.ops.aten, op.partition(".")[0]), op.partition(".")[2] or "default")
    taken, out = scratch_of(overload, args)
    name = overload._overloadpacket._qualified_op_name
    assert scratch_on("cpu")(name, args, {}, out) == taken
    assert scratch_on("cuda")(name, args, {}, out) == 0


TURNED = torch.ones(8, 96, 64).transpose(1, 2)
ROWS = torch.ones(8, 64, 1)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("_softmax", (TURNED, -1, False)),
        ("_softmax", (TURNED.contiguous(), -1, False)),
        ("_log_softmax", (TURNED, -1, False)),
        ("_softmax_backward_data", (TURNED, TURNED.contiguous(), -1, torch.float32)),
        ("_log_softmax_backward_data", (TURNED, TURNED, -1, torch.float32)),
        ("native_layer_norm", (TURNED, [96], None, None, 1e-5)),
        ("native_layer_norm_backward", (TURNED, TURNED, [96], ROWS, ROWS, None, None, [True, False, False])),
        ("mse_loss", (TURNED, TURNED)),
        ("mse_loss", (TURNED, TURNED, 0)),
        ("huber_loss", (TURNED, TURNED)),
        ("smooth_l1_loss", (TURNED, ROWS)),
        ("binary_cross_entropy_with_logits", (FLOAT, FLOAT)),
        ("binary_cross_entropy_with_logits", (FLOAT, FLOAT, None, None, 0)),
        ("logsumexp", (TURNED, [-1])),
        ("_euclidean_dist", (FLOAT, FLOAT[:60])),
        ("mm", (FLOAT[:1, :1].expand(100, 100), FLOAT)),
        ("mm", (FLOAT.mT, FLOAT)),
        ("addmm", (FLOAT, FLOAT, FLOAT[:, :1].expand(100, 100))),
        ("_linalg_svd", (FLOAT.mT,)),
        ("linalg_inv_ex", (torch.eye(100),)),
        ("cholesky_solve", (torch.eye(100).mT, torch.eye(100).mT)),
    ],
)
def test_copies_that_kernels_make_anywhere(op, args):
    """Of CPU kernels as measured, but for the few bytes of scalars; by their sources CUDA's make the same."""
    packet = getattr(torch.ops.aten, op)
    taken, out = scratch_of(packet, args)
    for device in ("cpu", "cuda"):
        assert scratch_on(device)(packet._qualified_op_name, args, {}, out) == pytest.approx(taken, abs=16)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_fake_loss_has_the_storage_of_a_real_one(loss, reduction):
    function = partial(getattr(torch.nn.functional, loss), reduction=reduction)
    real = function(ROWS, ROWS).untyped_storage().nbytes()
    with FakeTensorMode() as mode, AllocationTracker("cpu", scratch_on("cpu")):
        rows = mode.from_tensor(ROWS)
        assert function(rows, rows).untyped_storage().nbytes() == real


@pytest.mark.parametrize("held", [False, True], ids=["unheld", "held"])
def test_autograd_adds_gradients_in_place(held):
    """The gradients of three uses of one tensor, measured; a gradient that somebody holds is left as it is."""

    def backward() -> None:
        tensor = torch.ones(100_000, requires_grad=True)
        between, kept = tensor.exp(), []
        products = [between * factor for factor in (3, 4, 5)]
        if held:
            for product in products:
                product.grad_fn.register_hook(lambda given, _: kept.append(given[0]))
        torch.autograd.backward(products, [torch.ones(100_000)] * 3)

    _, real = _changes(backward)
    tracker = AllocationTracker("cpu", lambda *_: 0)
    with FakeTensorMode(), tracker:
        backward()
    assert tracker.peak() == pytest.approx(max(accumulate(real)), abs=64)


PLACES = torch.arange(100)[:, None].expand(100, 50)
GRADIENTS = {
    "bilinear": lambda x: torch.nn.functional.bilinear(x, FLOAT[:, :90], x[:9, :, None] * FLOAT[0, :90]),
    "pinv": lambda x: x * torch.linalg.pinv(x.detach()).sum(),
    "dist": lambda x: x[0, 0] * torch.dist(x.detach(), FLOAT),
    "gather": lambda x: x.gather(1, PLACES),
    "index": lambda x: x[PLACES[:, 0]],
    "index_select": lambda x: x.index_select(0, PLACES[:, 0]),
    "take": lambda x: x.take(PLACES),
    "sort": lambda x: x.sort(1)[0],
    "cummax": lambda x: x.cummax(1)[0],
    "maximum": lambda x: torch.maximum(x, FLOAT),
    "masked_fill": lambda x: x.masked_fill(TRUTH, 0.0),
    "binary_cross_entropy": lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, FLOAT, pos_weight=FLOAT),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_autograd_computes_a_gradient_in_place(name):
    """The formulas that make new tensors while a dispatch mode is active, measured without one."""

    def backward() -> None:
        x = torch.ones(100, 100, requires_grad=True)
        GRADIENTS[name](x.exp()).sum().backward()

    _, real = _changes(backward)
    tracker = AllocationTracker("cpu", scratch_on("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        backward()
    assert tracker.peak() == pytest.approx(max(accumulate(real)), abs=1000)


def _changes(function: Any, *args: Any) -> tuple[Any, list[int]]:
    """Call a function; return what it does, and each allocation (+bytes) and release (-bytes) meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = function(*args)
    assert profiled.profiler is not None
    return out, [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]


PARTS = [torch.empty(4, device="meta")] * 3  # of three ranks; real ranks of Gloo allocate as much


@pytest.mark.parametrize(
    ("op", "args", "gloo", "nccl"),
    [
        ("allgather_", ([PARTS], PARTS[:1]), 48, 48),
        ("reduce_scatter_", (PARTS[:1], [PARTS]), 32, 48),
        ("reduce_scatter_", (PARTS[:1], [[*PARTS[1:], torch.empty(3, device="meta")]]), 28, 0),
        ("scatter_", (PARTS[:1], [PARTS]), 48, 0),
        ("scatter_", (PARTS[:1], []), 0, 0),
        ("gather_", ([PARTS], PARTS[:1]), 48, 0),
        ("alltoall_", (PARTS, PARTS), 96, 0),
    ],
)
def test_collectives_of_lists_copy_them_into_flat_tensors(op, args, gloo, nccl):
    found = [scratch_on(device)(f"c10d::{op}", args, {}, None) for device in ("cpu", "cuda")]
    assert found == [gloo, nccl]


def scratch_of(op: Any, args: Any) -> tuple[int, Any]:
    """What an op takes and gives back while it runs, and its output."""
    out, changes = _changes(op, *args)
    return max(accumulate(changes), default=0) - sum(changes), out


class Calls(TorchDispatchMode):
    """The kernels of the ops that run."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made.append(call_of(func, args, kwargs or {}, out))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_matrix_products_of_any_type_have_shapes(dtype):
    left, right, out = (torch.ones(*shape, dtype=dtype, device="meta") for shape in ((3, 4), (4, 5), (3, 5)))
    with Calls() as calls:
        torch.mm(left, right)
        torch.mm(left, right, out=out)
        torch.addmm(out, left, right)
        torch.bmm(left[None], right[None])
        torch.baddbmm(out[None], left[None], right[None])
    assert [call.shape for call in calls.made if call.kind == "product"] == 5 * [(3, 5, 4)]


def test_attention_on_packed_samples_has_no_shape():
    packed, ends = torch.empty(14, 4, 8, dtype=torch.bfloat16, device="meta"), torch.empty(3, device="meta").int()
    with Calls() as calls:
        torch.ops.aten._flash_attention_forward(packed, packed, packed, ends, ends, 9, 9, 0.0, False, False)
    (call,) = (call for call in calls.made if call.kind == "attention")
    assert call.shape == () and call.moved_bytes > 4 * packed.nbytes
