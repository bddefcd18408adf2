"""`zerofit plan`: which layouts fit and how fast they are, before any GPU is there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.hardware_options import OPTIONS, clusters, hardware_options
from zerofit.cli.options import run_options
from zerofit.spec.errors import Problems
from zerofit.spec.precision import PRECISIONS

if TYPE_CHECKING:
    from zerofit.app.planning.answers import Plan

FINDING = 1
RUN_FIELDS = (
    *("model_args", "micro_batch", "gradient_accumulation_steps", "global_batch", "seq_len"),
    *("activation_checkpointing", "tensor_parallel", "pipeline", "sequence_parallel"),
)
FROM_HELP = "folder of `zerofit tune`: step times are corrected by its trials, for any model and batch on such devices"
WRITE_HELP = "folder for ds_config.json, run.yaml of the best, or of a plainer one less than 3% slower"
PRECISION_HELP = "bf16 where the device has it, fp16 before Ampere, fp32 on a CPU; with --profile the profile's"


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, and the files that were written of it."""

    plan: Plan
    written: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        found = self.plan.to_dict()
        if self.written:
            found |= {"written": [str(path) for path in self.written], "written_layout": self.plan.result.plainest}
        return found


@click.command()
@click.argument("model", required=False)
@hardware_options(*OPTIONS, kinds="h100-80gb, ..., cpu; several to compare")
@click.option("--nvme-path", default="/local_nvme", show_default=True, help="where the disks are, for --write")
@click.option("--input", "image", metavar="image:CxHxW", help="what an image model is fed")
@click.option("--profile", type=click.Path(path_type=Path), help="plan from a stored profile, without torch")
@click.option("--from", "tuned", type=click.Path(path_type=Path), help=FROM_HELP)
@click.option("--write", type=click.Path(path_type=Path), help=WRITE_HELP)
@click.option("--max", "maximum", type=click.Choice(["seq-len", "micro-batch", "layers"]), help="the largest that fits")
@click.option("--min", "minimum", type=click.Choice(["gpus"]), help="how few devices are enough")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="layouts to print")
@click.option("--precision", type=click.Choice(PRECISIONS), help=f"[{PRECISION_HELP}]")
@run_options(RUN_FIELDS)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def plan(model: str | None, as_json: bool, **options: Any) -> None:
    """Rank the layouts of MODEL that fit a cluster, with memory and speed, and say why the others do not.

    Without hardware flags: this machine. Exit code 0: something fits, 1: nothing does, 2: bad input.
    """
    from zerofit.cli.plan_show import show

    report = answer(lambda: _plan(model, options), as_json, show)
    sys.exit(0 if report.plan.layouts else FINDING)


def _plan(model: str | None, options: dict[str, Any]) -> PlanReport:
    from zerofit.app.planning.files import refuse_existing
    from zerofit.app.planning.planner import answer_request
    from zerofit.app.planning.request import PlanningRequest

    problems, names = Problems(), (*RUN_FIELDS, "precision")
    pins: Any = {name: options[name] for name in names if options[name] is not None}
    asked = {name: options[name] for name in ("profile", "image", "maximum", "minimum", "tuned", "top", "nvme_path")}
    request = problems.attempt(lambda: PlanningRequest(model=model, pins=pins, **asked))
    if options["write"]:
        problems.attempt(lambda: refuse_existing(options["write"]))
    found = problems.attempt(lambda: clusters(**{name: options[name] for name in ("kinds", *OPTIONS)}))
    problems.raise_if_any()
    assert request and found
    with EventConsole() as console:
        plan = answer_request(request, found, on_event=console)
    return PlanReport(plan=plan, written=plan.write(options["write"]) if options["write"] and plan.layouts else ())
