"""Loading weights to where a placement has them; those on disk are read again at each forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from accelerate import dispatch_model
from accelerate.utils import find_tied_parameters, retie_parameters, set_module_tensor_to_device
from safetensors import safe_open
from torch import nn

from zerofit.infer.meta_model import loads_whole
from zerofit.infer.placement import Placement, device_of
from zerofit.infer.quiet import quiet
from zerofit.infer.saved_model import SavedModel
from zerofit.infer.weights import StoredTensor
from zerofit.models.hf import AUTO_CLASSES
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter


def load_model(
    saved: SavedModel, empty: nn.Module, placement: Placement, dtype: torch.dtype, scratch: Path, report: Reporter
) -> nn.Module:
    """Return the model with its weights in place, ready to run on `placement.execution_device`.

    What the map has on the disk stays in the model's files, which safetensors maps into memory layer by layer; only
    tensors that lie there otherwise than the model needs them (pickles, single experts) are written to `scratch`.
    `empty` may be used up. Raises UserError where the files do not hold what the model needs.
    """
    with quiet():
        if saved.source.family == "transformers":
            with report.task("loading weights", None, ""):
                return _transformers(saved, empty, placement, dtype, scratch)
        return _dispatched(saved, empty, placement, report)


def _transformers(
    saved: SavedModel, empty: nn.Module, placement: Placement, dtype: torch.dtype, scratch: Path
) -> nn.Module:
    import transformers

    try:
        model, loaded = getattr(transformers, AUTO_CLASSES[saved.task]).from_pretrained(
            saved.folder,
            config=empty.config,
            dtype=dtype,
            device_map=dict(placement.device_map),
            offload_folder=str(scratch),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # files that do not go with their config show in many ways
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "are config.json and the weights of one model?"
        problem = Problem(kind="model-weights", message=f"{saved.folder}: {first}", hint=hint, where="CKPT")
        raise UserError(problem) from error
    _refuse(sorted(loaded["missing_keys"]), saved)  # transformers would have drawn them at random
    return model


def _dispatched(saved: SavedModel, model: nn.Module, placement: Placement, report: Reporter) -> nn.Module:
    """Load any other model: tensor by tensor to its device, and hooks for what stays on the disk."""
    stored = _by_name(saved, model)
    ties = find_tied_parameters(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    on_disk: dict[str, dict[str, Any]] = {}
    with report.task("loading weights", len(stored), "tensors") as task:
        for name, (key, where) in stored.items():
            device = device_of(name, placement.device_map)
            if device == "disk" and name in parameters:
                on_disk[name] = {"safetensors_file": str(where.file), "weight_name": key}
            else:
                with safe_open(where.file, framework="pt") as file:
                    value = file.get_tensor(key)
                assert device is not None, name  # the map covers all tensors
                target = placement.execution_device if device == "disk" else device
                set_module_tensor_to_device(model, name, target, value=value)
            task.advance()
    retie_parameters(model, ties)
    return dispatch_model(
        model,
        dict(placement.device_map),
        main_device=cast(Any, placement.main),
        offload_index=cast(Any, on_disk or None),
        preload_module_classes=loads_whole(model),
    )


def _by_name(saved: SavedModel, model: nn.Module) -> dict[str, tuple[str, StoredTensor]]:
    """Return each name in the model's state_dict with its place in the files; tied ones may be there once only."""
    held = saved.weights.tensors
    twins = {name: group for group in find_tied_parameters(model) for name in group}
    found: dict[str, tuple[str, StoredTensor]] = {}
    missing, problems = [], Problems()
    for name, tensor in model.state_dict().items():
        key = next((n for n in (name, *twins.get(name, ())) if n in held), None)
        if key is None:
            missing.append(name)
            continue
        found[name] = (key, held[key])
        if held[key].shape != tuple(tensor.shape):
            message = f"{name} is {held[key].shape} in {held[key].file.name}, {tuple(tensor.shape)} in the model"
            problems.add("model-weights", message, "is the model's code what it was when it was trained?", "CKPT")
    problems.raise_if_any()
    _refuse(missing, saved)
    return found


def _refuse(missing: list[str], saved: SavedModel) -> None:
    """Raise UserError where the model has tensors that the files lack."""
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        message = f"{saved.folder} lacks weights that the model has: {shown}"
        hint = "are config.json (or zerofit.json) and the weights of one model?"
        raise UserError(Problem(kind="model-weights", message=message, hint=hint, where="CKPT"))
