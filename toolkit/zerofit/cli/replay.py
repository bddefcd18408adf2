"""`zerofit replay`: find where and why a run's loss or gradients stop being finite."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zerofit.app.replaying import WidePrecision
from zerofit.app.replaying import replay as replay_run
from zerofit.cli.console import answer_watched, labelled, out, print_facts, print_verdict
from zerofit.cli.options import AS_JSON, PATH, TRUST_MODEL_CODE
from zerofit.cli.report import HTML
from zerofit.explain.not_finite import Replay
from zerofit.spec.events import OnEvent

NOTHING = 1


@click.command()
@click.argument("run", metavar="RUN_FOLDER", type=PATH)
@click.option("--step", type=click.IntRange(min=1), help="the step that went wrong (default: found in the logs)")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp64"]),
    help="repeat on one CPU in this precision (default: as in the run)",
)
@TRUST_MODEL_CODE
@HTML
@AS_JSON
def replay(
    run: Path,
    step: int | None,
    precision: WidePrecision | None,
    trust_model_code: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Repeat a run's steps before a loss that is not finite, and name the cause.

    The replay starts at the newest checkpoint before the step, with the same samples, weights and random numbers in the
    same layout. It names the module and operation with the first tensor that is not finite, and the cause: a sample, an
    overflow of fp16, the loss scale, the learning rate, a collective or the checkpoint's weights. The replay writes
    only to RUN_FOLDER/replay.

    Exit code 0: the answer names a cause; 1: all steps are finite; 2: bad input; 3: the ranks failed.
    """

    def work(console: OnEvent) -> Replay:
        return replay_run(run, step, precision=precision, trust_model_code=trust_model_code, on_event=console)

    result = answer_watched(work, as_json, show, html=html)
    sys.exit(0 if result.is_known else NOTHING)


def show(result: Replay) -> None:
    """Print the cause, then the place and its numbers, then what to do."""
    console = out()
    console.print()
    verdict = result.cause.replace("-", " ").upper() if result.is_known else "NOTHING FOUND"
    print_verdict(console, verdict, result.summary, good=False)
    print_facts(console, labelled(result.facts()))
