"""Safe loading of torch files: no code in them is run."""

from __future__ import annotations

import importlib
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from enum import EnumType
from pathlib import Path
from typing import Any

import torch

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.process import deepspeed_quiet


# A pickle may name any class or function, and unpickling calls it. torch's weights-only unpickler accepts tensors,
# plain containers and the names that it is given. DeepSpeed's files name four classes; none of their code is needed
# here.
class InertFragment:
    """A part of a flat partition: attributes `start` and `numel`, in elements."""


class InertLossScaler:
    """A loss scaler's attributes: cur_scale, and for a dynamic one cur_iter, cur_hysteresis and its settings."""


# Classes in DeepSpeed's files, and their replacements, so reading a checkpoint does not import DeepSpeed (which
# takes seconds). Creating a replacement runs no code.
REPLACEMENTS: dict[str, type] = {
    # runtime/zero/stage_1_and_2.py and bf16_optimizer.py, `param_slice_mappings`
    "deepspeed.utils.tensor_fragment.fragment_address": InertFragment,
    # the ZeRO optimizers' `loss_scaler`, also in fp32 and bf16
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": InertLossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": InertLossScaler,
    # the ZeRO optimizers' `zero_stage`: an enum of integers
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # members of ZeroStageEnum


def _member(kind: Any, name: str) -> Any:
    """Return only enum members: Python before 3.11.4 pickles them as `getattr(class, name)`."""
    if kind is int and name in ZERO_STAGES:
        return ZERO_STAGES[name]
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")


def load(path: Path | str, mmap: bool = True, for_engine: bool = False) -> Any:
    """Load a torch file with its tensors on the CPU; with `mmap` they stay on disk until they are read.

    Only tensors, plain values and the classes above are loaded. With `for_engine` DeepSpeed's own classes are used,
    which its engine needs to resume.

    Raises UserError: "unsafe-file" if the file needs other classes, "damaged-file" if it cannot be parsed,
    "missing-file" if it cannot be read.
    """
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    with deepspeed_quiet() if for_engine else nullcontext():
        for name, replacement in REPLACEMENTS.items():
            module, _, attribute = name.rpartition(".")
            allowed.append((getattr(importlib.import_module(module), attribute) if for_engine else replacement, name))
    allowed.append((_member, "builtins.getattr"))
    try:
        in_place = mmap and zipfile.is_zipfile(path)  # torch's older format cannot be memory-mapped
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=in_place)
    except OSError as error:
        raise _error("missing-file", f"{path} cannot be read: {error.strerror}", "", path) from None
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from None
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _refused(path: Path | str, reason: str) -> UserError:
    match = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", reason)
    if match is None:
        return _damaged(path, reason)
    message = f"{path} contains {match[1]}, which could run code and does not belong in a checkpoint"
    return _error("unsafe-file", message, "use a checkpoint that you trust; nothing in this one was run", path)


def _damaged(path: Path | str, reason: str) -> UserError:
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    return _error("damaged-file", f"{path} is damaged or not a torch file: {first}", "use an older checkpoint", path)


def _error(kind: str, message: str, hint: str, path: Path | str) -> UserError:
    return UserError(Problem(kind=kind, message=message, hint=hint, where=str(path)))
