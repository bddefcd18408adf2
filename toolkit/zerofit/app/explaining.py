"""Explain why a run ran out of memory, from its log, snapshot or folder (`zerofit explain`)."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zerofit.explain.advice import KERNEL_LOG
from zerofit.explain.failures import NO_SHORTAGE, NOT_FINITE
from zerofit.explain.from_log import explain_log
from zerofit.explain.from_snapshot import ENOUGH, FRAGMENTS, explain_snapshot
from zerofit.explain.log import LogLine, decoded_log, lines_of, read_ends, read_log
from zerofit.explain.result import UNKNOWN, Change, Explanation, ForecastAtMoment
from zerofit.explain.tracebacks import BACKWARD, FORWARD, INIT, LOADING, LOSS, STEP
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.foreign import refused
from zerofit.spec.foreign_pickle import is_pickle
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation
    from zerofit.spec.cluster import Cluster

STANDARD_INPUT = "-"
HINT = "give a log, a memory snapshot (torch.cuda.memory._dump_snapshot), a run folder, or - for standard input"
# phase of a traceback -> phase of a forecast
PHASES = {LOADING: "build", INIT: "init", FORWARD: "forward", LOSS: "forward", BACKWARD: "backward", STEP: "step"}
_NOT_FINITE = r"the (?:(?:validation )?loss|gradient norm) (?:of|after) step \d+ is [^;\n]+"  # of `zerofit.train`
APART = 0.05  # differences below this share of the forecast's bytes are ignored
LEAST_BYTES = 64 << 20  # smaller differences are no cause
# kind of memory -> why a run may need more of it than its forecast
_MORE_OF = {
    "parameters": "each rank has the full model, or there is a second model",
    "optimizer state": "the states have a wider type than in the forecast, or every rank has all states",
    "gradients": "gradients of earlier batches are kept, or every rank has all gradients",
    "activations": "the batch was longer or larger, or outputs are kept",
    "logits and loss": "the batch was longer, or logits are kept",
    "communication buckets": "buckets are larger",
    FRAGMENTS: "the allocator's memory is fragmented",
}


# A memory snapshot has the bytes of each kind and line of code, an error message only sums. So a snapshot decides the
# cause, if there is one. A simulation of the command shows what differs from its forecast, and changes that would fit.
def explain(
    what: str | Path,
    command: Sequence[str] | None = None,
    cluster: Cluster | None = None,
    *,
    on_event: OnEvent | None = None,
) -> Explanation:
    """Explain why a run ran out of memory or failed: cause, line of code, helpful changes.

    Args:
        what: the log of any program, a memory snapshot of torch, or a run folder. "-": a log on standard input.
        command: the command that started the run. It is simulated, and the simulation is compared with the evidence.
        cluster: the hardware of the command; this machine if None. A run folder needs no command: its run is simulated
            if `cluster` is given.
        on_event: gets progress.

    Raises UserError if the file cannot be read, or the command cannot be simulated.

    >>> import zerofit as zf
    >>> from pathlib import Path
    >>> error = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB total capacity; 9.10 GiB already "
    >>> error += "allocated; 0.20 GiB free; 15.10 GiB reserved in total by PyTorch)"
    >>> _ = Path("train.log").write_text(f"RuntimeError: {error}")
    >>> explanation = zf.explain("train.log")
    >>> explanation.cause, explanation.changes[0].change
    ('fragmentation', 'write PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command (costs no speed)')
    """
    explanation = _explain_evidence(what, Reporter(on_event))
    if command is not None:
        from zerofit.app.simulation.scripts import simulate_script

        simulation = simulate_script(command, cluster, on_event=on_event)
    elif cluster is not None and Path(what).is_dir():
        from zerofit.app.simulation.runs import simulate

        simulation = simulate(RunFolder(Path(what)).run, cluster, on_event=on_event)
    else:
        return explanation
    simulation.knobs(on_event)
    return _with_simulation(explanation, simulation)


def _explain_evidence(what: str | Path, report: Reporter) -> Explanation:
    path = Path(what)
    if str(what) == STANDARD_INPUT:
        # Bytes instead of Python's text: a log from PowerShell is UTF-16.
        return _of_log(lines_of(decoded_log(read_ends(cast(BufferedIOBase, sys.stdin.buffer)))))
    if path.is_dir():
        return _of_run_folder(RunFolder(path))
    with refused(path, hint=HINT, where="WHAT"):
        if not is_pickle(path):
            return _of_log(read_log(path))
        report.status("reading the snapshot ...")
        return explain_snapshot(path)


def _of_log(lines: Sequence[LogLine], source: str = "log") -> Explanation:
    return explain_log(lines, source) or Explanation(
        source=source,
        cause=UNKNOWN,
        summary=f"The {source} has no message about an out-of-memory error or another failure.",
        run_next=f"{KERNEL_LOG}, on the host of the run"
        if source == "run folder"
        else "give the output of every rank, with standard error: COMMAND 2>&1 | tee train.log",
    )


# A rank that fails writes its error into its own file, and its traceback into its log. A rank that the kernel kills
# writes neither; the command's file of faults names this rank.
def _of_run_folder(folder: RunFolder) -> Explanation:
    folder.refuse_other(folder.path, HINT, "WHAT")
    lines = list[LogLine]()
    for text, rank in _texts(folder):
        start = len(lines)
        # Line numbers continue over all files, and a line keeps the rank that its log names.
        lines += [LogLine(start + line.number, line.text, line.rank or rank) for line in lines_of(text)]
    explanation = _of_log(lines, "run folder")
    for snapshot in sorted(folder.logs.glob("rank-*.memory.pickle"))[:1]:  # of --record-memory
        with refused(snapshot):
            explanation = _with_snapshot(explanation, explain_snapshot(snapshot))
    job = Job.read(folder)
    last_record = read_jsonl(folder.metrics)[-1:] if folder.metrics.is_file() else []
    explanation = replace(explanation, steps=max([explanation.steps, *(_count(row, "step") for row in last_record)]))
    if folder.result.is_file() and not explanation.is_shortage:
        explanation = replace(explanation, cause=ENOUGH, summary="The run finished.", run_next="", changes=())
    elif not explanation.is_shortage and (stopped := re.search(_NOT_FINITE, "\n".join(line.text for line in lines))):
        command = f"zerofit replay {shlex.quote(str(folder.path))}"
        summary = f"{NO_SHORTAGE[:-1]}: {stopped[0]}."
        explanation = replace(explanation, cause=NOT_FINITE, summary=summary, run_next=command, changes=())
    if job.forecast is None:
        return explanation
    return replace(explanation, forecast=_stored_forecast(explanation, job, last_record[0] if last_record else {}))


def _with_snapshot(of_log: Explanation, snapshot: Explanation) -> Explanation:
    """Return the snapshot's explanation with the log's message; the log's if it has no cause."""
    if not snapshot.is_known:
        return replace(of_log, alive=snapshot.alive, lines=snapshot.lines)
    # The figures of the error message are of the moment of the failure, so they win.
    figures = snapshot.figures if of_log.figures.total_bytes is None else of_log.figures
    return replace(
        snapshot, source=of_log.source, message=of_log.message, ranks=of_log.ranks, steps=of_log.steps, figures=figures
    )


def _count(record: Mapping[str, object], key: str) -> int:
    value = number_in(record, key)
    return int(value) if value is not None and math.isfinite(value) else 0


def _texts(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the text of each log and error file in the folder, with its rank."""
    for log in sorted(folder.logs.glob("*.log")):
        with refused(log):
            yield "\n".join(line.text for line in read_log(log)), log.stem.removeprefix("rank-")
    # Error files have the problems in zerofit's words. The logs have only the tracebacks.
    for rank, failure in folder.errors():
        problems = failure.get("problems")
        listed = problems if isinstance(problems, list) else []
        messages = [str(problem.get("message", "")) for problem in listed if isinstance(problem, dict)]
        yield "\n".join(messages), rank
    faults = read_jsonl(folder.faults) if folder.faults.is_file() else []
    yield "\n".join(str(fault.get("message", "")) for fault in faults), ""


def _stored_forecast(explanation: Explanation, job: Job, measured: Mapping[str, object]) -> ForecastAtMoment:
    """Return the forecast that the run stored at its start, with what a rank used."""
    forecast = job.forecast
    assert forecast is not None
    phase = PHASES.get(explanation.phase, "")
    expected = forecast.phases.get(phase, max(forecast.phases.values(), default=0))
    process_bytes = forecast.reserved_bytes + forecast.beside_bytes
    used = _count(measured, "reserved_bytes") or _count(measured, "memory_bytes")
    forecast_of_used = _count(measured, "forecast_bytes")  # of the same quantity
    numbers = f"{shown_bytes(used)}; forecast {shown_bytes(forecast_of_used)}"
    parts = [f"at step {explanation.steps} a rank used {numbers}"] if used and forecast_of_used else []
    free = forecast.free_bytes
    fits = free is None or process_bytes <= free
    if free is not None and not fits:
        parts.append(f"{shown_bytes(free)} were free on the device when the run started")
    return ForecastAtMoment(phase=phase, kinds={}, allocated_bytes=expected, fits=fits, parts=tuple(parts))


def _with_simulation(explanation: Explanation, simulation: Simulation) -> Explanation:
    phase = PHASES.get(explanation.phase, simulation.peak_phase)
    peaks = {row.name: row.peak_bytes for row in simulation.phases}
    expected = peaks.get(phase, simulation.peak_bytes)
    forecast = ForecastAtMoment(
        phase=phase,
        kinds=simulation.breakdown,
        allocated_bytes=expected,
        fits=simulation.fits,
        parts=tuple(_differences(explanation, simulation, expected)),
    )
    simulated = sorted(simulation.tried, key=lambda row: (not row.fits, row.cost_rank))
    changes = [
        Change(change=row.change, reserved_bytes=row.reserved_bytes, fits=row.fits, slowdown=row.slowdown)
        for row in simulated
    ]
    # A change that needs as much memory does not help, even if it fits by forecast.
    smaller = [row for row in changes if (row.reserved_bytes or 0) < simulation.reserved_bytes]
    return replace(explanation, forecast=forecast, changes=tuple(smaller) or explanation.changes)


def _differences(explanation: Explanation, simulation: Simulation, expected: int) -> Iterator[str]:
    """Yield what the failed run used beyond the simulation, one sentence each.

    `expected`: bytes of tensors that the simulation has in the phase of the failure.
    """
    figures = explanation.figures
    if not simulation.fits:
        needed, total = shown_bytes(simulation.smi_bytes), shown_bytes(simulation.device_total_bytes)
        yield f"the forecast does not fit either: it needs {needed} of {total} on {simulation.device}"
    # A snapshot has the bytes of each kind. An error message has only their sum.
    if explanation.alive:
        for kind in explanation.alive.keys() | simulation.breakdown.keys():
            excess = explanation.alive.get(kind, 0) - simulation.breakdown.get(kind, 0)
            if kind != FRAGMENTS and excess > max(APART * simulation.peak_bytes, LEAST_BYTES):
                reason = f": {_MORE_OF[kind]}" if kind in _MORE_OF else ""
                yield f"{shown_bytes(excess)} more {kind} than forecast{reason}"
    elif figures.allocated_bytes is not None:
        needed = figures.allocated_bytes + (figures.asked_bytes or 0)
        if needed > (1 + APART) * expected:
            yield f"tensors need {shown_bytes(needed)}, {shown_bytes(needed - expected)} more than the forecast"
        else:
            yield f"tensors need {shown_bytes(needed)}, not more than the forecast's {shown_bytes(expected)}"
    unused, usual = figures.unallocated_bytes or 0, simulation.reserved_bytes - simulation.peak_bytes
    if unused - usual > max(APART * expected, LEAST_BYTES):
        yield f"{shown_bytes(unused)} are fragments; the forecast has {shown_bytes(max(0, usual))}"
    forecast_outside = sum(overhead.high_bytes for overhead in simulation.overheads)
    outside = figures.beside_bytes or 0
    if outside - forecast_outside > LEAST_BYTES:
        yield f"{shown_bytes(outside)} are outside of torch, at most {shown_bytes(forecast_outside)} in the forecast"
