"""Seconds of kernels by shape and dtype, by the device's own clock, each after its caches were overwritten."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .part import Measure

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
CALLS, CACHE = 5, 2**28
# images, channels in and out, side, width of the kernel, groups, stride: one channel a group, several, and all together
CONVOLUTIONS = [
    *((64, 32, 32, 112, 3, 32, 1), (64, 96, 96, 112, 3, 96, 2), (64, 144, 144, 56, 3, 144, 1)),
    *((64, 192, 192, 28, 3, 192, 1), (64, 384, 384, 14, 3, 384, 1), (64, 960, 960, 7, 3, 960, 1)),
    *((64, 240, 240, 28, 5, 240, 1), (64, 672, 672, 14, 5, 672, 1), (64, 96, 96, 56, 7, 96, 1)),
    *((64, 384, 384, 14, 7, 384, 1), (64, 128, 128, 56, 3, 32, 1), (64, 512, 512, 14, 3, 32, 1)),
    *((64, 64, 256, 56, 1, 1, 1), (64, 256, 64, 56, 1, 1, 1), (64, 16, 96, 112, 1, 1, 1), (64, 24, 144, 56, 1, 1, 1)),
    *((64, 960, 160, 7, 1, 1, 1), (64, 128, 128, 28, 3, 1, 1), (64, 3, 32, 224, 3, 1, 2), (64, 128, 128, 56, 3, 1, 2)),
]
# images, channels, side
BATCH_NORMS = [
    *((64, 32, 112), (64, 64, 112), (64, 64, 56), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7)),
    *((256, 64, 56), (64, 960, 7)),
]
# M, N, K: rows that are odd, even, and multiples of 8 elements; then sizes
PRODUCTS = [
    *((2048, 50257, 768), (2048, 50258, 768), (2048, 50260, 768), (2048, 50264, 768), (2048, 50304, 768)),
    *((2048, 30522, 1024), (2048, 30524, 1024), (2048, 30528, 1024), (6304, 1001, 1024)),
    *((1024, 1024, 1024), (4096, 1024, 1024), (6304, 1024, 1024), (4096, 4096, 1024), (4096, 4096, 4096)),
    *((16384, 1024, 4096), (8192, 8192, 8192)),
]
# batch, heads, tokens, width
ATTENTIONS = [
    *((8, 16, 128, 64), (8, 16, 384, 64), (8, 16, 512, 64), (8, 12, 1024, 64), (2, 32, 2048, 64)),
    *((1, 32, 4096, 128), (1, 32, 8192, 128), (32, 16, 197, 64), (64, 16, 577, 64)),
]
MOVED = [2**20, 2**22, 2**24, 2**26, 2**28]  # bytes of an operand
REHEARSED = 4  # a CPU takes sizes so many times smaller

Row = dict[str, Any]


def cases(rehearse: bool) -> list[str]:
    """Kinds of kernels by dtype."""
    kinds = [f"{kind} {dtype}" for dtype in DTYPES for kind in _KINDS]
    return ["batch norms fp32", "moves fp32"] if rehearse else kinds


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Measure all shapes of a kind in a dtype."""
    clock = _Clock("cuda" if torch.cuda.is_available() else "cpu")

    def measure(case: str) -> dict[str, Any]:
        kind, _, dtype = case.rpartition(" ")
        return {"rows": list(_KINDS[kind](clock, DTYPES[dtype], REHEARSED if rehearse else 1))}

    yield measure


class _Clock:
    """Median seconds of a call's kernels."""

    def __init__(self, device: str):
        self.device = device
        self._overwritten = torch.empty(CACHE if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], Any]) -> float:
        work()
        return statistics.median([self._on_gpu(work) if self.device == "cuda" else _host(work) for _ in range(CALLS)])

    def _on_gpu(self, work: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._overwritten.zero_()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def both(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> dict[str, float]:
        """Return the seconds of a forward, and of its backward to these inputs."""
        made = forward()
        grad = torch.ones_like(made)
        backward_s = self.seconds(lambda: torch.autograd.grad(made, inputs, grad, retain_graph=True))
        return {"forward_s": self.seconds(forward), "backward_s": backward_s}

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)


def _host(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _convolutions(clock: _Clock, dtype: torch.dtype, less: int) -> Iterator[Row]:
    for name, (images, inner, outer, side, width, groups, stride) in itertools.product(FORMATS, CONVOLUTIONS):
        made = nn.Conv2d(inner, outer, width, stride, width // 2, groups=groups, bias=False)
        module = made.to(clock.device, dtype, memory_format=FORMATS[name])  # type: ignore[call-overload]
        x = clock.random(images // less, inner, side, side, dtype=dtype).to(memory_format=FORMATS[name])
        x.requires_grad_()
        out = module(x)
        shape = {"images": len(x), "in": inner, "out": outer, "side": side, "width": width}
        flops = 2 * out.numel() * (inner // groups) * width**2
        row = {
            "format": name,
            **shape,
            "groups": groups,
            "stride": stride,
            "flops": flops,
            "bytes": x.nbytes + out.nbytes,
        }
        yield row | clock.both(lambda module=module, x=x: module(x), (x, module.weight))


def _batch_norms(clock: _Clock, dtype: torch.dtype, less: int) -> Iterator[Row]:
    """In 16 bits with parameters of the same, and of float32."""
    for kept, name in itertools.product(dict.fromkeys((dtype, torch.float32)), FORMATS):
        for images, channels, side in BATCH_NORMS:
            module = nn.BatchNorm2d(channels).to(clock.device, kept)
            x = clock.random(images // less, channels, side, side, dtype=dtype).to(memory_format=FORMATS[name])
            x.requires_grad_()
            row = {"format": name, "parameters": str(kept), "images": len(x), "channels": channels, "side": side}
            yield row | {"bytes": x.nbytes} | clock.both(lambda m=module, x=x: m(x), (x, *module.parameters()))


def _products(clock: _Clock, dtype: torch.dtype, less: int) -> Iterator[Row]:
    for m, n, k in PRODUCTS:
        x = clock.random(m // less, k, dtype=dtype).requires_grad_()
        weight = clock.random(n, k, dtype=dtype).requires_grad_()
        row = {"m": len(x), "n": n, "k": k, "flops": 2 * len(x) * n * k}
        yield row | clock.both(lambda x=x, weight=weight: x @ weight.T, (x, weight))


def _attentions(clock: _Clock, dtype: torch.dtype, less: int) -> Iterator[Row]:
    for batch, heads, tokens, width in ATTENTIONS:
        q, k, v = (clock.random(batch, heads // less, tokens, width, dtype=dtype).requires_grad_() for _ in range(3))
        mask = torch.zeros(batch, 1, tokens, tokens, device=clock.device, dtype=dtype)
        hows: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"is_causal": True}}
        for how, more in (hows | {"mask": {"attn_mask": mask}, "dropout": {"dropout_p": 0.1}}).items():
            shape = {"batch": batch, "heads": q.shape[1], "tokens": tokens, "width": width, "how": how}
            flops = 4 * batch * q.shape[1] * tokens**2 * width
            seconds = clock.both(
                lambda q=q, k=k, v=v, more=more: F.scaled_dot_product_attention(q, k, v, **more), (q, k, v)
            )
            yield shape | {"flops": flops} | seconds


def _moves(clock: _Clock, dtype: torch.dtype, less: int) -> Iterator[Row]:
    """Kernels that move more than they compute: bytes are those that they read and write."""
    for size in MOVED[: 5 if less == 1 else 2]:
        x, y = (clock.random(size // dtype.itemsize // 1024, 1024, dtype=dtype) for _ in range(2))
        works: dict[str, tuple[float, Callable[[], Any]]] = {
            "add": (3, lambda x=x, y=y: x + y),
            "gelu": (2, lambda x=x: F.gelu(x)),
            "dropout": (2 + 1 / dtype.itemsize, lambda x=x: F.dropout(x)),
            "softmax": (2, lambda x=x: torch.softmax(x, -1)),
            "layer norm": (2, lambda x=x: F.layer_norm(x, (1024,))),
            "copy": (2, lambda x=x: x.clone()),
            "transpose": (2, lambda x=x: x.view(-1, 4, 256).transpose(0, 1).contiguous()),
        }
        for name, (passes, work) in works.items():
            yield {"op": name, "bytes": round(passes * x.nbytes), "seconds": clock.seconds(work)}


_KINDS: dict[str, Callable[[_Clock, torch.dtype, int], Iterator[Row]]] = {
    "convolutions": _convolutions,
    "batch norms": _batch_norms,
    "products": _products,
    "attentions": _attentions,
    "moves": _moves,
}
