"""What can go wrong while a model runs, as run failures that name the knob."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerofit.spec.errors import Problem, RunFailed


@contextmanager
def failures(smaller: str) -> Iterator[None]:
    """Turns a lack of memory and weights that are not there into RunFailed; `smaller` is the flag to turn down."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _memory(str(error).splitlines()[0], smaller) from error
    except MemoryError as error:
        raise _memory("the host has no memory left", smaller) from error
    except RuntimeError as error:
        text = str(error)
        if "can't allocate memory" in text:
            raise _memory("the host has no memory left", smaller) from error
        if "meta" in text:
            message = "a module uses weights of another one, which lie on the disk until that one runs"
            hint = "give it memory to stay in: --max-memory cpu=..., or --dtype bf16"
            raise RunFailed(Problem(kind="offloaded-weights", message=message, hint=hint, where="CKPT")) from error
        raise


def _memory(message: str, smaller: str) -> RunFailed:
    hint = f"a smaller {smaller}, less in --max-memory for that device, or --dtype bf16"
    return RunFailed(Problem(kind="out-of-memory", message=message, hint=hint, where="--max-memory"))
