"""`zerofit explain`: why a run ran out of memory or failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.app.explaining import explain as explain_what
from zerofit.cli.console import answer_watched, labelled, out, print_facts, print_verdict
from zerofit.cli.options import AS_JSON, clusters, hardware_options, only_cluster
from zerofit.cli.report import HTML
from zerofit.cli.simulate import HARDWARE_FIELDS, SCRIPT, CommandAfterDashes, command_cluster
from zerofit.cli.simulate_show import CHANGES, KINDS, cost
from zerofit.explain.result import Change, Explanation
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import OnEvent
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.spec.cluster import Cluster

NOT_KNOWN = 1
NO_CAUSE = "CAUSE UNKNOWN"


@click.command(cls=CommandAfterDashes)
@click.argument("what", metavar="LOG | SNAPSHOT | RUN_FOLDER | -  [-- COMMAND]")
@hardware_options(*HARDWARE_FIELDS, kinds="hardware of COMMAND or RUN_FOLDER, such as h100-80gb")
@HTML
@AS_JSON
@click.pass_context
def explain(ctx: click.Context, what: str, html: Path | None, as_json: bool, **hardware: object) -> None:
    """Explain why a run ran out of memory, or which other failure ended it.

    WHAT is the log of any program, a snapshot of torch.cuda.memory._dump_snapshot() (.pickle, also .gz), a run folder
    of zerofit, or - for a log on standard input. Neither torch nor a GPU is needed, and no code in the file runs.

    If you add -- and the command that started the run, zerofit simulates the run. The answer then compares run and
    forecast, and lists simulated changes. For a run folder, pass --gpu and --gpus instead of the command. The
    simulation needs torch.

    Exit code 0: the answer names a cause; 1: the evidence shows no cause, and the answer names the command to run next;
    2: bad input.
    """

    def work(console: OnEvent) -> Explanation:
        return explain_what(what, ctx.meta[SCRIPT], _cluster(ctx, what, hardware), on_event=console)

    result = answer_watched(work, as_json, show, html=html)
    sys.exit(0 if result.is_known else NOT_KNOWN)


def _cluster(ctx: click.Context, what: str, hardware: dict[str, Any]) -> Cluster | None:
    """Return the hardware on which the run started; None if it is unknown.

    With a command after --, the hardware comes from the command and the options. A run folder needs the options.
    """
    words = ctx.meta[SCRIPT]
    if words is not None:
        return command_cluster(words, hardware)
    # click passes () for --gpu without a value. 0 is a value, which the cluster refuses.
    if all(value in (None, ()) for value in hardware.values()):
        return None
    if not Path(what).is_dir():
        hint = "add -- and the command that started the run"
        raise UserError(Problem(kind="usage", message="hardware without a command", hint=hint, where="--gpu"))
    return only_cluster(clusters(**hardware))


def show(result: Explanation) -> None:
    """Print the cause, the evidence, the memory in use by kind, and the changes that would help."""
    console = out()
    console.print()
    cause = result.cause.replace("-", " ").upper() if result.is_known else NO_CAUSE
    print_verdict(console, cause, result.summary, good=False)
    print_facts(console, labelled(_facts(result)))
    if result.run_next:
        # The command is not wrapped, so that it can be copied.
        console.print(f"run next      {result.run_next}", soft_wrap=True)


def _facts(result: Explanation) -> Iterator[tuple[str, str]]:
    yield from result.facts()
    total = sum(result.alive.values())
    for kind, size in result.alive.items():
        if size:
            yield "alive", f"{shown_bytes(size):<9} {size / total:>4.0%}  {kind}"
    for line in result.lines:
        yield "lines", f"{shown_bytes(line.bytes):<9} {line.place} ({line.function}), {line.kind}"
    if result.forecast:
        at = f" in {result.forecast.phase}" if result.forecast.phase else ""
        kinds = sorted(result.forecast.kinds.items(), key=lambda entry: -entry[1])[:KINDS]
        largest = "; at its peak " + ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in kinds) if kinds else ""
        yield "forecast", f"{shown_bytes(result.forecast.allocated_bytes)} in tensors{at}{largest}"
        yield from (("differs", part) for part in result.forecast.parts)
    yield from (("to make room" if result.place else "try", change) for change in _changes(result.changes))


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a line for each change that would help; for a simulated change, with its figures."""
    # Simulated changes that fit come first. A change that was not simulated may not help.
    simulated = [change for change in changes if change.reserved_bytes is not None]
    fitting = [change for change in simulated if change.fits] or simulated
    for change in (fitting or changes)[:CHANGES]:
        size = f"{shown_bytes(change.reserved_bytes):<8}  " if change.reserved_bytes is not None else ""
        price = f"{cost(change.slowdown)}  " if change.slowdown is not None else ""
        yield f"{size}{price}{change.change}" + ("  (does not fit alone)" if change.fits is False else "")
