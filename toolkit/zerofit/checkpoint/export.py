"""Export checkpoints as models for other tools: a Hugging Face folder, or a file.

Tensors are read and written in pieces. Only tensors that must be joined or merged are read in full. No engine or device
is needed.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from zerofit.checkpoint.adapters import CONFIG, WEIGHTS, is_adapters, read_adapters, write_adapters
from zerofit.checkpoint.conversion import progress
from zerofit.checkpoint.foreign import Foreign, foreign_at
from zerofit.checkpoint.foreign_facts import facts_of
from zerofit.checkpoint.full_state import FullState, full_model
from zerofit.checkpoint.merge import TrainedPart, merged_weights
from zerofit.checkpoint.model_folder import (
    LazyTensor,
    ModelInfo,
    TensorEntry,
    TensorFile,
    read_model_info,
    refuse_small_disk,
    staged_folder,
)
from zerofit.checkpoint.published import SHARD_BYTES, PublishedFiles, PublishedModel
from zerofit.checkpoint.store import MANIFEST, Manifest, is_own, manifest_of
from zerofit.data.chat_template import CHAT_TEMPLATE, tokenizer_files
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, ModelSource, find, source_of
from zerofit.models.dtypes import DTYPES, NAMES, torch_name
from zerofit.models.inputs import are_tokenized
from zerofit.models.quantized import without_bits
from zerofit.spec.errors import Problem, Problems, UserError, models_say
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Precision
from zerofit.spec.named_code import refuse_foreign_code

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
TOKENIZER_FILES += ("chat_template*", "generation_config.json", "preprocessor_config.json")
ADAPTER_NAME = re.compile(r"(.*\.lora_(?:[AB]|embedding_[AB]|magnitude_vector))\.[^.]+(\.weight)?")


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """The files written by an export."""

    out: Path
    files: list[str]
    parameters: int  # elements; tied parameters count once
    dtype: str  # of the parameters: "fp32", "bf16" or "fp16"

    def to_dict(self) -> dict[str, object]:
        """Return the object for `zerofit ckpt export --json`."""
        return {**vars(self), "out": str(self.out)}


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model to write, and the source of its tensors."""

    published: PublishedModel
    tensors: Callable[[], Iterable[tuple[str, Tensor | LazyTensor]]]  # by their names in the model
    dtype: Precision  # of the parameters
    write_tokenizer: Callable[[Path], None] | None  # into a folder; the files are read already
    info: ModelInfo | None


def export(
    checkpoint: Path,
    out: Path,
    dtype: Precision | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    *,
    merge: bool = False,
    trust_model_code: bool = False,
    report: Reporter | None = None,
) -> ExportResult:
    """Write the model of a checkpoint or of a folder of adapters into `out`.

    `out` is a new or empty folder. A transformers model becomes a folder for `from_pretrained`, with the run's
    tokenizer. Any other model becomes one `model.safetensors` for `load_state_dict`. Adapters become a folder for peft
    or, with `merge`, the full model. `dtype` is the type of the parameters (default: the run's precision); buffers keep
    their type. A model of the form package.module:callable is refused unless `trust_model_code`. Raises UserError if
    the checkpoint does not match the model. If the disk is too small, the function raises UserError and writes nothing.
    """
    report = report or Reporter()
    if not is_own(checkpoint) and not is_adapters(checkpoint) and (found := foreign_at(checkpoint)):
        return export_foreign(found, out, dtype, max_shard_bytes, report=report)
    report.status("building the model on the meta device ...")
    if is_adapters(checkpoint):
        return _write(_exported_adapters(checkpoint, dtype, trust_model_code), out, max_shard_bytes, report)
    # The model is built on meta: its state_dict has the names, the order and the ties that the files need. The numbers
    # come from the checkpoint, tensor by tensor.
    manifest = manifest_of(checkpoint)
    wanted: Precision = dtype or manifest.job.precision
    state = full_model(checkpoint)
    model, source = _meta_model(manifest, checkpoint / MANIFEST, trust_model_code)
    _check_names(model, state, checkpoint, without_frozen=source.partial is not None)
    run = manifest.job.run
    if merge and not run.lora:
        message = f"{checkpoint} is from a run without --lora and has no adapters to merge"
        raise UserError(Problem(kind="usage", message=message, hint="leave --merge out", where="--merge"))
    reads_tokens = are_tokenized(manifest.inputs)
    if reads_tokens and run.tokenizer == "bytes":
        report.note("the export has no tokenizer files (--tokenizer bytes): use `zerofit generate`, not AutoTokenizer")
    exported = ExportedModel(
        published=PublishedModel(model, source.family == "transformers"),
        tensors=lambda: ((name, state.source(state.ties.get(name, name))) for name in model.state_dict()),
        dtype=wanted,
        write_tokenizer=tokenizer_files(run.tokenizer, run.chat_template) if reads_tokens else None,
        info=ModelInfo.of_run(
            run, manifest.job.facts.task, manifest.inputs, manifest.step, torch_name(DTYPES[wanted]), manifest.frozen
        ),
    )
    if run.lora and not merge:
        return _write_adapters(exported, source, state, out)
    if source.partial:
        part = _part_of(manifest, model, source, state)
        exported = _merged(part, wanted, exported.write_tokenizer, exported.info)
    return _write(exported, out, max_shard_bytes, report)


def export_foreign(
    found: Foreign,
    out: Path,
    dtype: Precision | None,
    max_shard_bytes: int,
    *,
    config: Path | None = None,
    repair: bool = False,
    report: Reporter,
) -> ExportResult:
    """Write another program's weights.

    They become a Hugging Face folder, peft's adapters, or one safetensors file. `config` is the folder with config.json
    and the tokenizer (default: the checkpoint's folder, or its parent). Without a config, tensors have the checkpoint's
    names. `repair` replaces the data of a lost rank. Raises UserError.
    """
    state, folder = FullState(found.path, repair=repair), config or found.config_folder
    for repaired in state.repaired:
        report.note(repaired)
    wanted = dtype or cast("Precision", facts_of(found).precision or NAMES.get(state.saved_dtype, "fp32"))
    adapters = next((f for f in (found.path, found.path.parent) if is_adapters(f)), None)
    if adapters is not None:
        return _write_foreign_adapters(state, adapters, out, wanted)
    if folder is None:
        names = "so parameters keep the checkpoint's names (`ckpt export --model FOLDER` uses FOLDER's config.json)"
        report.note(f"{found.path} has no config.json, {names}")
    if folder:
        # built for its names, shapes and ties, which the files may lack
        with models_say("--model"), torch.device("meta"):
            model = build(replace(find(str(folder.absolute())), pretrained=None), None, {})
    else:
        model = _shape_model(state)
    parameters = dict(model.named_parameters())
    if folder:
        state.match(parameters)
    # Programs save a tied weight under one of its names or under all. Only names that the file lacks become ties.
    firsts = {id(p): name for name, p in parameters.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if firsts[id(parameter)] != name and name not in state.names:
            state.ties.setdefault(name, firsts[id(parameter)])
    _check_names(model, state, found.path, without_frozen=False)
    exported = ExportedModel(
        published=PublishedModel(model, folder is not None),
        tensors=lambda: ((name, state.source(state.ties.get(name, name))) for name in model.state_dict()),
        dtype=wanted,
        write_tokenizer=partial(_copy_tokenizer, folder) if folder else None,
        info=None,
    )
    return _write(exported, out, max_shard_bytes, report)


def _shape_model(state: FullState) -> nn.Module:
    """Return a module that has the checkpoint's names and shapes, but no forward.

    torch's methods would refuse names such as "type", which nn.Module has too.
    """
    model = nn.Module()
    for name in state.tensors:
        owner = model
        *path, last = name.split(".")
        for part in path:
            owner = cast("nn.Module", owner._modules.setdefault(part, nn.Module()))
        is_buffer = name in state.buffers
        tensor = torch.empty(state.shape(name), dtype=state.read(name).dtype if is_buffer else None, device="meta")
        if is_buffer:
            owner._buffers[last] = tensor
        else:
            owner._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    return model


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)


def _write_foreign_adapters(state: FullState, source: Path, out: Path, dtype: Precision) -> ExportResult:
    """Write adapters in peft's format, without their name and without frozen weights."""
    names = {}
    for name in state.names:
        owner, _, rest = name.partition(".modules_to_save.")
        if rest:  # begins with the adapter's name, which peft adds when it loads
            names[name] = f"{owner}.{rest.partition('.')[2]}"
        elif match := ADAPTER_NAME.fullmatch(name):
            names[name] = match[1] + (match[2] or "")  # embeddings have no ".weight"
    entries = [TensorEntry(name=new, shape=state.shape(old), dtype=DTYPES[dtype]) for old, new in names.items()]
    refuse_small_disk(out, sum(entry.bytes for entry in entries))
    with staged_folder(out) as staging:
        file = TensorFile(staging / WEIGHTS, entries)
        for old, new in names.items():
            file.write(new, state.read(old))
        shutil.copyfile(source / CONFIG, staging / CONFIG)
        _copy_tokenizer(source, staging)
        files = sorted(path.name for path in staging.iterdir())
    parameters = sum(math.prod(entry.shape) for entry in entries)
    return ExportResult(out=out, files=files, parameters=parameters, dtype=dtype)


def _part_of(manifest: Manifest, model: nn.Module, source: ModelSource, state: FullState) -> TrainedPart:
    frozen = manifest.frozen
    return TrainedPart(
        source=replace(source, partial=None),
        inputs=manifest.inputs,
        model_args=dict(manifest.job.run.model_args),
        seed=manifest.job.run.seed,
        dtype=getattr(torch, frozen.dtype) if frozen else torch.float32,
        model=model,
        read=state.read,
        names=frozenset(state.tensors),
        frozen=frozen,
    )


def _exported_adapters(folder: Path, dtype: Precision | None, trusted: bool) -> ExportedModel:
    # `--merge` is implied: a folder of adapters is exported as the full model
    part, info = read_adapters(folder, trusted), read_model_info(folder)
    wanted = dtype or NAMES[part.dtype]
    template, has_tokenizer = folder / CHAT_TEMPLATE, (folder / "tokenizer.json").is_file()
    tokenizer = tokenizer_files(str(folder) if has_tokenizer else "bytes", template if template.is_file() else None)
    return _merged(part, wanted, tokenizer, info and replace(info, dtype=torch_name(DTYPES[wanted])))


def _merged(
    part: TrainedPart, dtype: Precision, write_tokenizer: Callable[[Path], None] | None, info: ModelInfo | None
) -> ExportedModel:
    return ExportedModel(
        published=PublishedModel(part.plain, part.source.family == "transformers"),
        tensors=partial(merged_weights, part),
        dtype=dtype,
        write_tokenizer=write_tokenizer,
        info=info and replace(info, frozen=None),
    )


def _write_adapters(exported: ExportedModel, source: ModelSource, state: FullState, out: Path) -> ExportResult:
    model, dtype = exported.published.model, DTYPES[exported.dtype]
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    refuse_small_disk(out, sum(trained.values()) * dtype.itemsize)
    with staged_folder(out) as staging:
        write_adapters(staging, model, source, ((name, state.read(name).to(dtype)) for name in trained))
        names = _write_tokenizer_and_info(exported, staging)
    return ExportResult(out=out, files=names, parameters=sum(trained.values()), dtype=exported.dtype)


def _write(exported: ExportedModel, out: Path, max_shard_bytes: int, report: Reporter) -> ExportResult:
    files = PublishedFiles(exported.published, DTYPES[exported.dtype], max_shard_bytes)
    refuse_small_disk(out, files.bytes)
    with staged_folder(out) as staging:
        files.write(staging, exported.tensors(), progress(report, files.bytes, "exporting"))
        names = _write_tokenizer_and_info(exported, staging)
    parameters = sum(p.numel() for p in exported.published.model.parameters())
    return ExportResult(out=out, files=names, parameters=parameters, dtype=exported.dtype)


def _write_tokenizer_and_info(exported: ExportedModel, staging: Path) -> list[str]:
    if exported.write_tokenizer is not None:
        exported.write_tokenizer(staging)
    if exported.info is not None:
        exported.info.write(staging)
    return sorted(path.name for path in staging.iterdir())


def _meta_model(manifest: Manifest, file: Path, trusted: bool) -> tuple[nn.Module, ModelSource]:
    run = manifest.job.run
    try:
        source = source_of(run)
        if run.partial is None:  # so no pretrained files: the checkpoint has all weights
            source = replace(source, pretrained=None)
        refuse_foreign_code(file, trusted, model=run.model, model_args=run.model_args)
        with torch.device("meta"):
            return build(without_bits(source), manifest.inputs, dict(run.model_args)), source
    except ModelError as error:
        message = f"cannot build the run's model {run.model}: {error.message}"
        hint = "paths and modules are relative to the current folder: change to the folder where the run was started"
        raise UserError(Problem(kind=error.kind, message=message, hint=hint, where="PATH")) from None


def _check_names(model: nn.Module, state: FullState, checkpoint: Path, without_frozen: bool) -> None:
    """Raise UserError with all missing names, unexpected names and wrong shapes.

    `without_frozen`: the checkpoint has no frozen parameters.
    """
    # state_dict lists a tied tensor under each of its names. The checkpoint has it once, so `saved` gets the others.
    tensors = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, p in parameters.items() if without_frozen and not p.requires_grad}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in frozen}
    saved = {name: state.shape(name) for name in state.tensors}
    saved |= {name: saved[source] for name, source in state.ties.items() if source in saved}
    problems = Problems()
    hint = "has the model's code or config changed since the run was started?"
    for name in sorted(wanted.keys() | saved.keys()):
        if name not in saved:
            problems.add("missing-tensor", f"the checkpoint has no {name}", hint, str(checkpoint))
        elif name not in wanted:
            problems.add("unexpected-tensor", f"the checkpoint has {name}, but the model does not", hint, name)
        elif saved[name] != wanted[name]:
            message = f"{name} is {saved[name]} in the checkpoint, but {wanted[name]} in the model"
            problems.add("wrong-shape", message, hint, str(checkpoint))
    problems.raise_if_any()
