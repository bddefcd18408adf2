"""Measure this device's kernels by kind, dtype and shape, for the times of `zerofit plan`."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.features.optimizer import ADAM_BYTES, SGD_BYTES
from zerofit.spec.local_machine import MeasuredKernel

Work = Callable[[], object]
Operands = Iterator[list[Tensor]]
POOL, MOST_OPERANDS = 2**25, 64  # bytes (more than a core's caches) and number of the operands used in turn
KEPT = 2**27  # bytes of results that are freed together; malloc keeps less than this for reuse
LEAST_S, MOST_CALLS = 2e-3, 200  # seconds of one timing
SHORT = 16  # elements of an op that is so small that its time is only its start
UNITS = 8  # sizes of the small model with which launches are measured


class Sizes(NamedTuple):
    """The sizes measured on a kind of device, from launch-bound sizes to sizes at full speed."""

    rows: tuple[int, ...]  # rows of a matrix multiplication: tokens or pixels
    matrices: tuple[tuple[int, int], ...]  # outputs and inputs of a matrix multiplication
    most_flops: float
    batches: tuple[tuple[int, int, int, int], ...]  # batched matrix multiplications: number, M, N, K
    attention: tuple[tuple[int, int, int], ...]  # heads of all samples, tokens, width of a head
    convolution: tuple[tuple[int, int, int, int, int], ...]  # images, channels in and out, pixels of a side, kernel
    batch_norm: tuple[tuple[int, int, int], ...]  # images, channels, pixels of a side
    bytes: tuple[int, ...]  # of one operand of the kernels in `_moves`
    stepped: int  # elements of an optimizer's step


CPU = Sizes(
    rows=(64, 256, 1024),
    matrices=((64, 64), (256, 256), (1024, 256), (256, 1024), (1024, 1024), (4096, 1024)),
    most_flops=1.1e9,
    batches=((16, 128, 128, 64), (16, 128, 64, 128)),
    attention=((8, 64, 64), (8, 256, 32), (16, 256, 64), (8, 512, 64)),
    convolution=(
        (16, 3, 64, 32, 3),
        (8, 64, 64, 32, 3),
        (8, 128, 256, 16, 1),
        (8, 256, 256, 8, 3),
        (8, 512, 512, 2, 3),
    ),
    batch_norm=((16, 64, 32), (16, 256, 16), (16, 512, 4)),
    bytes=(2**14, 2**18, 2**22, 2**24, 2**25),
    stepped=2**22,
)
GPU = Sizes(
    rows=(512, 4096, 16384),
    matrices=((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (16384, 4096), (4096, 16384)),
    most_flops=3e12,
    batches=((256, 512, 512, 64), (256, 512, 64, 512)),
    attention=((64, 512, 64), (64, 2048, 64), (32, 2048, 128), (32, 8192, 128)),
    convolution=((64, 3, 64, 224, 7), (64, 64, 64, 56, 3), (64, 256, 1024, 14, 1), (64, 512, 512, 7, 3)),
    batch_norm=((64, 64, 56), (64, 256, 56), (64, 1024, 14)),
    bytes=(2**22, 2**25, 2**28),
    stepped=2**27,
)


class Stopwatch:
    """A clock for kernels on one device. It repeats each kernel for about `budget_s` seconds."""

    def __init__(self, device: torch.device, budget_s: float):
        self.device, self._budget_s = device, budget_s
        # a single thread has its own CPU clock, which other processes do not affect
        self._alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if self._alone else time.perf_counter
        self.call_s = 0.0  # seconds of an op before its kernel begins; on a GPU this overlaps with other kernels
        if device.type == "cpu":
            x = torch.zeros(SHORT)
            self.call_s = self.seconds(lambda: x.add_(1.0))

    def seconds(self, work: Work) -> float:
        """Return the median seconds of a call, with several CPU threads the least."""
        work()
        # as many calls in a row as take about LEAST_S, so that reading the clock does not count
        calls = max(1, min(MOST_CALLS, int(LEAST_S / max(1e-7, self.timed(work, 1)))))
        taken: list[float] = []
        end = time.perf_counter() + self._budget_s
        while len(taken) < 3 or time.perf_counter() < end:
            taken.append(self.timed(work, calls))
        # with several CPU threads, other load slows some calls
        return statistics.median(taken) if self._alone or self.device.type != "cpu" else min(taken)

    def kernel_s(self, work: Work) -> float:
        """Return the seconds of a call minus `call_s`, but at least a fifth of the call."""
        seconds = self.seconds(work)
        return max(seconds - self.call_s, 0.2 * seconds)  # noise must not make a short kernel free

    def timed(self, work: Work, calls: int) -> float:
        """Return the mean seconds of `calls` calls in a row."""
        self._wait()
        start = self._clock()
        for _ in range(calls):
            work()
        self._wait()
        return (self._clock() - start) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_kernels(device: torch.device, budget_s: float) -> dict[str, object]:
    """Return the table of kernels, the host's seconds per op, and optimizer steps' bytes/s."""
    if device.type == "cpu":
        dtypes = (torch.float32, torch.bfloat16)
    elif torch.cuda.get_device_capability(device)[0] < 8:  # GPUs before Ampere have no bf16
        dtypes = (torch.float32, torch.float16)
    else:
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
    watch = Stopwatch(device, budget_s / 10)
    return {
        "kernels": [asdict(kernel) for dtype in dtypes for kernel in _kernels(watch, dtype)],
        "launch_s": _launch_s(watch),
        **_step_bandwidths(watch),
    }


def _kernels(watch: Stopwatch, dtype: torch.dtype) -> Iterator[MeasuredKernel]:
    sizes = CPU if watch.device.type == "cpu" else GPU
    name = str(dtype).removeprefix("torch.")
    with torch.no_grad():
        yield from _products(watch, sizes, dtype, name)
        yield from _moves(watch, sizes, dtype, name)
    yield from _attention(watch, sizes, dtype, name)
    yield from _convolutions(watch, sizes, dtype, name)
    yield from _batch_norms(watch, sizes, dtype, name)


def _operands(watch: Stopwatch, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Operands:
    """Return an endless iterator of operands. Successive ones have other addresses."""
    # operands that are used in turn are not in a cache when they are used again
    size = dtype.itemsize * sum(map(math.prod, shapes))
    count = max(1, min(MOST_OPERANDS, POOL // size))
    first = [torch.randn(*shape, device=watch.device).to(dtype) for shape in shapes]
    return itertools.cycle([[tensor.clone() for tensor in first] for _ in range(count)])


def _keeping(watch: Stopwatch, work: Work, result_bytes: int) -> Work:
    """Return `work`; on a CPU, a function that also keeps its results, as a forward does."""
    if watch.device.type != "cpu":
        return work
    results: list[object] = []

    # Many results are freed together. Freed memory goes back to the system, so new results need new pages. To get new
    # pages takes longer than most kernels.
    def keep() -> None:
        if len(results) * result_bytes >= KEPT:
            while results:
                results.pop()
        results.append(work())

    return keep


def _products(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype, name: str) -> Iterator[MeasuredKernel]:
    shapes = [(1, m, n, k) for m in sizes.rows for n, k in sizes.matrices if 2.0 * m * n * k <= sizes.most_flops]
    for many, m, n, k in (*shapes, *sizes.batches):
        shape = () if many == 1 else (many,)
        operands = _operands(watch, dtype, (*shape, m, k), (*shape, n, k))
        product = torch.mm if many == 1 else torch.bmm

        def work(operands: Operands = operands, product: Callable[..., Tensor] = product) -> Tensor:
            # A linear layer stores its weights as (outputs, inputs), so its product reads them transposed.
            a, b = next(operands)
            return product(a, b.mT)

        seconds = watch.kernel_s(_keeping(watch, work, many * m * n * dtype.itemsize))
        flops = 2.0 * many * m * n * k
        yield MeasuredKernel(kind="product", dtype=name, shape=(m, n, k), flops=flops, seconds=seconds)


def _passes(watch: Stopwatch, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the seconds of a forward, and of the backward to these inputs."""
    out = forward()
    grad = torch.ones_like(out)
    # The graph is kept because the watch calls the backward many times.
    backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    return watch.kernel_s(forward), watch.kernel_s(backward)


def _attention(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype, name: str) -> Iterator[MeasuredKernel]:
    for heads, tokens, width in sizes.attention:
        kernel = MeasuredKernel(kind="attention", dtype=name, shape=(heads, tokens, tokens, width), seconds=0.0)
        inputs = [
            torch.randn(1, heads, tokens, width, device=watch.device).to(dtype).requires_grad_() for _ in range(3)
        ]
        # two products in the forward: q @ k and p @ v. The backward has four, and computes q @ k again.
        flops = 4.0 * heads * tokens * tokens * width
        for causal in (True, False):
            forward = partial(F.scaled_dot_product_attention, *inputs, is_causal=causal)
            for times, seconds in zip((1.0, 2.5), _passes(watch, forward, inputs), strict=True):
                yield replace(kernel, causal=causal, flops=times * flops, seconds=seconds)


def _convolutions(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype, name: str) -> Iterator[MeasuredKernel]:
    """Yield convolutions, forward and backward; with as many outputs as inputs also depthwise."""
    for images, inner, outer, side, width in sizes.convolution:
        for groups in (1, inner) if inner == outer else (1,):
            shape = (images * side * side, outer // groups, inner // groups * width * width)
            kernel = MeasuredKernel(kind="convolution", dtype=name, shape=shape, groups=groups, seconds=0.0)
            x = torch.randn(images, inner, side, side, device=watch.device).to(dtype).requires_grad_()
            weight = torch.randn(outer, inner // groups, width, width, device=watch.device).to(dtype).requires_grad_()
            forward = partial(F.conv2d, x, weight, padding=width // 2, groups=groups)
            flops = 2.0 * shape[0] * shape[1] * shape[2] * groups
            for times, seconds in zip((1.0, 2.0), _passes(watch, forward, (x, weight)), strict=True):
                yield replace(kernel, flops=times * flops, seconds=seconds)


def _batch_norms(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype, name: str) -> Iterator[MeasuredKernel]:
    """Yield batch norms, forward and backward as one kernel."""
    for images, channels, side in sizes.batch_norm:
        norm = nn.BatchNorm2d(channels).to(watch.device, dtype)
        x = torch.randn(images, channels, side, side, device=watch.device).to(dtype).requires_grad_()
        yield MeasuredKernel(
            kind="normalisation",
            dtype=name,
            shape=(channels,),
            groups=channels,
            moved_bytes=8 * x.nbytes,  # three passes over the activations in the forward, five in the backward
            seconds=sum(_passes(watch, partial(norm, x), (x, *norm.parameters()))),
        )


def _moves(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype, name: str) -> Iterator[MeasuredKernel]:
    """Yield memory-bound kernels: for each kind, the mean of some kernels that models use."""
    for size in sizes.bytes:
        shape = (size // dtype.itemsize // 256, 256)
        operands = _operands(watch, dtype, shape, shape)
        rows = torch.randint(shape[0], (shape[0],), device=watch.device)
        kinds: dict[str, tuple[tuple[int, Callable[[Tensor, Tensor], Tensor]], ...]] = {  # operands read and written
            "elementwise": ((3, torch.mul), (3, torch.add), (2, lambda x, _: F.silu(x))),
            "normalisation": ((2, lambda x, _: F.layer_norm(x, (256,))), (2, lambda x, _: torch.softmax(x, -1))),
            "copy": ((2, lambda x, _: x.clone()), (2, lambda x, _: x.view(-1, 4, 64).transpose(0, 1).contiguous())),
            "embedding": ((2, lambda x, _, rows=rows: F.embedding(rows, x)),),
        }
        for kind, works in kinds.items():
            moved = sum(count for count, _ in works) * size / len(works)
            alone = [lambda op=op, of=operands: op(*next(of)) for _, op in works]
            taken = [watch.kernel_s(_keeping(watch, work, size)) for work in alone]
            seconds = sum(taken) / len(works)
            yield MeasuredKernel(kind=kind, dtype=name, moved_bytes=moved, seconds=seconds)


class _KernelCount(TorchDispatchMode):
    """A counter of the ops that launch a kernel; views and plain allocations do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        alias = next((r.alias_info for r in func._schema.returns), None)
        # An op whose result only shares memory with an input is a view. An in-place op shares it, too, but writes.
        if (alias is None or alias.is_write) and "empty" not in func.__name__ and "detach" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _launch_s(watch: Stopwatch) -> float:
    """Return the host's seconds per op."""
    # modules so small that their kernels need no time
    units = [nn.Sequential(nn.Linear(SHORT, SHORT), nn.SiLU(), nn.LayerNorm(SHORT)) for _ in range(UNITS)]
    model = nn.Sequential(*units).to(watch.device)
    x = torch.ones(2, SHORT, device=watch.device)

    def step() -> None:
        model(x).sum().backward()

    step()
    with _KernelCount() as counted:
        step()
    return watch.seconds(step) / counted.count


def _step_bandwidths(watch: Stopwatch) -> dict[str, float]:
    """Return bytes/s of optimizer steps on the device, with the gradients' norm and scaling."""
    elements = CPU.stepped if watch.device.type == "cpu" else GPU.stepped
    parameter = nn.Parameter(torch.zeros(elements, device=watch.device))
    parameter.grad = torch.ones_like(parameter)
    optimizers = {
        "adam_bandwidth": (ADAM_BYTES, torch.optim.AdamW([parameter], fused=watch.device.type == "cuda")),
        "sgd_bandwidth": (SGD_BYTES, torch.optim.SGD([parameter], momentum=0.9, weight_decay=0.01)),
    }

    def step(optimizer: torch.optim.Optimizer) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(1.0 / (1.0 + 0.0 * parameter.grad.norm()))  # reads the norm, but leaves the gradient
        optimizer.step()

    return {
        name: size * elements / watch.seconds(lambda optimizer=optimizer: step(optimizer))
        for name, (size, optimizer) in optimizers.items()
    }
