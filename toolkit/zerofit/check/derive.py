"""Derive the configuration keys of the installed DeepSpeed, with types, defaults and bounds.

DeepSpeed has no list of its keys. So its own reader (`DeepSpeedConfig`) reads a dictionary that records each lookup and
pretends to have sections. A section that is read into a pydantic class has the fields of that class. Optimizers and
schedulers have the parameters of their constructors.

`python -m zerofit.check.derive` prints the catalog as JSON. Importing DeepSpeed takes seconds, so
`zerofit.check.catalog` stores the result.
"""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import json
import math
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from zerofit.check.catalog import SchedulerParameters, Schema

# The engine picks Muon's parameters one by one instead of passing them to a constructor.
MUON_PARAMS = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method", "per_head_muon")
# Keys that DeepSpeed reads outside its reader (config.py:468, __init__.py:543, pipe/engine.py:206)
READ_ELSEWHERE = ("sequence_parallel_size", "data_parallel_size", "pipeline.use_reentrant")
# Sections that DeepSpeed copies without looking keys up by name.
OPEN = (
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "data_efficiency.data_routing.random_ltd",
    "datastates_ckpt",
    "optimizer.params",
    "scheduler.params",
    "tensor_parallel.partition_config",
)


class RecordingDict(dict):
    """A JSON object that records which keys DeepSpeed looks up, and their defaults.

    The value of each path in `sections` is another `RecordingDict`. All other keys are missing.
    """

    def __init__(self, path: str, reading: SchemaReading):
        super().__init__()
        self._path, self._reading, self._children = path, reading, {}

    def _note(self, key: object, default: object = None) -> str | None:
        """Record the lookup of a key. Return the key's path if the key is a section, else None."""
        path = f"{self._path}.{key}" if self._path else str(key)
        if default is not None or path not in self._reading.defaults:
            # DeepSpeed changes its default objects while it reads.
            self._reading.defaults[path] = dict(default) if isinstance(default, dict) else default
        return path if path in self._reading.sections else None

    # The dictionary has no items, but DeepSpeed skips an empty section such as `timers`.
    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        return self._note(key) is not None

    def __getitem__(self, key: object) -> object:
        path = self._note(key)
        if path is None:
            raise KeyError(key)
        return self._children.setdefault(path, RecordingDict(path, self._reading))

    def __setitem__(self, key: object, value: object) -> None:
        """Record a section and the sections in it, because DeepSpeed adds missing sections."""
        path = f"{self._path}.{key}" if self._path else str(key)
        if isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values()):
            self._reading.sections |= {path, *(f"{path}.{inner}" for inner in value)}

    def get(self, key: object, default: object = None) -> object:
        """Return the value or the default."""
        return self[key] if self._note(key, default) else default

    # DeepSpeed pops keys without a default (runtime/data_pipeline/config.py:126). dict.pop would raise KeyError.
    def pop(self, key: object, default: object = None) -> object:
        """Return the value or the default."""
        return self.get(key, default)

    def keys(self) -> _Keys:
        """Return an object that supports `in`, and that records an unpacking of this section."""
        # `Model(**section)` calls keys() and iterates over the result, while other code iterates over the section.
        return _Keys(self)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def unpacked(self) -> Iterator[str]:
        """Record that a call gets all keys by `**`. Return no keys."""
        self._reading.unpacked = self._path
        return iter(())

    # A deep copy would also copy `_reading`, so lookups in the copy would be lost (datastates/config.py:21).
    def __deepcopy__(self, memo: dict) -> RecordingDict:
        return self


class _Keys:
    """The keys of a section, see `RecordingDict.keys`."""

    def __init__(self, owner: RecordingDict):
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return self._owner.unpacked()


class SchemaReading:
    """One reading of a configuration by DeepSpeed, with the keys that it looked up."""

    def __init__(self, sections: set[str]):
        from deepspeed.runtime import config as ds

        self.sections = sections
        self.defaults: dict[str, object] = {}  # dotted path -> default
        self.models: dict[str, type] = {}  # dotted path -> pydantic class of that section
        self.unpacked: str | None = None
        root = RecordingDict("", self)
        with self._noted_models():
            # DeepSpeedConfig.__init__ needs a file or a real dictionary, so its steps run one by one.
            reader = object.__new__(ds.DeepSpeedConfig)
            reader._param_dict, reader.global_rank, reader.world_size = root, 0, 1
            reader._initialize_params(root)
            reader._do_warning_check()
        self.pipeline = dict(reader.pipeline)

    @contextmanager
    def _noted_models(self) -> Iterator[None]:
        """Record each section that DeepSpeed reads into a pydantic class, with the class."""
        from deepspeed.runtime.config_utils import DeepSpeedConfigModel

        original = DeepSpeedConfigModel.__init__

        def init(model: DeepSpeedConfigModel, *args: bool, **data: Any) -> None:
            path, self.unpacked = self.unpacked, None
            if path is not None:
                self.models[path] = type(model)
            for name, value in data.items():
                if not isinstance(value, RecordingDict):
                    continue
                inner = _model_in(type(model).model_fields[name].annotation)
                if inner:
                    self.models[value._path] = inner
            original(model, *args, **data)

        # All of DeepSpeed's pydantic classes inherit this __init__, so one patch is enough.
        with mock.patch.object(DeepSpeedConfigModel, "__init__", init):
            yield


def derive() -> dict[str, object]:
    """Return the fields of a `zerofit.check.catalog.Catalog`."""
    from deepspeed.runtime import config as ds
    from deepspeed.runtime import precision_config

    reading = _read_all_sections()
    deprecated = {precision_config.BFLOAT16_OLD: precision_config.BFLOAT16}
    removed = {f"zero_optimization.{key}" for key in getattr(ds, "_REMOVED_ZERO_CONFIG_KEYS", ())}
    removed |= set(getattr(ds, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()))
    strict: set[str] = set()
    root: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
    # Later entries replace earlier ones: a pydantic class has types and bounds, a default of `get` only a value.
    for path, default in sorted(reading.defaults.items()):
        _put(root, path, _of_default(default))
    for path, model in sorted(reading.models.items()):
        _put(root, path, _of_model(model, path, deprecated, strict))
    for key, default in reading.pipeline.items():
        _put(root, f"pipeline.{key}", _of_default(default))
    for path in READ_ELSEWHERE:
        _put(root, path, {})
    for path in OPEN:
        _put(root, path, {"type": "object", "properties": {}, "additionalProperties": True})
    return {
        "version": importlib.metadata.version("deepspeed"),
        "schema": root,
        "deprecated": deprecated,
        "strict": sorted(strict),
        "removed": sorted(removed),
        "optimizers": _optimizers(),
        "schedulers": _schedulers(),
    }


def _read_all_sections() -> SchemaReading:
    """Read the configuration with more and more keys as sections, until there is no new section."""
    # DeepSpeed looks up the keys of a section only if the section exists. A key without a default, or with false, may
    # be a section: try it, and keep it if the reader then looks up keys in it.
    sections: set[str] = set()
    tried: set[str] = set()
    reading = SchemaReading(sections)
    while untried := [p for p in reading.defaults if p not in tried]:
        maybe = [p for p in untried if reading.defaults[p] in (None, {}) or isinstance(reading.defaults[p], bool)]
        trials = [_as_section(path, sections) for path in maybe]
        tried |= set(untried)
        defaults, models = dict(reading.defaults), dict(reading.models)
        for trial in filter(None, trials):
            sections |= trial.sections
            defaults, models = {**trial.defaults, **defaults}, {**trial.models, **models}
        reading = SchemaReading(sections)
        # Keep the keys of all readings: DeepSpeed looks up an old name only if the new name is missing.
        reading.defaults, reading.models = {**defaults, **reading.defaults}, {**models, **reading.models}
    return reading


def _as_section(path: str, sections: set[str]) -> SchemaReading | None:
    """Let DeepSpeed read a JSON in which the key `path` is a section.

    Return None if DeepSpeed fails or reads no key of this section.
    """
    parents = {p for p in sections if path.startswith(f"{p}.")}
    try:
        reading = SchemaReading({*parents, path})
    except Exception:  # not a section; getters fail with different errors
        return None
    inside = any(key.startswith(f"{path}.") for key in reading.defaults)
    return reading if inside or path in reading.models else None


def _put(root: Schema, path: str, schema: Schema) -> None:
    """Insert a schema at a dotted path. New parent objects allow no unknown keys."""
    *parents, last = path.split(".")
    properties = root.get("properties", {})
    for key in parents:
        if "properties" not in properties.get(key, {}):
            properties[key] = {"type": "object", "properties": {}, "additionalProperties": False}
        properties = properties[key].get("properties", {})
    # The getter of a section has no default: a section that is known already is better than that.
    if "properties" not in properties.get(last, {}) or "properties" in schema:
        properties[last] = schema


def _of_default(default: object) -> Schema:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    kind = names.get(type(default))
    if kind is None:
        return {}
    return {"default": default} if default == "auto" else {"type": kind, "default": default}


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return DeepSpeed's pydantic class in a field's type (also in `X | None`), or None."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    options = typing.get_args(annotation) or (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, DeepSpeedConfigModel)), None)


def _of_model(model: type[BaseModel], path: str, deprecated: dict[str, str], strict: set[str]) -> Schema:
    """Return the schema of a section, with each name of a field that DeepSpeed accepts.

    Aliases are added to `deprecated`, and strict sections to `strict`.
    """
    strict.add(path)
    properties: dict[str, Schema] = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        inner = _model_in(field.annotation)
        key = f"{path}.{field.alias or name}"
        schema = _of_model(inner, key, deprecated, strict) if inner else _of_field(field)
        if inner and type(None) in typing.get_args(field.annotation):
            schema["type"] = ["object", "null"]
        properties[field.alias or name] = schema
        if field.alias:
            properties[name] = {**schema}
            deprecated[f"{path}.{name}"] = field.alias  # both work; the documentation uses the alias
        if extra.get("deprecated"):
            deprecated[key] = str(extra.get("new_param", ""))
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_field(field: FieldInfo) -> Schema:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

    annotation: Any = field.annotation
    if field.metadata:  # bounds, which pydantic has taken from the annotation
        annotation = typing.Annotated[annotation, *field.metadata]
    try:
        schema: Schema = _inlined(TypeAdapter(annotation).json_schema())
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        schema = {}  # a Python object, which JSON does not have
    default = field.get_default()
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, bool | int | float | str) and not (isinstance(default, float) and math.isinf(default)):
        # a subclass of int, like an IntEnum, would not become plain JSON
        schema["default"] = int(default) if type(default) is not bool and isinstance(default, int) else default
    return schema


def _inlined(schema: dict[str, Any]) -> Any:
    """Remove titles, descriptions and references; turn `X or null` into one list of types."""
    definitions = schema.get("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(n) for n in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return walk(definitions[node["$ref"].rpartition("/")[2]])
        node = {k: walk(v) for k, v in node.items() if k not in ("title", "description", "$defs", "format")}
        options = node.get("anyOf", [])
        if len(options) == 2 and {"type": "null"} in options:
            other = next(o for o in options if o != {"type": "null"})
            if isinstance(other.get("type"), str):
                node = {**{k: v for k, v in node.items() if k != "anyOf"}, **other, "type": [other["type"], "null"]}
                if "enum" in node:
                    node["enum"] = [*node["enum"], None]
        return node

    return walk(schema)


def _optimizers() -> dict[str, dict[str, list[str]]]:
    """Return the constructor parameters of each variant of each optimizer.

    DeepSpeed's optimizers have names in lower case; torch's optimizers keep their names.
    """
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import config as ds

    # parameters that choose the variant; DeepSpeed removes them before it calls the constructor
    choosing = {ds.TORCH_ADAM_PARAM, ds.ADAM_W_MODE}
    adam = {"fused": FusedAdam, "cpu": DeepSpeedCPUAdam, "torch": torch.optim.AdamW}
    variants: dict[str, dict[str, object]] = {
        "adam": adam,
        "adamw": adam,
        "adagrad": {"fused": torch.optim.Adagrad, "cpu": DeepSpeedCPUAdagrad},
        "lamb": {"fused": FusedLamb},
        "lion": {"fused": FusedLion, "cpu": DeepSpeedCPULion},
    }
    known: dict[str, dict[str, list[str]]] = {}
    for name in ds.DEEPSPEED_OPTIMIZERS:
        known[name] = {v: _parameters(kind) for v, kind in variants.get(name, {}).items()}
        if name in ("adam", "adamw"):
            known[name] = {v: sorted({*p, *choosing, "fp32_optimizer_states"}) for v, p in known[name].items()}
    # Muon updates only matrices, and all other parameters use Adam.
    known["muon"] = {"fused": sorted({*MUON_PARAMS, *known["adam"]["cpu"]})}
    for name, kind in vars(torch.optim).items():
        optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if optimizer and kind is not torch.optim.Optimizer and name.lower() not in known:
            known[name] = {"torch": _parameters(kind)}
    return known


def _schedulers() -> dict[str, SchedulerParameters]:
    """Return the parameters of each scheduler: DeepSpeed's schedulers, then torch's."""
    import torch
    from deepspeed.runtime import lr_schedules

    kinds = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name, kind in vars(torch.optim.lr_scheduler).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            kinds.setdefault(name, kind)
    schedulers: dict[str, SchedulerParameters] = {}
    for name, kind in kinds.items():
        required = _parameters(kind, required=True)
        optional = [p for p in _parameters(kind) if p not in required]
        own = name in lr_schedules.VALID_LR_SCHEDULES
        schedulers[name] = {"required": required, "optional": optional, "own": own}
    return schedulers


def _parameters(kind: object, required: bool = False) -> list[str]:
    """Return the names of a constructor's parameters, or only of those without a default."""
    # The training program passes the skipped ones itself.
    skipped = {"self", "params", "model_params", "optimizer", "args", "kwargs"}
    signature = inspect.signature(kind.__init__).parameters.values()
    chosen = [p for p in signature if p.name not in skipped]
    return [p.name for p in chosen if not required or p.default is inspect.Parameter.empty]


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed logs to standard output
    print(json.dumps(derive(), indent=1, sort_keys=True), file=stdout)
