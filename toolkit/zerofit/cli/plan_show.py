"""What `zerofit plan` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from zerofit.app.planning.answers import Plan
from zerofit.app.planning.corrections import TunedLayouts
from zerofit.cli.console import out
from zerofit.plan.result import SAME_SPEED, PlanResult, RankedLayout, Rejected
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.cli.plan import PlanReport

WIDTH = 150  # where there is no terminal
LINES = 8  # of reasons


def show(report: PlanReport) -> None:
    """Print the whole answer."""
    console, plan, result = out(WIDTH), report.plan, report.plan.result
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
        console.print(_rejections(result.rejections))
    for path in report.written:
        console.print(f"written: {path}")
    if report.written:
        number = (result.plainest or 0) + 1
        console.print(f"  layout {number}; data is for you to fill in: see the comment in run.yaml")
    if plan.profile_file:
        console.print(f"profile: {plan.profile_file}", style="dim")


def _title(result: PlanResult) -> str:
    cluster = result.cluster
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    length = f" at {result.seq_len} tokens" if result.seq_len else ""
    return (
        f"{result.model} ({result.parameters / 1e9:.3g} B parameters){length} in {result.precision} on "
        f"{nodes}{cluster.gpus} x {cluster.device.kind} of {shown_bytes(cluster.device.memory_bytes)}: "
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
    result = plan.result
    console.print(_layouts(result))
    shown = len(result.layouts)
    if shown < min(plan.request.top, result.fitting):
        console.print(f"  {result.fitting} fit in {shown} layouts: of each the fastest bucket and overlap is shown")
    _details(console, result.layouts[0])
    if result.plainest:
        console.print(f"  {result.plainest + 1}: simpler, and less than {SAME_SPEED:.0%} slower by this forecast")


def _layouts(result: PlanResult) -> Table:
    what = "tokens/s" if result.seq_len else "images/s"
    table = Table("", "ZeRO", "offload", "dp x tp x pp x sp", "micro x acc", "ckpt", "device", "margin", "host/rank")
    for name in ("NVMe/rank", "step", what, "MFU"):
        table.add_column(name, justify="right")
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


def _details(console: Console, best: RankedLayout) -> None:
    """Print where the best one's memory and time go, and its buckets."""
    memory, layout = best.memory, best.layout
    parts = sorted(memory.breakdown.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in parts if size >= 0.01 * memory.peak_bytes)
    seconds = {name.removesuffix("_s"): s for name, s in asdict(best.time).items() if name != "step_s" and s > 0}
    times = sorted(seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {s / best.step_s:.0%}" for name, s in times[:5])
    console.print(f"  1: buckets of {layout.bucket:,} elements, overlap_comm {str(layout.overlap).lower()}")
    console.print(f"     peak in {memory.peak_phase}: {kinds}")
    console.print(f"     step: {shares}")


def _nearest(console: Console, plan: Plan) -> None:
    near = plan.result.nearest
    if near:
        console.print(f"  nearest: {near.layout}: {near.message}")
        if near.hint:
            console.print(f"           {near.hint}")
    for one in plan.remedies:
        console.print(f"  would fit: {one}" if "not even" not in one else f"  {one}")


def _rejections(rejections: Sequence[Rejected]) -> Table:
    table = Table("rejected", "why (the nearest of them)", "layout", "what would help")
    table.columns[0].justify = "right"
    for one in rejections[:LINES]:
        table.add_row(str(one.count), one.message, str(one.layout or "-"), one.hint)
    return table


def _boxes(boxes: Sequence[Plan]) -> Table:
    table = Table("box", "fits", "layout", "samples/s", "tokens/s", "MFU", "what would fit")
    for box in boxes:
        cluster, best = box.cluster, box.result.layouts[0] if box.result.layouts else None
        nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
        table.add_row(
            f"{nodes}{cluster.gpus} x {cluster.device.kind}",
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
