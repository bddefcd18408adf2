"""What can go wrong while a model runs, as run failures that name the knob."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.spec.errors import Problem, RunFailed


@contextmanager
def failures(model: nn.Module, smaller: str) -> Iterator[None]:
    """Turns a lack of memory, and the use of weights that are not there, into RunFailed.

    `smaller` is the flag to turn down.
    """
    offloaded = any(parameter.is_meta for parameter in model.parameters())
    try:
        with _Guard() if offloaded else nullcontext():
            yield
    except torch.OutOfMemoryError as error:
        raise _memory(str(error).splitlines()[0], smaller) from error
    except MemoryError as error:
        raise _memory("the host has no memory left", smaller) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise _memory("the host has no memory left", smaller) from error


class _Guard(TorchDispatchMode):
    """Stops where a module uses weights of another one, which lie elsewhere until that one runs.

    torch 2.14's products and convolutions on the CPU take such a weight on the meta device without a word and give
    back whatever lies in the memory of the result.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if "meta" in devices and len(devices) > 1:
            message = "a module uses weights of another one, which lie on the disk (or in memory) until that one runs"
            hint = "let all of it stay on one device: more in --max-memory, or --dtype bf16"
            raise RunFailed(Problem(kind="offloaded-weights", message=message, hint=hint, where="CKPT"))
        return func(*args, **(kwargs or {}))


def _memory(message: str, smaller: str) -> RunFailed:
    hint = f"a smaller {smaller}, less in --max-memory for that device, or --dtype bf16"
    return RunFailed(Problem(kind="out-of-memory", message=message, hint=hint, where="--max-memory"))
