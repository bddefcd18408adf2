"""Guards of a running model: failures become RunFailed, and libraries print nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.spec.errors import Problem, RunFailed


@contextmanager
def failures(knob: str) -> Iterator[None]:
    """Turn out-of-memory errors into RunFailed. `knob`: the change that reduces the memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        message = "the host has no memory left"
        if isinstance(error, torch.OutOfMemoryError):
            message = str(error).splitlines()[0]
        # torch's CPU allocator has no error class of its own. It raises RuntimeError with these words.
        elif isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        hint = f"{knob}, a lower --max-memory for that device, or --dtype bf16"
        raise RunFailed(Problem(kind="out-of-memory", message=message, hint=hint, where="--max-memory")) from error


def guarded(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context that raises RunFailed if a module uses weights that are not loaded."""
    return _Guard() if any(parameter.is_meta for parameter in model.parameters()) else nullcontext()


# Offloaded weights are loaded only while their own module runs. Otherwise they are on the meta device. On the CPU,
# torch 2.14's matrix products and convolutions accept meta weights and return uninitialized memory.
# Example: torch's attention reads the weight of its output projection without calling that module, so accelerate's hook
# does not load it.
class _Guard(TorchDispatchMode):
    """Raises an error if a running module uses offloaded weights of another module."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if "meta" in devices and len(devices) > 1:
            message = "a module uses another module's weights, but offloaded weights are loaded only for their module"
            hint = "keep the model on one device: raise --max-memory, or use --dtype bf16"
            raise RunFailed(Problem(kind="offloaded-weights", message=message, hint=hint, where="CKPT"))
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars, reports and warnings of transformers and accelerate."""
    from transformers.utils import logging as theirs

    levels = {name: logging.getLogger(name).level for name in ("accelerate.big_modeling", "accelerate.utils.modeling")}
    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
