"""Read all named models from data/*.json, without weights.

To add a model, add an entry there. Each file has the models of one family. An entry has a config of transformers or
diffusers, on top of a shared template. An entry also has the number of parameters (counted on the meta device), the
published number with its source, and the hub repositories of this shape. `Preset` is the schema. Importing this module
does not import torch or transformers.

    {"name": "llama-2-7b", "template": "llama-2", "parameters": 6738415616, "published": "6.74B",
     "config": {"hidden_size": 4096, "num_hidden_layers": 32, ...},
     "hub": ["meta-llama/Llama-2-7b-hf", ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerofit.spec.model_facts import Task

DATA = Path(__file__).parent / "data"
Config = dict[str, Any]  # a config.json of transformers or diffusers
ModelArgs = dict[str, Any]  # `--model-args`: keys of a config, or keyword arguments of a model's builder
Library = Literal["zerofit", "torchvision", "transformers", "diffusers"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model. A test checks every entry of data/ against these types."""

    name: str
    family: str  # the file's name
    library: Library
    kind: Task
    parameters: int  # of the model as zerofit builds it
    source: str  # of the config and the published figure
    published: str = ""  # the figure as published: "8.03B"
    differs: str = ""  # how the published figure is counted differently
    note: str = ""  # parts of the published model that are left out
    quantized: str = ""  # format of the published weights ("fp8"), if they are quantized
    convolutional: bool = False  # a convolutional network, which the recipes train with SGD
    inputs: dict[str, Any] = field(default_factory=dict)  # of zerofit's own models, for `inputs_from_dict`
    config: Config = field(default_factory=dict)  # with the template's keys
    hub: list[str] = field(default_factory=list)  # repositories of this shape, and other names

    @property
    def origin(self) -> str:
        """The origin as tables show it: "preset", or the library of a model without a config."""
        return "preset" if self.config else self.library


def read_presets(folder: Path = DATA) -> dict[str, Preset]:
    """Read all presets of a folder, zerofit's own models first."""
    files = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "zerofit", path.stem))
    return {preset.name: preset for path in files for preset in _presets_in(path)}


def _presets_in(path: Path) -> Iterator[Preset]:
    content = json.loads(path.read_bytes())
    for entry in content["models"]:
        template = content["templates"][entry.pop("template")] if "template" in entry else {}
        shared, own = template.get("config", {}), entry.get("config", {})
        # a model's own keys replace those of its template, also in inner configs
        inner = [key for key in own if key.endswith("_config") and isinstance(shared.get(key), dict)]
        config = {**shared, **own, **{key: {**shared[key], **own[key]} for key in inner}}
        yield Preset(**{"library": content["library"], **template, **entry, "family": path.stem, "config": config})


# read on import, since every command that takes a model looks up names
NAMED = read_presets()
PRESETS: dict[str, Config] = {name: preset.config for name, preset in NAMED.items() if preset.config}
