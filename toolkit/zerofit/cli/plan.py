"""`zerofit plan`: which layouts fit and how fast they are, before any GPU is there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole, make_table, out
from zerofit.cli.options import AS_JSON, HARDWARE, PATH, clusters, given, hardware_options, run_options
from zerofit.plan.result import SAME_SPEED, PlanResult
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import PRECISIONS
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.planning.answers import Plan
    from zerofit.app.planning.request import TunedLayouts

FINDING = 1
RUN_FIELDS = (
    *("model_args", "micro_batch", "gradient_accumulation_steps", "global_batch", "seq_len"),
    *("activation_checkpointing", "tensor_parallel", "pipeline", "sequence_parallel"),
)
FROM_HELP = "folder of `zerofit tune`: step times are corrected by its trials, for any model and batch on such devices"
WRITE_HELP = "folder for ds_config.json, run.yaml of the best, or of a plainer one less than 3% slower"
PRECISION_HELP = "bf16 where the device has it, fp16 before Ampere, fp32 on a CPU; with --profile the profile's"
WIDTH = 150  # where there is no terminal
LINES = 8  # of reasons


@click.command()
@click.argument("model", required=False)
@hardware_options(*HARDWARE, kinds="h100-80gb, p5.48xlarge, ..., cpu, or a YAML file of your own; several to compare")
@click.option("--nvme-path", default="/local_nvme", show_default=True, help="where the disks are, for --write")
@click.option("--input", "image", metavar="image:CxHxW", help="what an image model is fed")
@click.option("--profile", type=PATH, help="plan from a stored profile, without torch")
@click.option("--from", "tuned", type=PATH, help=FROM_HELP)
@click.option("--write", type=PATH, help=WRITE_HELP)
@click.option("--confirm", type=click.IntRange(min=0), default=0, metavar="N", help="simulate the N best, too")
@click.option("--max", "maximum", type=click.Choice(["seq-len", "micro-batch", "layers"]), help="the largest that fits")
@click.option("--min", "minimum", type=click.Choice(["gpus"]), help="how few devices are enough")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="layouts to print")
@click.option("--precision", type=click.Choice(PRECISIONS), help=f"[{PRECISION_HELP}]")
@run_options(RUN_FIELDS)
@AS_JSON
def plan(model: str | None, as_json: bool, **options: Any) -> None:
    """Rank the layouts of MODEL that fit a cluster, with memory and speed, and say why the others do not.

    Without hardware flags: this machine. Exit code 0: something fits, 1: nothing does, 2: bad input.
    """
    result = answer(lambda: _plan(model, options), as_json, show)
    sys.exit(0 if result.layouts else FINDING)


def _plan(model: str | None, options: dict[str, Any]) -> Plan:
    from zerofit.app.planning.answers import refuse_existing
    from zerofit.app.planning.planner import answer_request
    from zerofit.app.planning.request import PlanningRequest

    problems = Problems()
    pins: Any = given({name: options[name] for name in (*RUN_FIELDS, "precision")})
    asked = {
        name: options[name]
        for name in ("profile", "image", "maximum", "minimum", "tuned", "top", "nvme_path", "confirm")
    }
    asked["write"] = options["write"] is not None
    request = problems.attempt(lambda: PlanningRequest(model=model, pins=pins, **asked))
    if options["write"]:
        problems.attempt(lambda: refuse_existing(options["write"]))
    found = problems.attempt(lambda: clusters(**{name: options[name] for name in ("kinds", *HARDWARE)}))
    problems.raise_if_any()
    assert request and found
    with EventConsole() as console:
        plan = answer_request(request, found, on_event=console)
    return replace(plan, written=plan.write(options["write"])) if options["write"] and plan.layouts else plan


def show(plan: Plan) -> None:
    """Print the whole answer."""
    console, result = out(WIDTH), plan.result
    console.print(_title(result))
    for note in result.cluster.notes:
        console.print(f"  assumed {note}", style="dim")
    if plan.tuned:
        console.print(_tuned(plan.tuned))
    if plan.boxes:
        console.print(_boxes(plan.boxes))
    if plan.answer:
        console.print(str(plan.answer), style="bold")
    if result.layouts:
        _show_layouts(console, plan)
    else:
        console.print("nothing fits", style="bold red")
        _nearest(console, plan)
    if result.rejections:
        table = make_table("rejected", "why (the nearest of them)", "layout", "what would help", right=(0,))
        for one in result.rejections[:LINES]:
            table.add_row(str(one.count), one.message, str(one.layout or "-"), one.hint)
        console.print(table)
    for one in plan.confirmed:
        console.print(str(one))
    for path in plan.written:
        console.print(f"written: {path}")
    if plan.written:
        console.print(f"  layout {(plan.chosen or 0) + 1}; data is for you to fill in: see the comment in run.yaml")
    if plan.profile_file:
        console.print(f"profile: {plan.profile_file}", style="dim")


def _title(result: PlanResult) -> str:
    cluster = result.cluster
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    length = f" at {result.seq_len} tokens" if result.seq_len else ""
    return (
        f"{result.model} ({result.parameters / 1e9:.3g} B parameters){length} in {result.precision} on "
        f"{nodes}{cluster.gpus} x {cluster.label} of {shown_bytes(cluster.device.memory_bytes)}: "
        f"{result.considered} layouts in {result.seconds:.2f} s, {result.fitting} fit"
    )


def _tuned(tuned: TunedLayouts) -> str:
    """Return how good the corrected step times are."""
    found = tuned.to_dict()
    planned, learned = found["errors"]["planned"], found["errors"]["learned"]
    words = f"  step times corrected by {found['trials']} trials of {tuned.model}: there the plan was off by "
    words += f"{planned['median']:.0%} in the middle and {planned['most']:.0%} at most"
    if learned is None:
        return words
    return f"{words}, corrected by the other trials by {learned['median']:.1%} and {learned['most']:.1%}"


def _show_layouts(console: Console, plan: Plan) -> None:
    """Print the layouts, and where the best one's memory and time go."""
    result = plan.result
    console.print(_layouts(result))
    shown = len(result.layouts)
    if shown < min(plan.request.top, result.fitting):
        console.print(f"  {result.fitting} fit in {shown} layouts: of each the fastest bucket and overlap is shown")
    best = result.layouts[0]
    memory, layout = best.memory, best.layout
    parts = sorted(memory.breakdown.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in parts if size >= 0.01 * memory.peak_bytes)
    seconds = {name.removesuffix("_s"): s for name, s in asdict(best.time).items() if name != "step_s" and s > 0}
    times = sorted(seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {s / best.step_s:.0%}" for name, s in times[:5])
    console.print(f"  1: buckets of {layout.bucket:,} elements, overlap_comm {str(layout.overlap).lower()}")
    console.print(f"     peak in {memory.peak_phase}: {kinds}")
    console.print(f"     step: {shares}")
    if best.errors:
        what, figures, low, high = best.errors
        seconds = f"{low * best.step_s:.3g} to {high * best.step_s:.3g} s"
        console.print(
            f"     {seconds}, as 8 of 10 published runs ({what}, {figures} figures) lay about their forecasts"
        )
    if result.plainest:
        console.print(f"  {result.plainest + 1}: simpler, and less than {SAME_SPEED:.0%} slower by this forecast")


def _layouts(result: PlanResult) -> Table:
    what = "tokens/s" if result.seq_len else "images/s"
    names = ("", "ZeRO", "offload", "dp x tp x pp x sp", "micro x acc", "ckpt", "device", "margin", "host/rank")
    table = make_table(*names, "NVMe/rank", "step", what, "MFU", right=range(9, 13))
    for number, one in enumerate(result.layouts, start=1):
        layout, memory = one.layout, one.memory
        table.add_row(
            str(number),
            str(layout.zero_stage),
            layout.offload.replace("optimizer", "opt") if layout.offload != "none" else "-",
            f"{layout.dp} x {layout.tp} x {layout.pp} x {layout.sp}",
            f"{layout.micro_batch} x {layout.accumulation}",
            "yes" if layout.checkpointing else "no",
            shown_bytes(memory.peak_bytes),
            shown_bytes(one.fit.margin_bytes),
            shown_bytes(memory.host_bytes) if memory.host_bytes else "-",
            shown_bytes(memory.nvme_bytes) if memory.nvme_bytes else "-",
            f"{one.step_s:.3g} s",
            _rate(one.tokens_per_s or one.samples_per_s),
            f"{one.mfu:.0%}" if one.mfu is not None else "-",
        )
    return table


def _nearest(console: Console, plan: Plan) -> None:
    near = plan.result.nearest
    if near:
        console.print(f"  nearest: {near.layout}: {near.message}")
        if near.hint:
            console.print(f"           {near.hint}")
    for one in plan.remedies:
        console.print(f"  would fit: {one}" if "not even" not in one else f"  {one}")


def _boxes(boxes: Sequence[Plan]) -> Table:
    table = Table("box", "fits", "layout", "samples/s", "tokens/s", "MFU", "what would fit")
    for box in boxes:
        cluster, best = box.cluster, box.result.layouts[0] if box.result.layouts else None
        nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
        table.add_row(
            f"{nodes}{cluster.gpus} x {cluster.label}",
            "yes" if best else "no",
            str(best.layout) if best else "-",
            _rate(best.samples_per_s) if best else "-",
            f"{best.tokens_per_s:,.0f}" if best and best.tokens_per_s else "-",
            f"{best.mfu:.0%}" if best and best.mfu is not None else "-",
            "; ".join(box.remedies),
        )
    return table


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
