"""The end of a run: its result, or the error of the rank that failed first."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofit.launch.local import STARTED
from zerofit.report.html_table import html_table
from zerofit.spec.errors import DOES_NOT_FIT, DoesNotFit, Problem, RunFailed, Stopped
from zerofit.spec.foreign import read_json, refused
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.spec.units import shown_score


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a run.

    >>> result = TrainingResult.of(RunFolder(Path("runs/lenet")), {"steps": 30, "samples": 480, "tokens": None,
    ...     "train_loss": 0.31, "eval": {"loss": 0.29, "accuracy": 0.98}, "samples_per_s": 2100.0,
    ...     "tokens_per_s": None, "world_size": 2, "layout": {"dp": 2, "zero_stage": 2}, "resumed_from": None})
    >>> result.eval["accuracy"], result.to_dict()["run_dir"]
    (0.98, 'runs/lenet')
    """

    run_dir: str  # the run folder
    steps: int  # optimizer steps of the full run
    samples: int
    tokens: int | None  # None for images
    train_loss: float  # of the last step
    eval: Mapping[str, float]  # loss, and accuracy (images) or perplexity (text), over the validation samples
    samples_per_s: float
    tokens_per_s: float | None
    world_size: int
    layout: Mapping[str, int]  # dp, tp, pp, sp, zero_stage
    resumed_from: str | None  # the checkpoint that the last start resumed from
    unigram_entropy_nats: float | None = None  # loss of a model that predicts by token frequency alone
    sample: str | None = None  # text from the trained language model
    stages: Sequence[Mapping[str, object]] = ()  # pipelines only: stage, its ranks, its layers, parameters
    conversations: Mapping[str, int] | None = None  # conversations: all, truncated, left out, and their tokens
    # name in metrics.jsonl -> measured, forecast (None: unknown) and difference as a share of the forecast
    against_forecast: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: RunFolder, values: Mapping[str, Any]) -> TrainingResult:
        """Return the result that rank 0 wrote into the run folder."""
        return cls(run_dir=str(folder.path), **values)

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit train --json` prints."""
        values = asdict(self)
        for name in ("sample", "stages"):
            if not values[name]:
                del values[name]
        return values

    def plot(self, path: str | Path) -> Path:
        """Draw loss, throughput and memory of the run. Return the picture's path."""
        from zerofit.report.plot import draw

        draw([Path(self.run_dir)], Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the figures as a table, for a notebook."""
        values = {"run folder": self.run_dir, "steps": self.steps, "training loss": shown_score(self.train_loss)}
        values |= {f"validation {name}": shown_score(value) for name, value in self.eval.items()}
        return html_table("training", (), values.items())


def finished_before(job: Job, folder: RunFolder) -> TrainingResult | None:
    """Return the result of a run if its last step is done and its model is saved, else None."""
    if job.start is None or job.start.step < job.steps or not folder.result.exists() or not folder.model.exists():
        return None
    with refused(folder.result):
        return TrainingResult.of(folder, read_json(folder.result))


def outcome(
    folder: RunFolder,
    code: int,
    again: str = "zerofit train",
    seen: Problem | None = None,
    heard: Sequence[dict[str, object]] = (),
) -> dict[str, object]:
    """Return the result that rank 0 wrote.

    `again`: the command that resumes a run folder. `seen`: the failure that the guards or the command saw. `heard`:
    failures that ranks reported directly to the command, since the disk of the folder may be full.

    Raises RunFailed with the cause, DoesNotFit if a host that the command could not examine has too little memory,
    and Stopped if the ranks stopped on request.
    """
    written = [failure for _, failure in folder.errors() if failure]
    # what a rank reported directly replaces its file, which may be incomplete on a full disk
    failures = list({failure["rank"]: failure for failure in [*written, *heard]}.values())
    failures.sort(key=lambda failure: failure.get("time_s", 0.0))
    # Losing a peer is a consequence. The cause is the first other failure, or the failure seen from outside.
    causes = [failure for failure in failures if failure["problems"][0]["kind"] != "peer-lost"]
    if causes:
        cause = _reported(folder, causes[0])
        raise DoesNotFit(cause) if cause.kind == DOES_NOT_FIT else RunFailed(cause)
    if seen and not (failures and seen.kind == "rank-ended"):
        raise RunFailed(replace(seen, where=seen.where or str(folder.logs)))
    if failures:
        raise RunFailed(_reported(folder, failures[0]))
    if folder.stopped.exists():
        done = read_json(folder.stopped)
        message = f"stopped on request after step {done['step']} of {done['steps']}; a checkpoint is saved"
        hint = f"resume with `{again} {shlex.quote(str(folder.path))}`"
        raise Stopped(Problem(kind="stopped", message=message, hint=hint, where=str(folder.path)))
    if folder.result.exists():
        return read_json(folder.result)
    raise RunFailed(_silent_end(folder, code))


def _reported(folder: RunFolder, failure: dict[str, Any]) -> Problem:
    problem = Problem(**failure["problems"][0])
    host = f" on {failure['host']}" if "host" in failure else ""
    message = f"rank {failure['rank']}{host}: {problem.message}"
    if problem.kind == "nan-loss":
        hint = f"`zerofit replay {shlex.quote(str(folder.path))}` names the cause; or {problem.hint}"
        problem = replace(problem, hint=hint)
    return replace(problem, message=message, hint=problem.hint or f"see its log: {folder.rank_log(failure['rank'])}")


def _silent_end(folder: RunFolder, code: int) -> Problem:
    """Explain why ranks ended without a report."""
    # the launcher appends to its log, and its own exit code may differ from the rank's, which the log contains
    log = folder.logs / "launcher.log"
    text = log.read_text(errors="replace").rpartition(STARTED)[2] if log.exists() else ""
    if -code == signal.SIGKILL or "return code = -9" in text:
        message = "a rank was killed (SIGKILL), most often by the kernel because host memory ran out"
        hint = "lower --micro-batch, use fewer ranks on this host, or check the kernel log (dmesg)"
        return Problem(kind="killed", message=message, hint=hint, where=str(log))
    message = f"the ranks ended without a result (exit code {code})"
    return Problem(kind="launcher", message=message, hint=f"see {log}", where=str(log))
