"""Rows of a comparison: their measurements, and the files from which a comparison resumes."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter

from zerofit.compare.job import CompareJob, RankReport, Strategy
from zerofit.report.comparison import cells, description, draw, labels, write_comparison
from zerofit.report.html_table import html_table
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json, refused, shaped
from zerofit.spec.local_machine import versions

AGREES = 1e-5  # largest difference of fp32 weights between layouts that compute the same sums
# "not-here": unsupported on these devices or in this installation; "does-not-fit": exceeds free memory
Status = Literal["ok", "not-here", "does-not-fit", "failed"]
DETAILS = {"efficiency", "process", "loss", "lines"}  # columns left out of a page about several comparisons
SPREADS = ("final_accuracy", "test_accuracy", "seconds", "noise_scale")  # figures over the seeds of a batch size
Mode = Literal["weak", "strong"]
Kind = Literal["strategies", "batch-size", "scaling"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of any comparison: whether it was measured, and the reason if it was not."""

    status: Status
    reason: str | None = None  # set if the row is not "ok"

    def to_dict(self) -> dict[str, object]:
        """Return the row as `--json` prints it: figures first, then status and reason."""
        data = asdict(self)
        for name in ("status", "reason"):
            data[name] = data.pop(name)
        return data

    @property
    def headline(self) -> str:
        """The row's main figure, or the reason why it has none."""
        return f"{self.status}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class StrategyRow(Row):
    """Measurements of one strategy. Figures are None if the strategy did not run."""

    strategy: str
    title: str
    ranks: int
    processes: int
    synchronous: bool
    lines: int  # lines of code in the strategy's own file
    seconds: float  # total, including the start of the processes
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None  # relative to one device
    efficiency: float | None = None  # speedup / ranks
    peak_bytes_per_rank: int | None = None
    host_bytes_per_rank: int | None = None
    comm_bytes_per_step: float | None = None  # bytes sent by all processes together
    loss: float | None = None
    accuracy: float | None = None
    max_weight_difference: float | None = None  # maximum difference from the weights of the single device
    batch_norm: bool | None = None
    agrees: bool | None = None
    staleness: list[int] | None = None  # updates between pull and push; only for asynchronous strategies
    dropped: int | None = None  # gradients too late for a server with backup workers
    curve: list[dict[str, Any]] | None = None  # steps, seconds, loss, accuracy; parameter servers with a target only
    seconds_to_target: float | None = None

    @property
    def headline(self) -> str:
        """Samples per second, or why there are none."""
        return f"{self.samples_per_s:,.0f} samples/s" if self.samples_per_s else super().headline


@dataclass(frozen=True, kw_only=True)
class ScalingRow(StrategyRow):
    """A strategy on a number of ranks."""

    mode: Mode
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class SizeRow(Row):
    """One batch size with one seed. Figures are None if they were not measured or not reached."""

    batch_size: int
    seed: int
    lr: float
    ranks: int = 1
    steps: int | None = None
    seconds: float | None = None
    seconds_per_epoch: float | None = None
    epochs_to_target: int | None = None
    steps_to_target: int | None = None
    seconds_to_target: float | None = None
    final_accuracy: float | None = None
    best_accuracy: float | None = None
    best_epoch: int | None = None
    test_accuracy: float | None = None  # after the best epoch, on samples not used to choose it
    curve: list[dict[str, Any]] | None = None  # epoch, steps, samples, seconds, loss, accuracy, test_accuracy
    noise_scale: float | None = None  # in samples; one rank only

    @property
    def headline(self) -> str:
        """The final accuracy, or why there is none."""
        return f"{self.final_accuracy:.1%}" if self.final_accuracy is not None else super().headline


@dataclass(frozen=True, kw_only=True)
class SizeSummary:
    """One batch size over all seeds. Figures are [median, minimum, maximum]."""

    batch_size: int
    runs: int  # that finished
    reached: int  # number of runs that reached the target
    samples_to_target: list[float] | None
    seconds_to_target: list[float] | None
    final_accuracy: list[float] | None
    test_accuracy: list[float] | None
    seconds: list[float] | None
    noise_scale: list[float] | None


AnyRow = TypeVar("AnyRow", bound=Row)
AnyStrategyRow = TypeVar("AnyStrategyRow", bound=StrategyRow)


# Each row is stored as soon as it is measured. So a comparison that is killed resumes with the next row.
class RowStore:
    """A folder with one file per row."""

    def __init__(self, output: Path | None, kind: str, identity: Mapping[str, Any]):
        """Use a new folder, or a folder with rows of the same comparison.

        `identity`: everything that determines the rows, including the job. If `output` is None, the folder's name
        contains a hash of `identity`. Raises UserError if the folder contains another comparison or other files.
        """
        # Through JSON and back, so that tuples compare equal to the lists that are read from the file.
        identity = json.loads(json.dumps({"kind": kind, **identity, "versions": versions()}))
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        model = re.sub(r"[^\w.]+", "-", identity["job"]["model"]).strip("-")[-40:]
        self.folder = (output or Path("runs") / f"compare-{kind}-{model}-{digest}").absolute()
        file = self.folder / "asked.json"
        if self.folder.exists() and (not self.folder.is_dir() or (any(self.folder.iterdir()) and not file.exists())):
            raise _occupied(f"{self.folder} contains other files")
        with refused(file, where="--output"):
            former = read_json(file) if file.exists() else identity
        # Rows of other settings or library versions must not be mixed with the new ones.
        if former != identity:
            raise _occupied(
                f"{self.folder} contains another comparison, or this comparison with other library versions"
            )
        try:
            (self.folder / "rows").mkdir(parents=True, exist_ok=True)
            write_json(file, identity)
        except OSError as error:
            raise _occupied(f"cannot write into {self.folder}: {error.strerror or error}") from None

    def folder_of(self, name: str) -> Path:
        """Return the folder for the files of a row's processes."""
        return self.folder / "rows" / name

    def load(self, name: str, kind: type[AnyRow]) -> AnyRow | None:
        """Return a row measured before; None if there is none, or if it failed or did not fit."""
        file = self.folder / "rows" / f"{name}.json"
        if not file.exists():
            return None
        try:
            row = shaped(read_json(file), TypeAdapter(kind))
        except Unreadable:  # truncated by a kill, or written by another version
            return None
        return row if row.status not in ("failed", "does-not-fit") else None

    def save(self, name: str, row: Row) -> None:
        """Write a row to its file."""
        write_json(self.folder / "rows" / f"{name}.json", row.to_dict())


def strategy_row(strategy: Strategy, job: CompareJob, reports: Sequence[RankReport], seconds: float) -> StrategyRow:
    """Return a strategy's row from its processes' reports, without `speedup` and `efficiency`."""
    status, reason = status_of(reports)
    row = StrategyRow(
        strategy=strategy.name,
        title=strategy.title,
        ranks=1 if strategy.one else job.ranks,
        processes=len(reports),
        synchronous=strategy.synchronous,
        lines=strategy.lines,
        seconds=round(seconds, 1),
        status=status,
        reason=reason,
    )
    if status != "ok":
        return row
    timed = [report for report in reports if report["seconds"]]
    steps = max(report["timed_steps"] for report in timed)  # slow ranks of some strategies make fewer
    # The slowest process decides how long the timed steps took.
    samples_per_s = job.global_batch * steps / max(report["seconds"] for report in timed)
    tokens = timed[0]["tokens_a_sample"]
    sent = None
    if all(report["sent_bytes"] is not None for report in timed):
        # A server counts no steps, so it has no seconds here. Its workers count the bytes that it sends.
        sent = sum(report["sent_bytes"] + bool(strategy.servers) * report["received_bytes"] for report in timed)
    evaluation = next(report for report in reports if "loss" in report)  # of the rank that evaluates
    difference = evaluation.get("max_weight_difference")
    curve = next((report["curve"] for report in reports if "curve" in report), None)
    progress = {}
    if curve is not None and job.target is not None:
        reached = (point["seconds"] for point in curve if (point["accuracy"] or 0.0) >= job.target)
        progress = {"curve": curve, "seconds_to_target": next(reached, None)}
    return replace(
        row,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if tokens else None,
        peak_bytes_per_rank=max(report["peak_bytes"] for report in reports),
        host_bytes_per_rank=max(report["host_bytes"] for report in reports),
        comm_bytes_per_step=None if sent is None else sent / steps,
        loss=evaluation["loss"],
        accuracy=evaluation["accuracy"],
        max_weight_difference=difference,
        batch_norm=evaluation["batch_norm"],
        agrees=difference <= AGREES if strategy.synchronous and difference is not None else None,
        staleness=next((report["staleness"] for report in reports if "staleness" in report), None),
        dropped=next((report["dropped"] for report in reports if "dropped" in report), None),
        **progress,
    )


def size_row(job: CompareJob, reports: Sequence[RankReport]) -> SizeRow:
    """Return the row of one batch size and seed from the report of its process."""
    status, reason = status_of(reports)
    settings = {"batch_size": job.global_batch, "seed": job.seed, "lr": job.lr, "ranks": job.ranks}
    row = SizeRow(**settings, status=status, reason=reason)
    if status != "ok":
        return row
    return replace(row, **curve_figures(reports[0]["curve"], job.target or 1.0), **reports[0])


def curve_figures(curve: Sequence[dict[str, Any]], target: float) -> dict[str, object]:
    """Return the figures of a curve of accuracy over epochs.

    If the curve does not reach the accuracy `target`, all `..._to_target` figures are None.
    """
    # The validation set chooses the best epoch. The test set's accuracy is read there, so it had no part in the choice.
    reached = next((point for point in curve if point["accuracy"] >= target), None)
    best, last = max(curve, key=lambda point: point["accuracy"]), curve[-1]
    return {
        "steps": last["steps"],
        "seconds": last["seconds"],
        "seconds_per_epoch": last["seconds"] / last["epoch"],
        "epochs_to_target": reached["epoch"] if reached else None,
        "steps_to_target": reached["steps"] if reached else None,
        "seconds_to_target": reached["seconds"] if reached else None,
        "final_accuracy": last["accuracy"],
        "best_accuracy": best["accuracy"],
        "best_epoch": best["epoch"],
        "test_accuracy": best["test_accuracy"],
    }


def critical_batch(summary: Sequence[SizeSummary]) -> float | None:
    """Return the batch size at which training needs twice the minimum of samples, by a fit.

    None if there are too few data. The source is McCandlish, Kaplan, Amodei and others 2018, equation 2.7 with
    S = E / B: training with batch size B needs E = E_min (1 + B / B_crit) samples to reach the target.
    """
    points = [(size.batch_size, size.samples_to_target[0]) for size in summary if size.samples_to_target]
    if len(points) < 3:
        return None
    # E = E_min (1 + B / B_crit) is linear: E = a + b B with B_crit = a / b. Dividing each equation by its E gives
    # every size the same relative error: 1 = a (1 / E) + b (B / E).
    lines = np.array([[1 / samples, size / samples] for size, samples in points])
    least, slope = np.linalg.lstsq(lines, np.ones(len(points)), rcond=None)[0]
    return float(least / slope) if least > 0 and slope > 0 else None


def summarize_sizes(rows: Sequence[SizeRow]) -> list[SizeSummary]:
    """Return one summary per batch size."""
    summaries = []
    for size in dict.fromkeys(row.batch_size for row in rows):
        finished = [row for row in rows if row.batch_size == size and row.status == "ok"]
        times = [row.seconds_to_target for row in finished if row.seconds_to_target is not None]
        summaries.append(
            SizeSummary(
                batch_size=size,
                runs=len(finished),
                reached=len(times),
                samples_to_target=_spread([size * row.steps_to_target for row in finished if row.steps_to_target]),
                seconds_to_target=_spread(times),
                **{name: _spread([getattr(row, name) for row in finished]) for name in SPREADS},
            )
        )
    return summaries


def _spread(figures: Sequence[float | None]) -> list[float] | None:
    """Return median, minimum and maximum of the figures that were measured."""
    measured = [value for value in figures if value is not None]
    return [statistics.median(measured), min(measured), max(measured)] if measured else None


def status_of(reports: Sequence[RankReport]) -> tuple[Status, str | None]:
    """Return the status of a row, and the reason if the row has no figures."""
    # One rank's failure makes all others fail in their next collective, so the cause is the report that names a
    # reason.
    order: tuple[tuple[str, Status], ...] = (
        ("not_here", "not-here"),
        ("does_not_fit", "does-not-fit"),
        ("error", "failed"),
        ("ended", "failed"),
        ("left", "failed"),
    )
    for key, status in order:
        reasons = [report[key] for report in reports if key in report]
        if reasons:
            return status, reasons[0]
    return "ok", None


def with_speedups(
    rows: Sequence[AnyStrategyRow], is_base: Callable[[AnyStrategyRow, AnyStrategyRow], bool]
) -> list[AnyStrategyRow]:
    """Return the rows with speed-up and efficiency, relative to each row's base.

    The base of a row is the first measured row for which `is_base(row, base)` is true.
    """
    compared = []
    for row in rows:
        # speed-up = speed / speed of the base; efficiency = speed-up / ranks
        base = next((base for base in rows if base.samples_per_s and is_base(row, base)), None)
        if base and base.samples_per_s and row.samples_per_s:
            speedup = row.samples_per_s / base.samples_per_s
            row = replace(row, speedup=speedup, efficiency=speedup / row.ranks)
        compared.append(row)
    return compared


def _occupied(message: str) -> UserError:
    hint = "use another folder; to resume a comparison, repeat its command"
    return UserError(Problem(kind="output-exists", message=message, hint=hint, where="--output"))


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[AnyRow]):
    """The rows of a comparison, and the files that contain them."""

    kind: Kind
    about: dict[str, Any]  # settings shared by all rows
    rows: Sequence[AnyRow]
    summary: Sequence[SizeSummary] | None = None  # batch sizes only, over the seeds
    critical_batch: float | None = None  # batch sizes only, in samples
    written: Sequence[str] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit compare --json` prints; results.json lacks `written`."""
        data = {"kind": self.kind, "about": self.about, "versions": versions()}
        data["rows"] = [row.to_dict() for row in self.rows]
        if self.summary is not None:
            data["summary"] = [asdict(size) for size in self.summary]
            data["critical_batch"] = self.critical_batch
        return {**data, "written": list(self.written)}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return column names and the cells of all rows."""
        rows = []
        for row in self.rows:
            figures = cells(self.kind, row.to_dict()) if row.status == "ok" else [row.status]
            rows.append([self.name_of(row), *figures])
        return [description(self.kind)["first"].replace("_", " "), *labels(self.kind)], rows

    def short_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table of all rows.

        For batch sizes, return one row per size with median and range over the seeds.
        """
        if self.summary is None:
            return self.table()
        target = f"{self.about['target']:.1%}"
        names = ["batch size", f"reached {target}", "seconds to target", "samples to target", "final accuracy"]
        names += ["test accuracy", "noise scale"]
        rows = []
        for size in self.summary:
            row = [str(size.batch_size), f"{size.reached} of {size.runs}"]
            for spread, form in (
                (size.seconds_to_target, ".1f"),
                (size.samples_to_target, ",.0f"),
                (size.final_accuracy, ".1%"),
                (size.test_accuracy, ".1%"),
                (size.noise_scale, ",.0f"),
            ):
                row.append("-" if spread is None else "{0:{3}} ({1:{3}} to {2:{3}})".format(*spread, form))
            rows.append(row)
        return names, rows

    def page_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the table for a page about several comparisons.

        It lacks rows without figures, empty columns and the columns in `DETAILS`.
        """
        names, rows = self.short_table()
        rows = [row for row in rows if len(row) == len(names)]
        shown = [n for n, name in enumerate(names) if name not in DETAILS and any(row[n] != "-" for row in rows)]
        return [names[n] for n in shown], [[row[n] for n in shown] for row in rows]

    def missing(self) -> list[tuple[str, str]]:
        """Return the name of each row without figures, and the reason."""
        return [(self.name_of(row), row.reason or row.status) for row in self.rows if row.status != "ok"]

    def name_of(self, row: AnyRow) -> str:
        """Return the first cell of a row."""
        return str(getattr(row, description(self.kind)["first"]))

    def plot(self, path: Path | str) -> None:
        """Draw the comparison into a PNG file."""
        draw(self.kind, self.about, [row.to_dict() for row in self.rows], Path(path))

    def write(self, folder: Path) -> Comparison[AnyRow]:
        """Write results.json, a CSV, a picture and a page; return the comparison with their paths."""
        return replace(self, written=write_comparison(folder, self.to_dict()))

    def _repr_html_(self) -> str:
        return html_table(f"{self.about['model']} on {self.about['data']}", *self.table())
