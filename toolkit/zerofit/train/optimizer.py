"""bitsandbytes' 8-bit and paged AdamW, which DeepSpeed cannot create by name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch.optim import Optimizer

from zerofit.check.dotted import get
from zerofit.models.quantized import PACKAGE, library
from zerofit.spec.errors import Problem
from zerofit.spec.optimizers import EIGHT_BIT, EIGHT_BIT_OP, run_name


def own_optimizer(config: Mapping[str, Any], groups: list[dict[str, Any]]) -> Optimizer | None:
    """Return the optimizer that a DeepSpeed JSON names if DeepSpeed cannot create it, else None."""
    name = run_name(str(get(config, "optimizer.type")))
    if name not in EIGHT_BIT:
        return None
    library()
    made = getattr(importlib.import_module(f"{PACKAGE}.optim"), EIGHT_BIT[name])
    return made(groups, **get(config, "optimizer.params", {}))


@torch.no_grad()
def forget_states(optimizer: Optimizer) -> None:
    """Reset an optimizer's states. bitsandbytes never frees paged memory, so its states are zeroed and reused."""
    if not hasattr(optimizer, "page_mng"):
        optimizer.state.clear()
    for state in optimizer.state.values():
        state["step"] = 0
        for name in {"state1", "state2", "absmax1", "absmax2"} & set(state):
            state[name].zero_()


def missing_kernels(optimizer: str, accelerator: str | None) -> Problem | None:
    """Return why bitsandbytes' optimizer cannot run here on an accelerator ("cpu" or "cuda"), or None if it can."""
    option = f"--optimizer {optimizer}"
    if importlib.util.find_spec(PACKAGE) is None:
        message = f"{option} needs {PACKAGE}, which is not installed"
        return Problem(kind="optimizer", message=message, hint="pip install 'zerofit[quantize]'", where="--optimizer")
    library()
    if accelerator is None or torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{PACKAGE}::{EIGHT_BIT_OP}", accelerator.upper()
    ):
        return None
    message = f"{option}: {PACKAGE} {version(PACKAGE)} has no kernel for {accelerator}"
    hint = f"pip install '{PACKAGE}>=0.50.2', or use --optimizer adamw"
    return Problem(kind="optimizer", message=message, hint=hint, where="--optimizer")
