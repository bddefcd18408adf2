"""What a CPU kernel takes beside its outputs while it runs, measured by running it once.

oneDNN's products and convolutions choose blocked copies and work buffers by processor, threads and shape: no formula
tells them. So each op that is known to take some is run on zeros of the same shapes, strides and types.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zerofit.simulate.ops.costs import scratch_on

from .meter import AllocatorMeter

# ops of this project's models that take more than 100 bytes beside their outputs; seen by running all of them
TAKING = {
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::mean",
    "aten::cumsum",
    "aten::embedding",
    "aten::embedding_dense_backward",
    "aten::native_batch_norm",
    "aten::native_batch_norm_backward",
    "aten::native_layer_norm_backward",
    "aten::_safe_softmax",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}


BATCH_NORM = "aten::native_batch_norm_backward"


class KernelScratch:
    """Bytes that an op takes and gives back while it runs; each kind of call is measured once.

    Of ops that are not measured, the known ones (`zerofit.simulate.ops.costs.scratch_on`).
    """

    def __init__(self) -> None:
        self._meter, self._unmeasured = AllocatorMeter(), scratch_on("cpu")
        self._known: dict[Any, int] = {}

    def __call__(self, op: str, args: Any, kwargs: Any, out: Any) -> int:
        """The scratch of this call (`zerofit.simulate.ops.costs.Scratch`); its tensors may be fakes."""
        if op not in TAKING:
            return self._unmeasured(op, args, kwargs, out)
        key = (op, *(_described(leaf) for leaf in tree_leaves((args, kwargs))))
        if key not in self._known:
            with _disable_current_modes(), torch.no_grad():
                args, kwargs = tree_map(_zeros, (args, kwargs))
                self._known[key] = self._measure(op, _with_statistics(args) if op == BATCH_NORM else args, kwargs)
        return self._known[key]

    def _measure(self, op: str, args: Any, kwargs: Any) -> int:
        packet = getattr(torch.ops.aten, op.removeprefix("aten::"))
        before = self._meter.live()
        self._meter.reset_peak()
        out = packet(*args, **kwargs)
        taken = self._meter.peak() - before
        kept = self._meter.live() - before
        del out
        return taken - kept


def _with_statistics(args: Any) -> Any:
    """Give a batch norm's backward the type of statistics that kernels keep; fakes have the input's.

    Beside float32 weights that is float32 (aten/src/ATen/native/mixed_data_type.h).
    """
    weight, statistics = args[2], args[5:7]
    return (*args[:5], *(one.to(weight.dtype) for one in statistics), *args[7:])


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(leaf.shape), tuple(leaf.stride())
    return leaf


def _zeros(leaf: Any) -> Any:
    """A real tensor of zeros like this one; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(tuple(leaf.shape), tuple(leaf.stride()), dtype=leaf.dtype, device="cpu").zero_()
