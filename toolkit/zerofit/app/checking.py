"""`zerofit.check`: check, fix, explain and resolve a DeepSpeed JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.check.argument_files import ACCELERATE_JSON, ArgumentFile, of_mapping, read_argument_file
from zerofit.check.arguments import given_by, plugin_config, requested_by, unknown_settings
from zerofit.check.catalog import catalog
from zerofit.check.check import check as find_all
from zerofit.check.check import mend
from zerofit.check.document import Document, of_data, of_lines
from zerofit.check.dotted import autos
from zerofit.check.effective import effective_config
from zerofit.check.explain import KeyRow
from zerofit.check.explain import explain as explain_keys
from zerofit.check.finding import Finding
from zerofit.check.migrate import Migrated, migrate
from zerofit.check.neox import model_parallel
from zerofit.check.reader import HUGGING_FACE, MARKS, Reader, guess
from zerofit.check.rules.batch import ranks_of_batch
from zerofit.check.scan import SyntaxFault
from zerofit.check.subject import GivenArgument, RequestedValue, TargetHardware, UnclearValue
from zerofit.config.decide import DEGREES, reasons
from zerofit.config.ds_json import find_config, for_run, is_bundled, read_document, read_text
from zerofit.config.validate import most_stages
from zerofit.report.html_table import html_table
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.foreign import refused
from zerofit.spec.run import AUTO, DS_KEYS, Run, RunRequest

SEARCHED = 2 * 2**20  # bytes; larger files in a folder are data


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The plain DeepSpeed JSON for a run, and why it has each value that the user did not set."""

    config: dict[str, object]
    reasons: list[dict[str, Any]]  # "path", "value" and "why"

    def to_dict(self) -> dict[str, object]:
        """Return the keys that `zerofit check --resolve --json` adds."""
        return {"resolved": self.config, "reasons": self.reasons}


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Findings about a DeepSpeed JSON, and their fixes."""

    file: str  # the file's path; "ds_config" if the configuration was given as data
    reader: Reader
    findings: tuple[Finding, ...]  # by line
    document: Document = field(repr=False)
    hardware: TargetHardware = field(repr=False)
    request: RunRequest = field(repr=False)
    cluster: Cluster | None = field(repr=False)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that make DeepSpeed refuse to start, or train differently than requested."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """All other findings."""
        return tuple(f for f in self.findings if f.severity != "error")

    @property
    def allowed_ranks(self) -> str:
        """The numbers of data parallel ranks that `train_batch_size` allows; "" without a limit."""
        if not isinstance(self.document.config, dict):
            return ""
        try:
            return ranks_of_batch(effective_config(self.document.config, catalog(), self.hardware).subject)
        except UnclearValue:
            return ""

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zerofit check --json` prints."""
        return {
            "file": self.file,
            "reader": self.reader.name,
            "note": self.reader.note,
            "allowed_ranks": self.allowed_ranks,
            "problems": [finding.as_dict() for finding in self.findings],
        }

    def explain(self) -> list[KeyRow]:
        """Return the effect of each key, ignored keys, and defaults that matter."""
        return explain_keys(self.document, self.findings, self.hardware)

    def fixed(self) -> str:
        """Return the text with all fixes that need no decision by the user."""
        return mend(self.document, self.hardware)

    def errors_of(self, text: str) -> tuple[Finding, ...]:
        """Return the errors that the file would have with `text`, for example the fixed text."""
        if text == self.document.text:
            return self.errors
        return tuple(f for f in find_all(self.document.reread(text), self.hardware) if f.severity == "error")

    def migrated(self) -> Migrated:
        """Return the text migrated from an older to the installed DeepSpeed, and lost settings."""
        return migrate(self.document, self.hardware)

    def write(self, text: str, word: str) -> Path | None:
        """Write `text` to NAME.WORD.json next to NAME.json; return the path, None if it is the same.

        No file is overwritten: the name gets a number if it is taken. Raises UserError if the folder is not writable.
        """
        if text == self.document.text:
            return None
        if self.file == "-":
            message = "--fix and --migrate need a file, because they write the new JSON next to it"
            raise UserError(Problem(kind="usage", message=message, hint="name a file", where="FILE"))
        path = Path(self.file)
        target, number = path.with_name(f"{path.stem}.{word}{path.suffix}"), 1
        while target.exists() and not _has_content(target, text):
            number += 1
            target = path.with_name(f"{path.stem}.{word}-{number}{path.suffix}")
        hint = "copy the file to a writable folder first"
        with refused(target, kind="output-unwritable", hint=hint, where="FILE", doing="write"):
            # keep the file's line endings, so that a diff shows only what was changed
            ending = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
            target.write_text(text, encoding="utf-8", newline=ending)
        return target

    def resolve(self) -> ResolvedConfig:
        """Return the plain JSON for a run, with a value for every "auto".

        If the Trainer or Accelerate reads the file, return the JSON that they pass to DeepSpeed. Otherwise return
        the JSON that `zerofit train` passes to DeepSpeed. If zerofit only guessed the reader and the user gave a
        model, always return the JSON of `zerofit train`. Raises UserError with all problems.
        """
        # zerofit can also train with many of the Trainer's files. If the reader is a guess, a given model decides.
        guessed = bool(self.reader.why)
        if self.reader.name in HUGGING_FACE and not (guessed and self.hardware.facts):
            return self._as_passed_to_deepspeed()
        if self.hardware.facts is None:
            message = "--resolve needs a model: bucket, prefetch and persistence sizes depend on it"
            raise UserError(Problem(kind="usage", message=message, hint="add --model NAME", where="--model"))
        from zerofit.app.job.resolve import PUBLISHED, cluster_machine, resolve_job

        config = self.document.config if self.document.generated else self.file
        machine = cluster_machine(self.cluster) if self.cluster else None
        request = self.request.updated(ds_config=config)
        job = resolve_job(request, machine=machine, inputs=PUBLISHED).job
        return ResolvedConfig(config=job.ds_config, reasons=reasons(self.document.config, job))

    def _as_passed_to_deepspeed(self) -> ResolvedConfig:
        effective = effective_config(self.document.config, catalog(), self.hardware)
        # A value that is still "auto" may be a consequence of an error, so errors come first.
        problems = [
            Problem(kind=f.code, message=f.message, hint=f.fix, where=f"{self.file}:{f.line}:{f.column}")
            for f in self.errors
        ]
        unfilled = list(autos(effective.subject.config))
        if unfilled and not problems:
            message = f"no value given for {', '.join(unfilled)}"
            hint = "set them by flags or --training-args; --ranks sets the batch size, --model sets the bucket sizes"
            problems = [Problem(kind="auto-unfilled", message=message, hint=hint, where=self.file)]
        if problems:
            raise UserError(*problems)
        reasons = [{"path": path, "value": by.value, "why": by.by} for path, by in effective.filled.items()]
        return ResolvedConfig(config=dict(effective.subject.config), reasons=reasons)

    def _repr_html_(self) -> str:
        rows = [(f.line, f.path, f.severity, f.message, f.fix) for f in self.findings]
        caption = f"{self.file}: {len(self.errors)} errors, {len(self.warnings)} warnings"
        return html_table(caption, ("line", "key", "", "what is wrong", "fix"), rows)


def find_files(names: Sequence[str]) -> list[str]:
    """Return the named files. For a folder, return every JSON in it that has DeepSpeed's keys.

    Raises UserError if a folder has no such JSON.
    """
    paths: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            paths.append(name)
            continue
        # os.walk skips folders that vanish during the search; Path.rglob fails on them.
        files = (Path(folder, file) for folder, _, files in os.walk(name) for file in files if ".json" in file)
        inside = sorted(str(file) for file in files if file.is_file() and _has_deepspeed_keys(file))
        if not inside:
            message = f"no DeepSpeed JSON in the folder {name}"
            raise UserError(Problem(kind="unreadable", message=message, hint="name a file", where="FILE"))
        paths += inside
    return paths


def _has_deepspeed_keys(path: Path) -> bool:
    """Return whether a file has one of DeepSpeed's most common keys (`MARKS`)."""
    try:
        text = path.read_bytes() if path.stat().st_size <= SEARCHED else b""
    except OSError:
        return False
    # the file may not parse, and without its zero bytes UTF-16 reads like ASCII
    return any(f'"{key}"'.encode() in text.replace(b"\0", b"") for key in MARKS)


def check(
    ds_config: str | Path | Mapping[str, object] | None = None,
    run: Run | RunRequest | None = None,
    cluster: Cluster | str | None = None,
    *,
    reader: str | None = None,
    training_args: str | Path | Mapping[str, object] | None = None,
    accelerate_config: str | Path | Mapping[str, object] | None = None,
    on_event: OnEvent | None = None,
) -> CheckResult:
    """Find all problems in a DeepSpeed JSON before anything starts.

    Args:
        ds_config: a file, the name of a bundled JSON, or the configuration itself; None for the JSON that
            `training_args` or `accelerate_config` name.
        run: the run that uses the JSON. If the run names a model, sizes are checked against it (this imports torch).
        cluster: the hardware. With only a device kind ("h100-80gb") the run gives the number of ranks.
        reader: the program that reads the file, one of `zerofit.check.reader.READERS`. By default zerofit guesses it.
        training_args: arguments of the Trainer to compare the JSON with: a JSON, a YAML (axolotl's and
            LLaMA-Factory's too), a shell script with the flags, or the values.
        accelerate_config: Accelerate's YAML, or its values. If neither this YAML nor another argument names a JSON,
            the DeepSpeed keys of the YAML are checked.
        on_event: gets progress.

    Raises UserError if a file does not parse, or the run's model or the device kind is unknown.

    >>> import zerofit as zf
    >>> result = zf.check({"train_batch_size": 8, "zero_optimisation": {"stage": 2}})
    >>> [(finding.path, finding.fix) for finding in result.errors]
    [('zero_optimisation', 'did you mean zero_optimization?')]
    >>> '"zero_optimization"' in result.fixed()
    True
    """
    # The findings depend on the program that reads the file, on the hardware, and on values given elsewhere. These are
    # collected first, and `find_all` then judges the JSON with all of them.
    argument_files = [
        read_arguments(given, accelerate=accelerate)
        for given, accelerate in ((accelerate_config, True), (training_args, False))
        if given is not None
    ]
    file, document = _document(ds_config, argument_files)
    request = RunRequest.of(run or Run())
    ranks = request.run.ranks or (cluster.ranks if isinstance(cluster, Cluster) else None)
    ranks = ranks or next((file.ranks for file in argument_files if file.ranks), None)
    if isinstance(cluster, str):
        cluster = Cluster(cluster, gpus=ranks or 1)
    # The reader is the given one, else the program of the argument files, else a guess from the keys.
    if reader:
        program = Reader(name=reader)
    elif argument_files:
        only_accelerate = all(file.kind == "accelerate" for file in argument_files)
        program = Reader(name="accelerate" if only_accelerate else "trainer")
    elif is_bundled(Path(file)):
        program = Reader(name="zerofit")
    else:
        program = guess(document.config, yaml=document.yaml)
    if is_bundled(Path(file)) and program.name == "zerofit":
        document = for_run(document)
    if ranks and program.name == "neox":
        ranks //= model_parallel(document.config)  # GPT-NeoX's DeepSpeed counts data parallel ranks only
    facts = None
    if "model" in request.run.model_fields_set:
        Reporter(on_event).status(f"reading the model {request.run.model} ...")  # torch takes seconds to import
        from zerofit.app.job.model_facts import facts_of
        from zerofit.app.job.resolve import find_model

        facts = facts_of(*find_model(request), None, request.run)
    requested, given = [*_requested_by_flags(request.run)], dict[str, GivenArgument]()
    for arguments in argument_files:
        given |= given_by(arguments)
        if arguments.kind != "accelerate" or arguments.file != file:  # else the JSON consists of Accelerate's own keys
            requested += requested_by(arguments, ranks)
    stages = request.run.pipeline
    hardware = TargetHardware(
        ranks=ranks,
        pipeline=most_stages(request.run, ranks or 1, facts and facts.layers) if stages == AUTO else stages,
        schedule=request.run.pipeline_schedule,
        accelerator=None if cluster is None else cluster.accelerator,
        precisions=tuple(cluster.device.tflops if cluster else ("fp32", "bf16", "fp16")),
        facts=facts,
        reader=program.name,
        requested=tuple(requested),
        guessed=bool(program.why),
        one_thread=next((file.one_thread for file in argument_files if file.one_thread), None),
        arguments=given,
        host_bytes=cluster.host_bytes * cluster.nodes if cluster and ranks and not cluster.on_cpu else None,
    )
    findings = tuple(find_all(document, hardware))
    findings += tuple(finding for arguments in argument_files for finding in unknown_settings(arguments))
    return CheckResult(
        file=file,
        reader=program,
        findings=findings,
        document=document,
        hardware=hardware,
        request=request,
        cluster=cluster,
    )


def read_arguments(given: str | Path | Mapping[str, object], *, accelerate: bool) -> ArgumentFile:
    """Read an argument file or values.

    Raises UserError with line and column if it does not parse.
    """
    if isinstance(given, Mapping):
        return of_mapping(given, accelerate=accelerate)
    where = "--accelerate-config" if accelerate else "--training-args"
    try:
        return read_argument_file(str(given), read_text(Path(given))[0], accelerate=accelerate)
    except SyntaxFault as fault:
        message = f"{given} has a syntax error at line {fault.line}, column {fault.column}: {fault.message}"
        problem = Problem(kind="syntax", message=message, where=f"{given}:{fault.line}:{fault.column}")
        raise UserError(problem) from None
    except OSError as error:
        message = f"cannot read {given}: {error}"
        raise UserError(Problem(kind="unreadable", message=message, where=where)) from None


def _named_config(argument_files: Sequence[ArgumentFile]) -> tuple[str, str] | None:
    """Return the path of the JSON that an argument file names, and the line that names it.

    The path is relative to the current folder or to the folder of the argument file.
    """
    for file in argument_files:
        name = file.config_file
        if name is not None:
            next_to_file = Path(file.file).parent / name
            where = file.place(ACCELERATE_JSON if file.kind == "accelerate" else "deepspeed")
            # The programs resolve the path against the current folder. Users often check from another one.
            return (str(next_to_file) if next_to_file.exists() and not Path(name).exists() else name), where
    return None


def _document(
    ds_config: str | Path | Mapping[str, object] | None, argument_files: list[ArgumentFile]
) -> tuple[str, Document]:
    if isinstance(ds_config, Mapping):
        return "ds_config", of_data(dict(ds_config))
    named = (str(ds_config), "FILE") if ds_config is not None else _named_config(argument_files)
    if named is not None:
        path = find_config(named[0], where=named[1])
        return str(path), read_document(path, where=named[1])
    # The JSON may be a section of the arguments, or Accelerate makes it from its own keys.
    for file in argument_files:
        if file.kind != "accelerate" and file.section("deepspeed")[0]:
            return file.file, of_lines(*file.section("deepspeed"))
    for file in argument_files:
        if file.kind == "accelerate" and file.get("distributed_type") in (None, "DEEPSPEED"):
            return file.file, of_lines(*plugin_config(file))
    message = "no DeepSpeed JSON was given, and the other files neither name nor contain one"
    raise UserError(Problem(kind="usage", message=message, hint="name a FILE", where="FILE"))


def _requested_by_flags(run: Run) -> Iterator[RequestedValue]:
    for name in (name for name in DS_KEYS if name not in DEGREES):
        value = getattr(run, name)
        if name in run.model_fields_set and value is not None:
            yield RequestedValue(path=DS_KEYS[name], value=value, source=f"--{name.replace('_', '-')} {value}")
    if "precision" in run.model_fields_set and run.precision:
        for name in ("fp16", "bf16"):
            source = f"--precision {run.precision}"
            yield RequestedValue(path=f"{name}.enabled", value=run.precision == name, source=source)


def _has_content(path: Path, text: str) -> bool:
    """Return whether the file contains exactly `text`. Line endings may differ."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
