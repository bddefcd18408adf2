"""Give a simulated pipeline stage the shapes and dtypes of its input.

The stage before it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

Sizes = Sequence[tuple[Sequence[int], torch.dtype]]  # of the tensors that arrive together


def give_input(engine: PipelineEngine, sent_by: Callable[[int], tuple[Sizes, bool]]) -> None:
    """Make a pipeline engine receive tensors of known shapes.

    `sent_by` returns the shapes that a stage sends, and whether they are a tuple.
    """

    # DeepSpeed sends the shapes as numbers before the first tensors (runtime/pipe/engine.py, `_recv_tensor_meta`). A
    # simulated process group sends nothing, so these numbers would be zeros.
    def received(send_stage: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sizes, is_tuple = sent_by(send_stage)
        buffers = [engine._allocate_or_extend_buffers(n, list(shape), dtype) for n, (shape, dtype) in enumerate(sizes)]
        return tuple(buffers) if is_tuple else buffers[0]

    vars(engine)["_recv_tensor_meta"] = received
