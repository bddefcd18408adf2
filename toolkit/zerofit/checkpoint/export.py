"""A checkpoint turned into a model that other tools load: a Hugging Face folder, or one safetensors file.

The tensors come one by one out of the checkpoint's files and go one by one into the new ones, so that memory is a
matter of the largest tensor and not of the model. No engine and no device takes part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofit.checkpoint.contents import CheckpointTensors
from zerofit.checkpoint.hf_names import PublishedModel, PublishedTensor, published_dtypes
from zerofit.checkpoint.locate import manifest_of
from zerofit.checkpoint.manifest import NAME, Manifest
from zerofit.checkpoint.model_card import about_run, inputs_of, refuse_untrusted_code, write_about
from zerofit.checkpoint.safetensors_writer import TensorEntry, check_file, cut, write_file
from zerofit.checkpoint.staging import refuse_existing, refuse_small_disk, written_aside
from zerofit.data.tokenizer import load_transformers
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import Inputs, TextInputs
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.run import Run
from zerofit.spec.units import shown_bytes

SHARD_BYTES = 1 << 30  # who loads a shard into host memory whole, as accelerate does, needs no more than this
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    out: Path
    files: list[str]
    parameters: int  # elements, tied ones once
    dtype: str  # of the parameters: "fp32", "bf16" or "fp16"


class _Plan:
    """What is to be written, decided and checked before anything is."""

    def __init__(self, checkpoint: Path, manifest: Manifest, dtype: str | None, trusted: bool):
        self.run = Run(**manifest.job["run"])
        self.inputs: Inputs = inputs_of(manifest.job["inputs"])
        self.dtype = dtype or self.run.precision or "fp32"
        self.contents = CheckpointTensors(checkpoint, manifest)
        self.model, self.transformers = _empty_model(self.run, self.inputs, checkpoint / NAME, trusted)
        _check_names(self.model, self.contents, checkpoint)
        self.published = PublishedModel(self.model, self.transformers)
        dtypes = published_dtypes(self.model, DTYPES[self.dtype])
        self._parts = {name: part for part in self.published.parts for name in part.outputs}
        self.entries = [
            TensorEntry(name=name, shape=shape, dtype=dtypes[part.source])
            for part in self.published.parts
            for name, shape in part.outputs.items()
        ]
        self._held: tuple[PublishedTensor, dict[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        """A published tensor; one part of the model is held at a time, since several tensors can come out of it."""
        part = self._parts[name]
        if self._held is None or self._held[0] is not part:
            self._held = None
            self._held = (part, self.published.tensors(part, _tensor(self.contents, part.source)))
        return self._held[1][name]


def export(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda _: None,
    trust_model_code: bool = False,
) -> Exported:
    """Write the model of a checkpoint's folder into `out`, which must not exist or be empty.

    A transformers model becomes a folder for `from_pretrained`, with the tokenizer's files where the run used one;
    any other model one `model.safetensors` for `load_state_dict`. `dtype` is that of the parameters (fp32, bf16,
    fp16), by default the run's precision; buffers keep their own. A model of the form package.module:callable is
    refused unless `trust_model_code`. Raises UserError where the checkpoint does not fit the model, and before anything
    is written where there is no room.
    """
    refuse_existing(out)
    manifest = manifest_of(checkpoint)
    progress("building the model on the meta device ...")
    plan = _Plan(checkpoint, manifest, dtype, trust_model_code)
    tokenizer = _tokenizer(plan)
    files = _files(plan, max_shard_bytes)
    refuse_small_disk(out, sum(entry.bytes for entry in plan.entries))
    with written_aside(out) as aside:
        _write_weights(plan, files, aside, progress)
        if plan.transformers:
            _write_transformers(plan, files, aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        torch_name = str(DTYPES[plan.dtype]).removeprefix("torch.")
        about = about_run(plan.run, manifest.job["facts"]["task"], plan.inputs, manifest.step, torch_name)
        write_about(aside, about)
        names = sorted(path.name for path in aside.iterdir())
    parameters = sum(p.numel() for p in plan.model.parameters())
    return Exported(out=out, files=names, parameters=parameters, dtype=plan.dtype)


def _empty_model(run: Run, inputs: Inputs, file: Path, trusted: bool) -> tuple[nn.Module, bool]:
    """The run's model on the meta device, and whether it is one of transformers'. Raises UserError."""
    try:
        source = find(run.model)
        refuse_untrusted_code(source, run.model_args, file, trusted)
        with torch.device("meta"):
            return build(source, inputs, dict(run.model_args)), source.family == "transformers"
    except ModelError as error:
        message = f"the run's model {run.model} cannot be built again: {error.message}"
        hint = "paths and modules are looked for from the current folder: go where the run was started"
        raise UserError(Problem(kind=error.kind, message=message, hint=hint, where="PATH")) from None


def _check_names(model: nn.Module, contents: CheckpointTensors, checkpoint: Path) -> None:
    """Raise UserError with every name that is missing, too many, or of another shape than the model's."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    held = {name: contents.shape(name) for name in contents.names}
    held |= {name: tuple(contents.buffer(name).shape) for name in contents.buffers}
    held |= {name: held[source] for name, source in contents.ties.items() if source in held}
    problems = Problems()
    hint = "is the model's code or config what it was when the run was started?"
    for name in sorted(wanted.keys() | held.keys()):
        if name not in held:
            problems.add("missing-tensor", f"the checkpoint holds no {name}", hint, str(checkpoint))
        elif name not in wanted:
            problems.add("unexpected-tensor", f"the model has no {name}, which the checkpoint holds", hint, name)
        elif held[name] != wanted[name]:
            message = f"{name} is {held[name]} in the checkpoint, {wanted[name]} in the model"
            problems.add("wrong-shape", message, hint, str(checkpoint))
    problems.raise_if_any()


def _tensor(contents: CheckpointTensors, name: str) -> Tensor:
    name = contents.ties.get(name, name)
    return contents.buffer(name) if name in contents.buffers else contents.read(name)


def _tokenizer(plan: _Plan) -> Any:
    """The run's tokenizer, None for bytes and where the model reads no text."""
    if not isinstance(plan.inputs, TextInputs) or plan.run.tokenizer == "bytes":
        return None
    return load_transformers(plan.run.tokenizer)


def _files(plan: _Plan, max_shard_bytes: int) -> dict[str, list[TensorEntry]]:
    """Entries by file name, named as transformers names them."""
    shards = cut(plan.entries, max_shard_bytes) if plan.transformers else [plan.entries]
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_weights(
    plan: _Plan, files: dict[str, list[TensorEntry]], folder: Path, progress: Callable[[str], None]
) -> None:
    done, total = 0, sum(entry.bytes for entry in plan.entries)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(f"exporting {shown_bytes(done)} of {shown_bytes(total)}")

    for name, entries in files.items():
        write_file(folder / name, entries, plan.read, wrote)
        check_file(folder / name, entries)


def _write_transformers(plan: _Plan, files: dict[str, list[TensorEntry]], folder: Path) -> None:
    """config.json, generation_config.json where the model generates, and the index of several files."""
    config = plan.model.config
    config.dtype = DTYPES[plan.dtype]
    config.architectures = [type(plan.model).__name__]
    config.save_pretrained(folder)
    if plan.model.can_generate():
        plan.model.generation_config.save_pretrained(folder)
    if len(files) > 1:
        total = {"total_parameters": plan.model.num_parameters(), "total_size": sum(e.bytes for e in plan.entries)}
        where = {entry.name: file for file, entries in files.items() for entry in entries}
        index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
