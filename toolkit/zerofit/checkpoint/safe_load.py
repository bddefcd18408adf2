"""Safe loading of torch files: nothing that lies in them runs."""

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


class InertFragment:
    """A stretch of a flat partition: attributes `start` and `numel`, in elements."""


class InertLossScaler:
    """A loss scaler's attributes: cur_scale, and for a dynamic one cur_iter, cur_hysteresis and its settings."""


# Everything in DeepSpeed's files that is neither a tensor nor a plain value, and the class that replaces it here, so
# that reading a checkpoint needs no DeepSpeed (whose import takes seconds). None of them runs code when it is made.
REPLACEMENTS: dict[str, type] = {
    # runtime/zero/stage_1_and_2.py and bf16_optimizer.py, `param_slice_mappings`
    "deepspeed.utils.tensor_fragment.fragment_address": InertFragment,
    # the ZeRO optimizers' `loss_scaler`, which is there in fp32 and bf16 too
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": InertLossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": InertLossScaler,
    # the ZeRO optimizers' `zero_stage`: an enum of integers
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # its members


def _member(kind: Any, name: str) -> Any:
    """Return an enum's member: Python before 3.11.4 pickles it as `getattr(class, name)`. Nothing else is given."""
    if kind is int and name in ZERO_STAGES:
        return ZERO_STAGES[name]
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL getattr was not an allowed global")


def load(path: Path | str, mmap: bool = True, for_engine: bool = False) -> Any:
    """Load a torch file with its tensors on the CPU; with `mmap` they stay on disk until they are read.

    Nothing but tensors, plain values and the table above is made. `for_engine` gives DeepSpeed's own objects in place
    of the replacements, which its engine needs to resume.

    Raises UserError: "unsafe-file" where the file asks for anything else, "damaged-file" where it cannot be parsed,
    "missing-file" where there is none to be read.
    """
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    with deepspeed_quiet() if for_engine else nullcontext():
        for name, replacement in REPLACEMENTS.items():
            module, _, attribute = name.rpartition(".")
            allowed.append((getattr(importlib.import_module(module), attribute) if for_engine else replacement, name))
    allowed.append((_member, "builtins.getattr"))
    try:
        in_place = mmap and zipfile.is_zipfile(path)  # torch's older format cannot be mapped
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=in_place)
    except OSError as error:
        raise _error("missing-file", f"{path} cannot be read: {error.strerror}", "", path) from None
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from None
    except Exception as error:  # a damaged file can make the parser stumble anywhere
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _refused(path: Path | str, reason: str) -> UserError:
    asked = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", reason)
    if asked is None:
        return _damaged(path, reason)
    message = f"{path} asks for {asked[1]}, which no checkpoint needs: loading it could run somebody's code"
    return _error("unsafe-file", message, "take a checkpoint whose origin you know; nothing in this one was run", path)


def _damaged(path: Path | str, reason: str) -> UserError:
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "")
    return _error("damaged-file", f"{path} is not a whole torch file: {first}", "take an older checkpoint", path)


def _error(kind: str, message: str, hint: str, path: Path | str) -> UserError:
    return UserError(Problem(kind=kind, message=message, hint=hint, where=str(path)))
