"""Open a saved model and load it to its devices: the steps that `eval` and `generate` share.

    open_model          folder -> SavedModel: a checkpoint is exported, adapters are merged
    session.empty       the model on the meta device
    session.load        place (which weights go where) -> load_model (read them)

Weights that stay on disk are read from the model's files at each forward. `WeightRewrite` first rewrites files that
a forward cannot read as they are.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import dispatch_model
from accelerate.utils import find_tied_parameters, retie_parameters, set_module_tensor_to_device
from torch import Tensor, nn

from zerofit.checkpoint.adapters import is_adapters
from zerofit.checkpoint.export import export
from zerofit.checkpoint.model_folder import TensorEntry, TensorFile, refuse_small_disk
from zerofit.checkpoint.published import PublishedModel, PublishedTensor
from zerofit.checkpoint.safe_load import load
from zerofit.checkpoint.store import is_own, manifest_of
from zerofit.infer.guards import failures, quiet
from zerofit.infer.limits import Device, MemoryLimits
from zerofit.infer.memory import peak_device_bytes, return_freed_memory_at_once, start_counting
from zerofit.infer.placement import (
    DeviceRow,
    Placement,
    classes_loaded_together,
    device_of,
    empty_model,
    main_device,
    place,
    refuse_misfit,
    table_rows,
)
from zerofit.infer.saved_model import MODEL, SavedModel, StoredWeights, is_checkpoint, open_saved, read_weights
from zerofit.models.catalog import QUANTIZED, source_config
from zerofit.models.dtypes import DTYPES, NAMES
from zerofit.models.hf import AUTO_CLASSES
from zerofit.spec.errors import DoesNotFit, Problem, Problems, UserError, reason_of
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Precision
from zerofit.spec.process import resident_memory
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.safetensors"
COPIES = 4  # copies of a merged tensor in memory at once: mapped parts, two stacked halves, the result


@dataclass(frozen=True, kw_only=True)
class PlacementResult:
    """The placement of a model's weights, and the memory before loading and at the peak."""

    device_map: dict[str, Device]
    placement: tuple[DeviceRow, ...]  # memory forecast for each device
    dtype: Precision  # type of the weights
    step: int | None  # optimizer steps that the model was trained for; None if unknown
    peak_host_bytes: int
    host_bytes_before: int  # of interpreter, libraries and data; the CPU's limit applies to memory on top of them
    peak_device_bytes: int | None

    def to_dict(self) -> dict[str, object]:
        """Return the placement as JSON."""
        return {**vars(self), "placement": [row.to_dict() for row in self.placement]}


@dataclass(kw_only=True)
class InferenceSession:
    """A saved model while it is loaded to its devices."""

    saved: SavedModel
    dtype: torch.dtype
    limits: MemoryLimits
    scratch: Path  # folder for temporary files
    report: Reporter
    _before: int = field(init=False, default=0)

    @cached_property
    def empty(self) -> nn.Module:
        """The model without weights."""
        return empty_model(self.saved, self.dtype)

    @property
    def main(self) -> Device:
        """The device on which the model would run, and whose activations are counted."""
        return main_device(self.limits)

    def load(self, working: int, knobs: str) -> tuple[nn.Module, Placement]:
        """Place the weights so that `working` bytes stay free, and load them.

        Raises DoesNotFit before anything is loaded. `knobs`: flags that reduce the forward's memory, for the error.
        """
        placement = place(self.empty, self.limits, working)
        if len(placement.rows) > 1:  # with one device there is nothing to choose
            self.report.table("where the model's weights go", table_rows(placement))
        refuse_misfit(placement, self.limits, knobs)
        self._before = start_counting(placement.gpus)
        with failures("nothing else on that device"):
            model = load_model(self._readable(placement), self.empty, placement, self.dtype, self.scratch, self.report)
        return model, placement

    def _readable(self, placement: Placement) -> SavedModel:
        """Return the saved model, rewritten if a forward cannot read weights from its files.

        Raises DoesNotFit if merging tensors that are stored in parts needs more memory than the CPU is allowed.
        """
        if "disk" not in placement.device_map.values():
            return self.saved
        rewrite = WeightRewrite(self.saved, self.empty, self.dtype)
        if not rewrite.needed:
            return self.saved
        needed, allowed = rewrite.host_bytes, self.limits.memory.get("cpu")
        if allowed is not None and needed > allowed:
            message = f"merging one layer's experts needs {shown_bytes(needed)} of host memory"
            message += f"; allowed: {shown_bytes(allowed)}"
            hint = f"--max-memory cpu={-(-needed >> 20)}MiB or more"
            raise DoesNotFit(Problem(kind="does-not-fit", message=message, hint=hint, where="--max-memory"))
        return rewrite.write(self.scratch, self.report)

    def result(self, placement: Placement) -> PlacementResult:
        """Return the placement of the weights and the peak memory so far."""
        return PlacementResult(
            device_map=placement.device_map,
            placement=placement.rows,
            dtype=NAMES[self.dtype],
            step=self.saved.info.step if self.saved.info else None,
            peak_host_bytes=resident_memory().peak,
            host_bytes_before=self._before,
            peak_device_bytes=peak_device_bytes(placement.gpus),
        )


def open_model(
    folder: Path, dtype: Precision | None, scratch: Path, report: Reporter, trust_model_code: bool = False
) -> tuple[SavedModel, torch.dtype]:
    """Return the model in a folder from `find_folder`, and the type of its weights.

    A checkpoint is exported first, and adapters are merged into their model. Without `dtype` the weights keep their
    saved type. Call this function before large tensors are created.
    """
    # Tensors that are freed before this leave gaps in the heap, which glibc does not return to the system.
    return_freed_memory_at_once()
    if is_checkpoint(folder) or is_adapters(folder):
        merge = is_adapters(folder) or (is_own(folder) and manifest_of(folder).job.run.lora is not None)
        exported = export(folder, scratch / MODEL, dtype, merge=merge, trust_model_code=trust_model_code, report=report)
        folder = exported.out
    saved = open_saved(folder, trust_model_code)
    stored = saved.weights.dtype
    return saved, DTYPES[dtype] if dtype else stored if stored in NAMES else torch.float32


def load_model(
    saved: SavedModel, empty: nn.Module, placement: Placement, dtype: torch.dtype, scratch: Path, report: Reporter
) -> nn.Module:
    """Return the model with its weights loaded, ready to run on `placement.execution_device`.

    Weights that the device map leaves on disk are read from the model's files, which safetensors maps into memory layer
    by layer. Only tensors that are stored differently (pickles, single experts) are written to `scratch`. `empty` must
    not be used afterwards. Raises UserError if the files lack weights that the model needs.
    """
    with quiet():
        if saved.source.family == "transformers":
            with report.task("loading weights", None, ""):
                return _load_transformers(saved, empty, placement, dtype, scratch)
        return _dispatched(saved, empty, placement, report)


def _load_transformers(
    saved: SavedModel, empty: nn.Module, placement: Placement, dtype: torch.dtype, scratch: Path
) -> nn.Module:
    """Load a model of transformers by its own function. Raises UserError."""
    import transformers

    config = cast("PreTrainedModel", empty).config
    quantized = source_config(saved.source).get(QUANTIZED)
    if quantized:  # a model that is built for training has no such config
        config.quantization_config = quantized
    try:
        model, loaded = getattr(transformers, AUTO_CLASSES[saved.task]).from_pretrained(
            saved.folder,
            config=config,
            dtype=dtype,
            device_map=dict(placement.device_map),
            offload_folder=str(scratch),
            local_files_only=True,
            # Without a value, transformers may ask on the terminal whether it may run code (resolve_trust_remote_code).
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        # `failures` reports it. The next clause would call the weights wrong.
        raise
    except Exception as error:  # weights that do not match the config raise many kinds of errors
        message = f"{saved.folder}: {reason_of(error)}"
        hint = "check that config.json and the weights belong to the same model"
        raise UserError(Problem(kind="model-weights", message=message, hint=hint, where="CKPT")) from error
    _refuse(sorted(loaded["missing_keys"]), saved)  # transformers would have initialized them at random
    return model


def _dispatched(saved: SavedModel, model: nn.Module, placement: Placement, report: Reporter) -> nn.Module:
    """Load a model of another library: copy its tensors, and add hooks that load those on disk."""
    stored_as = _stored_names(saved, model)
    ties = find_tied_parameters(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    on_disk: dict[str, dict[str, object]] = {}
    with report.task("loading weights", len(stored_as), "tensors") as task:
        for name, key in stored_as.items():
            path, device = saved.weights.tensors[key].file, device_of(name, placement.device_map)
            # Only parameters are offloaded: buffers stay on the device that runs the model.
            if device == "disk" and name in parameters:
                on_disk[name] = {"safetensors_file": str(path), "weight_name": key}
            else:
                assert device is not None, name  # the map covers all tensors
                target = placement.execution_device if device == "disk" else device
                set_module_tensor_to_device(model, name, target, value=_tensor(saved.weights, key))
            task.advance()
    # set_module_tensor_to_device puts a new parameter into the module, so tied modules no longer share one.
    retie_parameters(model, ties)
    return dispatch_model(
        model,
        dict(placement.device_map),
        main_device=cast(Any, placement.main),
        offload_index=cast(Any, on_disk or None),
        preload_module_classes=classes_loaded_together(model),
    )


def _stored_names(saved: SavedModel, model: nn.Module) -> dict[str, str]:
    """Return the stored name of each tensor of the model's state_dict. Raises UserError."""
    stored = saved.weights.tensors
    tied = {name: group for group in find_tied_parameters(model) for name in group}
    names: dict[str, str] = {}
    missing, problems = [], Problems()
    for name, tensor in model.state_dict().items():
        # Tied weights may be stored only once, by any of their names.
        key = next((n for n in (name, *tied.get(name, ())) if n in stored), None)
        if key is None:
            missing.append(name)
            continue
        names[name] = key
        if stored[key].shape != tuple(tensor.shape):
            message = f"{name} is {stored[key].shape} in {stored[key].file.name}, {tuple(tensor.shape)} in the model"
            problems.add("model-weights", message, "has the model's code changed since it was trained?", "CKPT")
    problems.raise_if_any()
    _refuse(missing, saved)
    return names


def _refuse(missing: list[str], saved: SavedModel) -> None:
    """Raise UserError if the files lack weights of the model."""
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        message = f"{saved.folder} lacks weights of the model: {shown}"
        hint = "check that config.json (or zerofit.json) and the weights belong to the same model"
        raise UserError(Problem(kind="model-weights", message=message, hint=hint, where="CKPT"))


# A forward that reads weights from the disk maps the model's files. This works only for safetensors in the model's type
# with one tensor for each of the model's. Other files are rewritten once, tensor by tensor.
class WeightRewrite:
    """Rewrites a saved model's files so that each forward can read weights from them."""

    def __init__(self, saved: SavedModel, empty: nn.Module, dtype: torch.dtype):
        self._saved, self._empty, self._dtype = saved, empty, dtype
        self._stored = saved.weights.tensors
        self._merged = _merged(saved, empty)
        types = {name: tensor.dtype for name, tensor in empty.state_dict().items()}
        self._wanted = {
            name: types.get(name, dtype) if stored.dtype and stored.dtype.is_floating_point else stored.dtype
            for name, stored in self._stored.items()
        }
        same_types = all(stored.dtype == self._wanted[name] for name, stored in self._stored.items())
        all_known = None not in self._wanted.values()  # else some have a type that zerofit does not write
        self.needed = all_known and (bool(self._merged) or saved.weights.pickled or not same_types)

    @property
    def host_bytes(self) -> int:
        """The largest memory that merging experts needs."""
        shapes = {name: tensor.shape for name, tensor in self._empty.state_dict().items()}
        largest = max((math.prod(shapes[part.source]) for part in self._merged), default=0)
        return COPIES * largest * max(self._saved.weights.dtype.itemsize, self._dtype.itemsize)

    def write(self, scratch: Path, report: Reporter) -> SavedModel:
        """Write the model with its weights to one safetensors file in `scratch`, tensor by tensor.

        Raises UserError if the disk is too small, or if a value overflows the type ("overflow").
        """
        folder = scratch / "rewritten"
        folder.mkdir()
        parts, of_model = {part.source: part for part in self._merged}, self._empty.state_dict()
        merged_names = {name for part in self._merged for name in part.outputs}
        shapes = {name: tuple(of_model[name].shape) for name in parts}
        shapes |= {name: stored.shape for name, stored in self._stored.items() if name not in merged_names}
        types = {name: wanted for name, wanted in self._wanted.items() if wanted} | dict.fromkeys(parts, self._dtype)
        entries = [TensorEntry(name=name, shape=shape, dtype=types[name]) for name, shape in shapes.items()]
        total = sum(entry.bytes for entry in entries)
        refuse_small_disk(folder, total, "--offload-folder")

        def read(name: str) -> Tensor:
            return self._merge(parts[name]) if name in parts else _tensor(self._saved.weights, name)

        with quiet(), report.task(f"writing the weights to {folder}", total, "bytes") as task:
            file = TensorFile(folder / FILE, entries)
            for entry in file.entries:
                file.write(entry.name, read(entry.name), task.advance)
        for config in self._saved.folder.glob("*config.json"):
            shutil.copy(config, folder)
        return replace(self._saved, folder=folder, weights=read_weights(folder))

    def _merge(self, part: PublishedTensor) -> Tensor:
        """Merge several stored tensors into one tensor of the model, as transformers does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        pieces = {name: _tensor(self._saved.weights, name) for name in part.outputs}
        model = cast("PreTrainedModel", self._empty)
        mapping = cast(Any, get_model_conversion_mapping(model))
        config = LoadStateDictConfig(device_map={"": "cpu"}, dtype=self._dtype, weight_mapping=mapping)
        convert_and_load_state_dict_in_model(model, pieces, config)
        owner_name, _, name = part.source.rpartition(".")
        owner = self._empty.get_submodule(owner_name)
        merged = getattr(owner, name).detach()
        # The model stays empty, so that memory holds one merged tensor at a time.
        setattr(owner, name, nn.Parameter(merged.to("meta"), requires_grad=False))
        return merged


def _merged(saved: SavedModel, empty: nn.Module) -> list[PublishedTensor]:
    """Return the model's tensors that the files store in parts, such as experts one by one."""
    if saved.source.family != "transformers":
        return []
    several = [part for part in PublishedModel(empty, transformers=True).parts if len(part.outputs) > 1]
    return [part for part in several if set(part.outputs) <= set(saved.weights.tensors)]


# The file is opened for one tensor only, since pages read through a memory map stay resident.
def _tensor(weights: StoredWeights, name: str) -> Tensor:
    """Read one tensor."""
    return load(weights.tensors[name].file)[name]
