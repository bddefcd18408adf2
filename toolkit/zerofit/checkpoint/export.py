"""A checkpoint turned into a model that other tools load: a Hugging Face folder, or one safetensors file.

The tensors come one by one out of the checkpoint's files and go one by one into the new ones, so that memory is a
matter of the largest tensor and not of the model. No engine and no device takes part.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from zerofit.checkpoint.full_state import FullState, whole_model
from zerofit.checkpoint.model_folder import (
    ModelInfo,
    TensorEntry,
    TensorFile,
    check_file,
    cut,
    refuse_existing,
    refuse_small_disk,
    refuse_untrusted_code,
    staged_folder,
)
from zerofit.checkpoint.store import MANIFEST, Manifest, manifest_of
from zerofit.data.tokenizer import load_transformers
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, find
from zerofit.models.dtypes import DTYPES, torch_name
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Precision
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 1 << 30  # who loads a shard into host memory whole, as accelerate does, needs no more than this
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The files that an export has written."""

    out: Path
    files: list[str]
    parameters: int  # elements, tied ones once
    dtype: str  # of the parameters: "fp32", "bf16" or "fp16"

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit ckpt export --json` prints."""
        return {**vars(self), "out": str(self.out)}


def export(
    checkpoint: Path,
    out: Path,
    dtype: Precision | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    *,
    trust_model_code: bool = False,
    report: Reporter | None = None,
) -> ExportResult:
    """Write the model of a checkpoint's folder into `out`, which must not exist or be empty.

    A transformers model becomes a folder for `from_pretrained`, with the tokenizer's files where the run used one;
    any other model one `model.safetensors` for `load_state_dict`. `dtype` is that of the parameters (fp32, bf16,
    fp16), by default the run's precision; buffers keep their own. A model of the form package.module:callable is
    refused unless `trust_model_code`. Raises UserError where the checkpoint does not fit the model, and before anything
    is written where there is no room.
    """
    report = report or Reporter()
    refuse_existing(out)
    manifest = manifest_of(checkpoint)
    report.status("building the model on the meta device ...")
    wanted: Precision = dtype or manifest.job.precision
    state = whole_model(checkpoint, manifest.job.facts.task)
    model, transformers = _meta_model(manifest, checkpoint / MANIFEST, trust_model_code)
    _check_names(model, state, checkpoint)
    run = manifest.job.run
    reads_tokens = isinstance(manifest.inputs, TextInputs) and run.tokenizer != "bytes"
    tokenizer = load_transformers(run.tokenizer) if reads_tokens else None  # before anything is written
    files = PublishedFiles(PublishedModel(model, transformers), DTYPES[wanted], max_shard_bytes)
    refuse_small_disk(out, files.bytes)
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        report.status(f"exporting {shown_bytes(done)} of {shown_bytes(files.bytes)}")

    with staged_folder(out) as staging:
        sources = [part.source for part in files.published.parts]
        files.write(staging, ((name, state.read(state.ties.get(name, name))) for name in sources), wrote)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        facts, dtype_name = manifest.job.facts, torch_name(DTYPES[wanted])
        ModelInfo.of_run(run, facts.task, manifest.inputs, manifest.step, dtype_name).write(staging)
        names = sorted(path.name for path in staging.iterdir())
    parameters = sum(p.numel() for p in model.parameters())
    return ExportResult(out=out, files=names, parameters=parameters, dtype=wanted)


class PublishedFiles:
    """The files of a published model: weights in safetensors of at most so many bytes, and what stands beside them.

    Parameters are in `dtype`; buffers keep their own.
    """

    def __init__(self, published: PublishedModel, dtype: torch.dtype, max_shard_bytes: int = SHARD_BYTES):
        self.published, self._dtype = published, dtype
        model = published.model
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        dtypes = {
            name: dtype if name in parameters and t.is_floating_point() else t.dtype
            for name, t in model.state_dict().items()
        }
        entries = [
            TensorEntry(name=name, shape=shape, dtype=dtypes[part.source])
            for part in published.parts
            for name, shape in part.outputs.items()
        ]
        self.bytes = sum(entry.bytes for entry in entries)
        shards = cut(entries, max_shard_bytes) if published.transformers else [entries]
        self._files = {"model.safetensors": shards[0]}
        if len(shards) > 1:  # as transformers names them
            number = len(shards)
            self._files = {f"model-{i:05}-of-{number:05}.safetensors": s for i, s in enumerate(shards, start=1)}

    def write(
        self,
        folder: Path,
        tensors: Iterable[tuple[str, Tensor]],
        wrote: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write tensors under their names in the model, in any order, one at a time; those left out are passed over.

        `wrote` is called with bytes as they go out. Raises RunFailed where the files do not read back.
        """
        parts = {part.source: part for part in self.published.parts}
        files = {name: TensorFile(folder / name, entries) for name, entries in self._files.items()}
        where = {entry.name: file for file in files.values() for entry in file.entries}
        for name, tensor in tensors:
            if name in parts:
                for output, piece in self.published.tensors(parts.pop(name), tensor).items():
                    where[output].write(output, piece, wrote)
        assert not parts, f"nothing came for {', '.join(parts)}"
        for name, entries in self._files.items():
            check_file(folder / name, entries)
        if self.published.transformers:
            self._write_configs(folder)

    def _write_configs(self, folder: Path) -> None:
        """Write config.json, generation_config.json where the model generates, and the index of several files."""
        model = cast("PreTrainedModel", self.published.model)
        config = model.config
        config.dtype = self._dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        if len(self._files) > 1:
            total = {"total_parameters": model.num_parameters(), "total_size": self.bytes}
            where = {entry.name: file for file, entries in self._files.items() for entry in entries}
            index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """One tensor of the model and what it becomes in the files."""

    source: str  # its name in the model's state_dict
    outputs: dict[str, tuple[int, ...]]  # names in the files, and shapes


class PublishedModel:
    """The published form of a model on the meta device: transformers' own, or just its state_dict."""

    def __init__(self, model: nn.Module, transformers: bool):
        self.model, self.transformers = model, transformers
        self._converts = False
        left_out: set[str] = set()
        if transformers:  # names that it does not write: tied to others, or made anew when the model is loaded
            published = cast("PreTrainedModel", model)
            left_out = {*published.all_tied_weights_keys, *(published._keys_to_ignore_on_save or ())}
        state = {name: t for name, t in model.state_dict().items() if name not in left_out}
        self.parts = [PublishedTensor(source=name, outputs={name: tuple(t.shape)}) for name, t in state.items()]
        if transformers:
            self._convert(state)

    def tensors(self, part: PublishedTensor, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor of a part as the files have it, by name."""
        return self._converted({part.source: tensor}) if self._converts else {part.source: tensor}

    def _convert(self, state: dict[str, Tensor]) -> None:
        """Go over to the names that transformers publishes models of this kind under, which may differ from its own.

        A mixture of experts has one tensor an expert there. A model of which one published tensor takes several of
        ours keeps its own names, which transformers loads as well.
        """
        whole = self._converted(dict(state))
        try:
            parts = [(name, self._converted({name: tensor})) for name, tensor in state.items()]
        except (RuntimeError, ValueError, IndexError, KeyError):
            return
        times = Counter(name for _, outputs in parts for name in outputs)
        alone = {name: t.shape for _, outputs in parts for name, t in outputs.items()}
        if max(times.values()) == 1 and alone == {name: t.shape for name, t in whole.items()}:
            self._converts = True
            self.parts = [
                PublishedTensor(source=source, outputs={name: tuple(t.shape) for name, t in outputs.items()})
                for source, outputs in parts
            ]

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(cast("PreTrainedModel", self.model), tensors)


def _meta_model(manifest: Manifest, file: Path, trusted: bool) -> tuple[nn.Module, bool]:
    """Build the run's model on the meta device; also return whether it is one of transformers'. Raises UserError."""
    run = manifest.job.run
    try:
        source = find(run.model)
        refuse_untrusted_code(source, run.model_args, file, trusted)
        with torch.device("meta"):
            return build(source, manifest.inputs, dict(run.model_args)), source.family == "transformers"
    except ModelError as error:
        message = f"the run's model {run.model} cannot be built again: {error.message}"
        hint = "paths and modules are looked for from the current folder: go where the run was started"
        raise UserError(Problem(kind=error.kind, message=message, hint=hint, where="PATH")) from None


def _check_names(model: nn.Module, state: FullState, checkpoint: Path) -> None:
    """Raise UserError with every name that is missing, too many, or of another shape than the model's."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: state.shape(name) for name in state.tensors}
    saved |= {name: saved[source] for name, source in state.ties.items() if source in saved}
    problems = Problems()
    hint = "is the model's code or config what it was when the run was started?"
    for name in sorted(wanted.keys() | saved.keys()):
        if name not in saved:
            problems.add("missing-tensor", f"the checkpoint holds no {name}", hint, str(checkpoint))
        elif name not in wanted:
            problems.add("unexpected-tensor", f"the model has no {name}, which the checkpoint holds", hint, name)
        elif saved[name] != wanted[name]:
            message = f"{name} is {saved[name]} in the checkpoint, {wanted[name]} in the model"
            problems.add("wrong-shape", message, hint, str(checkpoint))
    problems.raise_if_any()
