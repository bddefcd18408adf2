"""Index torch's distributed checkpoints and state dicts, and DeepSpeed's universal ones."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.deepspeed_files import step_count
from zerofit.checkpoint.foreign import METADATA, OPTIMIZERS, Foreign, state_dict_files
from zerofit.checkpoint.index import (
    MASTER,
    EngineIndex,
    Location,
    ParameterGroup,
    RankIndex,
    SavedBuffer,
    Shard,
    TensorSlice,
    incomplete,
    scaler_numbers,
)
from zerofit.checkpoint.optimizer_names import PACKED, state_names, weight_states
from zerofit.checkpoint.store import STATE
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, source_of
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run import Run

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

STATE_KEY = re.compile(r"(?:(?P<prefix>.*)\.)?state\.(?P<name>.+)\.(?P<kind>[a-z_0-9]+)")
GROUP_KEY = re.compile(r"optim\w*\.param_groups\.(?P<group>.+)\.(?P<setting>\w+)")
WEIGHTS = ("model", "state_dict", "module", "model_state_dict")  # keys of a state dict within a file
STATES = ("optimizer", "optimizer_states", "optimizer_state_dict")
SCALER = "scaler.pt"  # of fp16 without DeepSpeed
STATISTICS = (".running_mean", ".running_var")  # batch norm's buffers
Keys = list[str | int]


_Tensors = dict[str, list[tuple["TensorStorageMetadata", "ChunkStorageMetadata", Location]]]  # each tensor's chunks


def _index(
    parameters: list[Shard],
    counters: dict[str, object],
    world_size: int,
    buffers: list[SavedBuffer],
    ties: dict[str, str] | None = None,
    notes: Sequence[str] = (),
    groups: Sequence[ParameterGroup] = (),
) -> RankIndex:
    blank = {"global_samples": 0, "skipped_steps": 0, "lr_scheduler": {}, "loss_scaler": None}
    engine = EngineIndex(
        names=list(dict.fromkeys(shard.name for shard in parameters)),
        parameters=parameters,
        buffers=buffers,
        ties=ties or {},
        counters=blank | {"lr_scheduler": {"last_epoch": counters["global_steps"]}} | counters,
        unsupported=None,
        notes=list(notes),
        groups=list(groups),
    )
    return RankIndex(world_size=world_size, engines={STATE: engine})


def distributed_folders(found: Foreign) -> list[Path]:
    """Return a distributed checkpoint's folders. Accelerate has the optimizer in `optimizer_0`."""
    optimizer = found.files.with_name(found.files.name.replace("pytorch_model_fsdp", "optimizer"))
    return [found.files, *([optimizer] if optimizer != found.files and optimizer.is_dir() else [])]


def distributed_index(found: Foreign) -> RankIndex:
    """Build the index of a PyTorch distributed checkpoint from its `.metadata`."""
    folders = distributed_folders(found)
    tensors: _Tensors = {}
    scalars: dict[str, Location] = {}
    for folder in folders:
        _collect(found, folder, tensors, scalars)
    return _named_index(found, tensors, scalars)


def _collect(found: Foreign, folder: Path, tensors: _Tensors, scalars: dict[str, Location]) -> None:
    """Add a folder's scalars, and its tensors' chunks: (description, chunk, location)."""
    if not (folder / METADATA).is_file():
        raise incomplete(folder, f"{METADATA} is missing (rank 0 writes it last)", "use an older checkpoint")
    metadata = safe_load.load_metadata(folder / METADATA)
    order = {key: number for number, key in enumerate(metadata.state_dict_metadata)}  # order in the state dict
    for place, stored in sorted(metadata.storage_data.items(), key=lambda item: order[item[0].fqn]):
        if getattr(stored, "transform_descriptors", None):
            transforms = ", ".join(stored.transform_descriptors)
            message = f"{folder / METADATA}: tensors are stored with unsupported transforms: {transforms}"
            raise UserError(Problem(kind="no-whole-view", message=message, where=str(folder)))
        if not (folder / stored.relative_path).is_file():
            match = re.fullmatch(r"__(\d+)_\d+\.distcp", stored.relative_path)
            reason = f"{stored.relative_path} is missing (rank {match[1] if match else '?'})"
            raise incomplete(found.path, reason)
        file = (folder / stored.relative_path).relative_to(found.path).as_posix()
        where = Location(file=file, keys=[], span=(stored.offset, stored.length))
        described = metadata.state_dict_metadata[place.fqn]
        # A value that is not a tensor, e.g. a learning rate, has BytesStorageMetadata, which has no fields.
        if not hasattr(described, "chunks"):
            scalars[place.fqn] = where
            continue
        offset = tuple(place.offset or ())
        where = replace(where, dtype=str(described.properties.dtype).removeprefix("torch."))
        chunk = next(chunk for chunk in described.chunks if tuple(chunk.offsets) == offset)
        tensors.setdefault(place.fqn, []).append((described, chunk, where))


def _named_index(found: Foreign, tensors: _Tensors, scalars: dict[str, Location]) -> RankIndex:
    # get_state_dict names a state optim.state.NAME.KIND; all other tensors are weights and buffers
    states: dict[str, dict[str, str]] = {}  # key by name and kind
    owners: dict[str, str] = {}
    for key in tensors:
        if (match := STATE_KEY.fullmatch(key)) and (match["prefix"] or "optim").startswith("optim"):
            states.setdefault(match["name"], {})[match["kind"]] = key
            owners[key] = match["name"]
    weights = [key for key in tensors if key not in owners]
    prefix = _prefix(weights, list(states))
    shards, buffers = [], []
    for key in weights:
        name, kinds = key.removeprefix(prefix), states.get(key.removeprefix(prefix), {})
        # bitsandbytes' packed states cannot be read as one number per weight
        moments = {kind: k for kind, k in kinds.items() if kind != "step" and not kinds.keys() & {*PACKED}}
        described, _, where = tensors[key][0]
        shape = tuple(described.size)
        if not where.dtype.startswith(("float", "bfloat")) or name.endswith(STATISTICS):
            for _, chunk, where in tensors[key]:
                block = (tuple(chunk.offsets), shape) if tuple(chunk.sizes) != shape else ()
                buffers.append(SavedBuffer(name, where.file, where.keys, where.span, *block))
            continue
        for _, chunk, where in tensors[key]:
            places = {MASTER: where}
            for kind, moment in moments.items():
                # FSDP2 splits a weight and its states in the same way, so their chunks have the same offsets.
                same = [w for _, c, w in tensors[moment] if tuple(c.offsets) == tuple(chunk.offsets)]
                if same:
                    places[kind] = same[0]
            shards.append(_chunk_shard(found, name, shape, chunk, places))
    if not shards:
        raise incomplete(found.path, "it has no tensors", "name the folder or file that has the weights")
    step_key = next((kinds["step"] for kinds in states.values() if "step" in kinds), None)
    places = [tensors[step_key][0][2]] if step_key else [w for k, w in scalars.items() if k.split(".")[-1] == "step"]
    value = safe_load.load(found.path / places[0].file, span=places[0].span) if places else None
    step = step_count({"step": value})
    ranks = {shard.where[MASTER].file for shard in shards}
    counters = {"step": step, "global_steps": step or found.step or 0, "loss_scaler": _grad_scaler(found.path)}
    notes = [] if states else ["it has no optimizer states"]
    return _index(shards, counters, len(ranks), buffers, notes=notes, groups=_distributed_groups(found, scalars))


def _grad_scaler(folder: Path) -> dict[str, float] | None:
    """Convert the state of torch's GradScaler to the numbers of DeepSpeed's loss scaler.

    The Trainer and Accelerate save this state. Return None if the checkpoint has no such state.
    """
    saved = safe_load.load(folder / SCALER) if (folder / SCALER).is_file() else None
    if not saved:  # {}: of a scaler that is switched off
        return None
    # DeepSpeed doubles the scale after `scale_window` steps since the last overflow, GradScaler by its growth tracker.
    # With the overflow at -1, the counted steps are equal.
    numbers = {"cur_scale": saved["scale"], "cur_iter": saved["_growth_tracker"], "last_overflow_iter": -1}
    return numbers | {"scale_factor": saved["growth_factor"], "scale_window": saved["growth_interval"]}


def _distributed_groups(found: Foreign, scalars: dict[str, Location]) -> list[ParameterGroup]:
    """Return the optimizer's groups, which are numbered by `get_optimizer_state_dict`.

    torchtitan saves the settings of each parameter instead. Then parameters with the same settings are a group.
    """
    groups: dict[str, dict[str, Any]] = {}
    for key, where in scalars.items():
        if match := GROUP_KEY.fullmatch(key):
            value = safe_load.load(found.path / where.file, span=where.span)
            groups.setdefault(match["group"], {})[match["setting"]] = value
    if groups and not all(name.isdecimal() for name in groups):
        equal: dict[str, ParameterGroup] = {}
        for name, settings in groups.items():
            equal.setdefault(repr(settings), ParameterGroup([], settings)).names.append(name)
        return list(equal.values())
    named = [dict(group) for _, group in sorted(groups.items(), key=lambda item: int(item[0])) if "params" in group]
    return [ParameterGroup(list(group.pop("params")), group) for group in named]


def _prefix(weights: list[str], states: list[str]) -> str:
    """Return the prefix that turns each parameter name in `states` into a key in `weights`.

    If there is none, return "model." if all keys begin with it, else "".
    """
    firsts = {key.split(".")[0] + "." for key in weights}
    for prefix in ("", *sorted(firsts)):
        if states and all(prefix + name in weights for name in states):
            return prefix
    return firsts.pop() if len(firsts) == 1 and "model." in firsts else ""


def _chunk_shard(
    found: Foreign, name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata, where: dict[str, Location]
) -> Shard:
    """Return a block of a tensor as a shard, with a `TensorSlice` if its rows are incomplete."""
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    columns = [dim for dim in range(1, len(shape)) if sizes[dim] != shape[dim]]
    if len(columns) > 1:
        message = f"{found.path}: {name} is cut along {len(columns) + 1} dimensions"
        raise UserError(Problem(kind="no-whole-view", message=message, where=str(found.path)))
    cut, share = None, list(shape)
    if columns:
        cut = TensorSlice(columns[0], ((offsets[columns[0]], sizes[columns[0]]),))
        share[columns[0]] = sizes[columns[0]]
    # in a share that has full rows, the chunk is one stretch of the flattened tensor
    row = math.prod(share[1:])
    start, count = (offsets[0] * row, sizes[0] * row) if shape else (0, 1)
    return Shard(name=name, shape=shape, cut=cut, start=start, numel=count, where=where)


@dataclass(kw_only=True)
class _StateDict:
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, Location] = field(default_factory=dict)
    buffers: list[SavedBuffer] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)  # of `_states_in`

    def add_safetensors(self, content: safe_load.Safetensors, file: str) -> None:
        for name in content:
            if not content.is_floating_point(name) or name.endswith(STATISTICS):
                self.buffers.append(SavedBuffer(name, file, [name]))
            else:
                self.shapes[name], self.places[name] = content.shape(name), Location(file=file, keys=[name])

    def add_torch_file(self, content: Any, file: str) -> None:
        key = _weights_key(content, file)
        weights = content if key is None else content[key]
        self.states = self.states or _states_in(content, file)
        storages: dict[tuple[int, int], str] = {}
        for name, value in weights.items() if isinstance(weights, dict) else ():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(name, str):
                raise incomplete(Path(file), f"its tensors have no names, but keys like {name!r}", "save a state dict")
            if value.is_meta or value.layout != torch.strided or value.is_quantized:
                what = "has no data" if value.is_meta else "is quantized" if value.is_quantized else "is sparse"
                raise incomplete(Path(file), f"{name} {what}", "save the state dict with plain tensors")
            # tensors with the same data are one tied parameter
            # The offset tells views of one storage apart, such as the parts of a fused matrix.
            first = storages.setdefault((value.untyped_storage().data_ptr(), int(value.storage_offset())), name)
            keys: Keys = [name] if key is None else [key, name]
            shape = tuple(value.shape)
            if not value.is_floating_point() or name.endswith(STATISTICS):
                self.buffers.append(SavedBuffer(name, file, keys))
            elif first != name and self.shapes.get(first) == shape:
                self.ties[name] = first
            else:
                self.shapes[name], self.places[name] = shape, Location(file=file, keys=keys)


def _weights_key(content: object, file: str) -> str | None:
    """Return the key of a file's state dict; None if the file is the state dict."""

    def has_tensors(value: object) -> bool:
        return isinstance(value, dict) and any(isinstance(tensor, Tensor) for tensor in value.values())

    if not isinstance(content, dict) or has_tensors(content):
        return None
    inner = [key for key, value in content.items() if has_tensors(value)]
    known = [key for key in WEIGHTS if key in inner]
    if not known and len(inner) > 1:
        names = ", ".join(map(str, inner))
        raise incomplete(Path(file), f"it has several state dicts ({names})", "save one of them in a separate file")
    return next(iter([*known, *inner]), None)


def state_dict_index(found: Foreign, run: Run | None = None) -> RankIndex:
    """Build the index of full state dicts.

    They are a torch file, or safetensors with the optimizer's file next to them. The optimizer's file has numbers
    instead of names. The numbers follow the optimizer's groups. Within a group, parameters are in the order of the
    model of `run` or, without a run, of the model of config.json. If this model lacks a name, a torch file's own order
    is used.
    """
    # The weights' names come from their files, the states' order from the model. `_groups` matches both by their
    # shapes.
    root = found.root
    saved, notes = _StateDict(), []
    for file in state_dict_files(found):
        if not file.is_file():
            raise incomplete(found.path, f"{file.name} is missing", "copy all files of the model into one folder")
        content, name = safe_load.load(file), file.relative_to(root).as_posix()
        if isinstance(content, safe_load.Safetensors):
            saved.add_safetensors(content, name)
        else:
            saved.add_torch_file(content, name)
    if not saved.places:
        raise incomplete(found.path, "it has no tensors", "name the folder or file that has the weights")
    optimizer = next((root / name for name in OPTIMIZERS if (root / name).is_file()), None)
    if not saved.states and optimizer:
        saved.states = _states_in({"optimizer": safe_load.load(optimizer)}, optimizer.name)
        saved.states["keys"] = saved.states.get("keys", [""])[1:]  # the file is the optimizer's state dict
    firsts = _model_names(found.config_folder, run)
    shapes = {name: saved.shapes[name] for name in dict.fromkeys(firsts.values()) if name in saved.shapes}
    # safetensors have a tied weight under one name, but DeepSpeed's loader needs all
    absent = {name: first for name, first in firsts.items() if name not in saved.places and first in saved.places}
    saved.ties = absent | saved.ties
    # The optimizer's numbers follow the model's order. safetensors sorts tensors, but torch's files keep their order.
    if len(shapes) < len(saved.shapes) and found.format == "torch":  # in the model's order, which safetensors lack
        shapes = saved.shapes
    groups = _groups(saved.states, shapes, notes)
    by_name = {
        name: {
            kind: Location(file=saved.states["file"], keys=[*saved.states["keys"], "state", key, kind])
            for kind in weight_states(saved.states["base"]["state"].get(key, {}), math.prod(shapes.get(name, ())))
        }
        for named, _ in groups
        for key, name in named
    }
    parameters = [
        Shard(
            name=name,
            shape=saved.shapes[name],
            cut=None,
            start=0,
            numel=math.prod(saved.shapes[name]),
            where={MASTER: where, **by_name.get(name, {})},
        )
        for name, where in saved.places.items()
    ]
    step = step_count(saved.states.get("base"))
    counters = {"step": step, "global_steps": found.step or step or 0, "loss_scaler": _grad_scaler(root)}
    settings = [ParameterGroup([name for _, name in named], own) for named, own in groups if own]
    return _index(parameters, counters, 1, saved.buffers, notes=notes, ties=saved.ties, groups=settings)


def _model_names(config: Path | None, run: Run | None) -> dict[str, str]:
    """Return the first name of each parameter by all its names, in the model's order.

    Returns {} if neither `run` nor `config` describes a model. Raises UserError if the model of `run` cannot be built.
    """
    model_run = run or (Run(model=str(config.absolute())) if config else None)
    if model_run is None:
        return {}
    try:
        with torch.device("meta"):
            source = replace(source_of(model_run), pretrained=None, partial=None)
            model = build(source, None, dict(model_run.model_args))
    except ModelError as error:
        if run is None:
            return {}
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where="--model")) from None
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: firsts[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _states_in(content: object, file: str) -> dict[str, object]:
    """Return content and place of torch's optimizer state dict in a file; {} without one."""
    for key in STATES:
        base, keys = content.get(key) if isinstance(content, dict) else None, [key]
        if isinstance(base, list) and base:
            base, keys = base[0], [key, 0]
        if isinstance(base, dict) and "state" in base:
            return {"base": base, "keys": keys, "file": file}
    return {}


def _groups(
    states: dict[str, Any], shapes: dict[str, tuple[int, ...]], notes: list[str]
) -> list[tuple[Sequence[tuple[int | str, str]], dict[str, Any]]]:
    """Return each group of torch's optimizer and its settings.

    A group has the keys of states with the parameters' names. FSDP's full state dict has names as keys. Return no
    groups, and note why, if names are unknown.
    """
    if not states.get("base"):
        notes.append("it has no optimizer states")
        return []
    base = states["base"]
    groups = base.get("param_groups") or [{"params": [*base["state"]]}]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        named = [[(key, key) for key in group["params"]] for group in groups]
    elif (named := state_names(base, shapes)) is None:
        hint = "" if shapes else "; --model FOLDER names the folder with config.json, which gives their order"
        notes.append(f"the optimizer's states in {states['file']} cannot be matched with the parameters' names{hint}")
        return []
    settings = [{key: value for key, value in g.items() if key not in ("params", "param_names")} for g in groups]
    return list(zip(named, settings, strict=True))


def universal_index(found: Foreign) -> RankIndex:
    """Build the index of a universal checkpoint, with a file per parameter and state."""
    shards, step = [], None
    for file in sorted((found.files / "zero").glob("*/fp32.pt")):
        states = {f.stem: f for f in sorted(file.parent.glob("*.pt")) if f.stem != "step"}
        value = safe_load.load(file)
        shape = tuple((value["param"] if isinstance(value, dict) else value).shape)
        keys: Keys = ["param"] if isinstance(value, dict) else []
        where = {kind: Location(file=f.relative_to(found.path).as_posix(), keys=keys) for kind, f in states.items()}
        shards.append(Shard(name=file.parent.name, shape=shape, cut=None, start=0, numel=math.prod(shape), where=where))
        if step is None and (file.parent / "step.pt").is_file():
            step = step_count({"step": safe_load.load(file.parent / "step.pt")})
    shared = found.files / "zero/optimizer_state.pt"
    scaler = scaler_numbers(safe_load.load(shared).get("loss_scaler") or {}) if shared.is_file() else None
    counters = {"step": step, "global_steps": found.step or step or 0, "loss_scaler": scaler}
    return _index(shards, counters, 1, [], groups=_universal_groups(found, {shard.name for shard in shards}))


# A group's `params` count entries of `param_shapes`.
def _universal_groups(found: Foreign, names: Container[str]) -> list[ParameterGroup]:
    """Return the optimizer's groups of these parameters."""
    # Each stage of a pipeline has a file of its own, which lists only its parameters. Tensor ranks list equal names.
    shared, ends = found.files / "zero/optimizer_state.pt", "mp_rank_*_model_states.pt"
    models = [file for start in ("", "zero_pp_rank_0_") for file in sorted(found.files.glob(start + ends))]
    entries = safe_load.load(shared).get("param_groups") if shared.is_file() else None
    shapes = [safe_load.load(file).get("param_shapes") or [] for file in models]
    listed = [dict.fromkeys(chain(*parts)) for parts in zip_longest(*shapes, fillvalue={})]
    if not entries or not listed:
        return []
    groups = list[ParameterGroup]()
    for number, entry in enumerate(entries):
        settings = {key: value for key, value in entry.items() if key != "params"}
        parts = [listed[part] for part in entry.get("params", [number]) if part < len(listed)]
        groups.append(ParameterGroup([name for part in parts for name in part if name in names], settings))
    return groups
