"""`zerofit.check`: a DeepSpeed JSON checked, fixed, explained and resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.check.check import check as find_all
from zerofit.check.check import mend
from zerofit.check.document import Document, of_data, parse
from zerofit.check.explain import KeyRow
from zerofit.check.explain import explain as explain_keys
from zerofit.check.finding import Finding
from zerofit.check.migrate import Migrated, migrate
from zerofit.check.reader import Reader, guess
from zerofit.check.subject import TargetHardware
from zerofit.config.decide import PAIRS
from zerofit.config.ds_json import LARGEST, bundled, find_config, read_document
from zerofit.report.html_table import html_table
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.run import Run, RunRequest

MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
COMPARED = ("global_batch", "micro_batch", "gradient_accumulation_steps", "gradient_clipping", "lr", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The plain DeepSpeed JSON that a run gets, and the reason of each value that was left open."""

    config: dict[str, Any]
    reasons: list[dict[str, Any]]  # "path", "value" and "why"

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that `zerofit check --resolve --json` adds."""
        return {"resolved": self.config, "reasons": self.reasons}


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Faults of a DeepSpeed JSON, and what can be done about them."""

    file: str  # its path; "ds_config" where it was given as data
    reader: Reader
    findings: tuple[Finding, ...]  # by line
    document: Document = field(repr=False)
    hardware: TargetHardware = field(repr=False)
    request: RunRequest = field(repr=False)
    cluster: Cluster | None = field(repr=False)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What DeepSpeed refuses, or trains otherwise than was asked."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """All other findings."""
        return tuple(f for f in self.findings if f.severity != "error")

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit check --json` prints."""
        return {"file": self.file, "reader": self.reader.name, "problems": [f.as_dict() for f in self.findings]}

    def explain(self) -> list[KeyRow]:
        """Return what each key does, which keys are ignored, and the defaults that matter."""
        return explain_keys(self.document, self.findings, self.hardware)

    def fixed(self) -> str:
        """Return the text with every fix applied that needs no decision of the user."""
        return mend(self.document, self.hardware)

    def errors_of(self, text: str) -> tuple[Finding, ...]:
        """Return the errors of another text in this file's place, its fixed one for example."""
        if text == self.document.text:
            return self.errors
        return tuple(f for f in find_all(parse(text), self.hardware) if f.severity == "error")

    def migrated(self) -> Migrated:
        """Return the text carried from an older DeepSpeed to the installed one, and what was lost on the way."""
        return migrate(self.document, self.hardware)

    def write(self, text: str, word: str) -> Path | None:
        """Write `text` beside the file as NAME.`word`.json, never over another file; None if nothing changed.

        Raises UserError where that folder cannot be written to.
        """
        if text == self.document.text:
            return None
        if self.file == "-":
            message = "--fix and --migrate write beside the file, and standard input has no folder"
            raise UserError(Problem(kind="usage", message=message, hint="name a file", where="FILE"))
        path = Path(self.file)
        target, number = path.with_name(f"{path.stem}.{word}{path.suffix}"), 1
        while target.exists() and not _holds(target, text):
            number += 1
            target = path.with_name(f"{path.stem}.{word}-{number}{path.suffix}")
        try:
            ending = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
            target.write_text(text, encoding="utf-8", newline=ending)
        except OSError as error:
            message = f"cannot write {target}: {error.strerror or error}"
            hint = "copy the file to a folder of your own first"
            raise UserError(Problem(kind="output-unwritable", message=message, hint=hint, where="FILE")) from None
        return target

    def resolve(self) -> ResolvedConfig:
        """Return the plain JSON that a run gets, every "auto" filled. Raises UserError with all that is wrong."""
        if self.hardware.facts is None:
            message = "--resolve needs a model: bucket, prefetch and persistence sizes follow from it"
            raise UserError(Problem(kind="usage", message=message, hint="add --model NAME", where="--model"))
        from zerofit.app.resolve import cluster_machine, resolve_job
        from zerofit.config.resolve import reasons

        config = self.document.config if self.document.generated else self.file
        run = self.request.run.model_copy(update={"ds_config": config})
        machine = cluster_machine(self.cluster) if self.cluster else None
        asked = RunRequest(run=run, places=self.request.places)
        found = resolve_job(asked, machine=machine, inputs="published")
        plain = found.job.ds_config
        return ResolvedConfig(
            config=plain, reasons=reasons(self.document.config, plain, found.decision, self.hardware.facts)
        )

    def _repr_html_(self) -> str:
        rows = [(f.line, f.path, f.severity, f.message, f.fix) for f in self.findings]
        caption = f"{self.file}: {len(self.errors)} errors, {len(self.warnings)} warnings"
        return html_table(caption, ("line", "key", "", "what is wrong", "fix"), rows)


def find_files(names: Sequence[str]) -> list[str]:
    """Return the files that names mean: of a folder every JSON in it that has keys of DeepSpeed.

    Raises UserError where a folder holds none.
    """
    found: list[str] = []
    for name in names:
        if not Path(name).is_dir():
            found.append(name)
            continue
        inside = sorted(str(path) for path in Path(name).rglob("*.json*") if path.is_file() and _is_ours(path))
        if not inside:
            message = f"the folder {name} holds no DeepSpeed JSON"
            raise UserError(Problem(kind="unreadable", message=message, hint="name a file", where="FILE"))
        found += inside
    return found


def _is_ours(path: Path) -> bool:
    """Return whether a file looks like a DeepSpeed JSON: at least one of three keys that nearly all of them have."""
    try:
        text = path.read_bytes() if path.stat().st_size <= LARGEST else b""
    except OSError:
        return False
    return any(f'"{key}"'.encode() in text.replace(b"\0", b"") for key in MARKS)


def check(
    ds_config: str | Path | Mapping[str, Any],
    run: Run | RunRequest | None = None,
    cluster: Cluster | str | None = None,
    *,
    reader: str | None = None,
    on_event: OnEvent | None = None,
) -> CheckResult:
    """Find everything that is wrong in a DeepSpeed JSON, before anything starts.

    Args:
        ds_config: a file, the name of a bundled one, or the configuration itself.
        run: the run that it is for. Sizes are checked against its model if it names one (which imports torch).
        cluster: where it will run; a kind alone ("h100-80gb") leaves the number of ranks to the run.
        reader: the program that reads the file, one of `zerofit.check.reader.READERS`; guessed where it is not given.
        on_event: hears what is being done.

    Raises UserError where the file does not parse, or the run's model or the kind is not known.

    >>> import zerofit as zf
    >>> result = zf.check({"train_batch_size": 8, "zero_optimisation": {"stage": 2}})
    >>> [(finding.path, finding.fix) for finding in result.errors]
    [('zero_optimisation', 'did you mean zero_optimization?')]
    >>> '"zero_optimization"' in result.fixed()
    True
    """
    if isinstance(ds_config, Mapping):
        file, document = "ds_config", of_data(dict(ds_config))
    else:
        path = find_config(str(ds_config), where="FILE")
        file, document = str(path), read_document(path, where="FILE")
    request = RunRequest.of(run or Run())
    ranks = request.run.ranks or (cluster.ranks if isinstance(cluster, Cluster) else None)
    if isinstance(cluster, str):
        cluster = Cluster(cluster, gpus=ranks or 1)
    facts = None
    if "model" in request.run.model_fields_set:
        Reporter(on_event).status(f"reading the model {request.run.model} ...")  # torch takes seconds to import
        from zerofit.app.resolve import find_model
        from zerofit.train.probe import probe

        facts = probe(*find_model(request), None, request.run)
    able = cluster.device.tflops if cluster else ("fp32", "bf16", "fp16")
    ours = any(path.samefile(file) for path in bundled().values() if Path(file).is_file())
    known = Reader(name=reader or "zerofit") if reader or ours else guess(document.config)
    hardware = TargetHardware(
        ranks=ranks,
        pipeline=request.run.pipeline,
        accelerator=None if cluster is None else "cpu" if cluster.on_cpu else "cuda",
        precisions=tuple(able),
        facts=facts,
        reader=known.name,
        precision=request.run.precision if "precision" in request.run.model_fields_set else None,
        asked=_asked(request.run),
        guessed=bool(known.why),
    )
    findings = tuple(find_all(document, hardware))
    return CheckResult(
        file=file,
        reader=known,
        findings=findings,
        document=document,
        hardware=hardware,
        request=request,
        cluster=cluster,
    )


def _asked(run: Run) -> dict[str, tuple[str, float]]:
    """Return keys of the JSON that fields of the run speak of, with the flag and the value of those that were given."""
    given = {PAIRS[name]: (name, getattr(run, name)) for name in COMPARED if name in run.model_fields_set}
    return {key: (f"--{name.replace('_', '-')}", value) for key, (name, value) in given.items() if value is not None}


def _holds(path: Path, text: str) -> bool:
    """Return whether a file holds this text, whatever its line ends are."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
