"""Create optimizers that DeepSpeed cannot create by name, such as bitsandbytes' 8-bit AdamW."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import version

import torch
from torch.optim import Optimizer

from zerofit.check.dotted import get
from zerofit.features.optimizers import OPTIMIZERS, of_json
from zerofit.models.quantized import PACKAGE, library
from zerofit.spec.errors import Problem


def own_optimizer(config: Mapping[str, object], groups: list[dict[str, object]], on_cpu: bool) -> Optimizer | None:
    """Return the optimizer that a JSON names if DeepSpeed cannot create it, else None."""
    entry = of_json(get(config, "optimizer.type"))
    path = entry and (entry.cpu_class if on_cpu else entry.gpu_class)
    if not entry or not path:
        return None
    if entry.library == PACKAGE:
        library()
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(groups, **get(config, "optimizer.params", {}))


@torch.no_grad()
def forget_states(optimizer: Optimizer) -> None:
    """Reset an optimizer's states."""
    if not hasattr(optimizer, "page_mng"):
        optimizer.state.clear()
    # bitsandbytes never frees paged memory, so its states are zeroed and reused
    for state in optimizer.state.values():
        state["step"] = 0
        for name in {"state1", "state2", "absmax1", "absmax2"} & set(state):
            state[name].zero_()


def missing_kernels(optimizer: str | None, accelerator: str | None) -> Problem | None:
    """Return why an optimizer cannot run on an accelerator ("cpu" or "cuda"); None if it can."""
    entry = OPTIMIZERS.get(optimizer or "")
    if entry is None or entry.library is None:
        return None
    option = f"--optimizer {optimizer}"
    if importlib.util.find_spec(PACKAGE) is None:
        message = f"{option} needs {PACKAGE}, which is not installed"
        return Problem(kind="optimizer", message=message, hint="pip install 'zerofit[quantize]'", where="--optimizer")
    library()  # its import registers the kernels
    if accelerator is None or torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{PACKAGE}::{entry.kernel}", accelerator.upper()
    ):
        return None
    message = f"{option}: {PACKAGE} {version(PACKAGE)} has no kernel for {accelerator}"
    hint = f"pip install '{PACKAGE}>=0.50.2', or use --optimizer adamw"
    return Problem(kind="optimizer", message=message, hint=hint, where="--optimizer")
