"""What a simulated pipeline stage receives: nobody sends it shapes and types, so they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Sizes = Sequence[tuple[Sequence[int], torch.dtype]]  # of the tensors that arrive together


def give_input(engine: Any, sent_by: Callable[[int], tuple[Sizes, bool]]) -> None:
    """Let a pipeline's engine receive tensors of known shapes: `sent_by` gives a stage's, and whether they are a tuple.

    DeepSpeed sends them as numbers ahead of the first tensors (runtime/pipe/engine.py, `_recv_tensor_meta`), which are
    zeros in a process group that sends nothing.
    """

    def received(send_stage: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sizes, is_tuple = sent_by(send_stage)
        buffers = [engine._allocate_or_extend_buffers(n, list(shape), dtype) for n, (shape, dtype) in enumerate(sizes)]
        return tuple(buffers) if is_tuple else buffers[0]

    engine._recv_tensor_meta = received
