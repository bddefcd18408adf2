"""What `zerofit plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from zerofit.cli.console import make_table, out
from zerofit.plan.result import PlanResult, RankedLayout
from zerofit.spec.mesh import AXES, mesh_table
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.app.planning.answers import LargestFit, Plan
    from zerofit.app.planning.methods import MethodComparison
    from zerofit.app.planning.request import TunedLayouts
    from zerofit.plan.fit import Fit
    from zerofit.plan.layout import PlannedLayout
    from zerofit.plan.outlook import Outlook

WIDTH = 150  # where there is no terminal
LINES = 8  # of reasons
RIGHT = ("step", "speed", "MFU", "hours", "GPU hours", "cost")
ALWAYS = ("", "offload")


def show(plan: Plan, mesh: bool = False) -> None:
    """Print the whole answer; with `mesh` also which rank of the best layout is where."""
    console, result = out(WIDTH), plan.result
    console.print(_title(result))
    for note in result.cluster.notes:
        console.print(f"  assumed {note}", style="dim")
    if plan.tuned:
        console.print(_tuned(plan.tuned))
    if plan.scaling:
        console.print(f"  {plan.scaling}")
    if plan.by_trace:
        console.print(f"  {plan.by_trace}")
    if result.padding:
        console.print(f"  {result.padding}")
    if plan.boxes:
        console.print(_boxes(plan.boxes))
    if plan.answer:
        console.print(str(plan.answer), style="bold")
    if result.layouts or result.misfits:
        console.print(_layouts(result))
    if result.layouts:
        _show_best(console, plan)
        if mesh:
            console.print(_mesh(result.layouts[0].layout))
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
    if plan.traced:
        words = f"layout {plan.shown + 1}" if plan.layouts else "the first, which does not fit"
        console.print(f"trace of a step of {words}: {plan.traced} (opens in https://ui.perfetto.dev)")
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


def _show_best(console: Console, plan: Plan) -> None:
    """Print where the best layout's memory and time go."""
    result = plan.result
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
    console.print(
        f"  1: {layout.optimizer}, buckets of {layout.bucket:,} elements, overlap_comm {str(layout.overlap).lower()}"
    )
    console.print(f"     peak in {memory.peak_phase}: {kinds}")
    console.print(f"     step: {shares}")
    if best.errors and best.errors.low < best.errors.high:
        what, figures, low, high = best.errors
        span = f"{low * best.step_s:.3g} to {high * best.step_s:.3g} s"
        console.print(f"     {span}, as 8 of 10 published figures lay about forecasts ({what}: {figures})")
    for line in _outlook(best.outlook) if best.outlook else ():
        console.print(f"     {line}")
    if result.plainest:
        slower = best.samples_per_s / result.layouts[result.plainest].samples_per_s - 1
        console.print(
            f"  {result.plainest + 1}: simpler; its forecast is {slower:.1%} slower, which forecasts do not tell apart"
        )


def _mesh(layout: PlannedLayout) -> Table:
    """Return the ranks by pipeline stage, data and sequence rank, tensor ranks together."""
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    titles, *rows = mesh_table(Layout(**degrees))
    table = make_table(*(title or f"layout 1, {layout.world_size} ranks" for title in titles))
    for row in rows:
        table.add_row(*row)
    return table


def _layouts(result: PlanResult) -> Table:
    """Return the table of layouts; of columns that say nothing of any none is shown."""
    rows = [_row(number, one) for number, one in enumerate((*result.layouts, *result.misfits), start=1)]
    speed = {"speed": "tokens/s" if result.seq_len else "images/s"}
    columns = [name for name in rows[0] if name in ALWAYS or any(row[name] != "-" for row in rows)]
    right = [n for n, name in enumerate(columns) if name in RIGHT]
    table = make_table(*(speed.get(name, name) for name in columns), right=right)
    for one, row in zip((*result.layouts, *result.misfits), rows, strict=True):
        table.add_row(*(row[name] for name in columns), style="red" if one.fit.exceeded else None)
    return table


def _row(number: int, one: RankedLayout) -> dict[str, str]:
    layout, memory, outlook = one.layout, one.memory, one.outlook
    return {
        "": "-" if one.fit.exceeded else str(number),
        "ZeRO": str(layout.zero_stage),
        "offload": layout.offload.replace("optimizer", "opt") if layout.offload != "none" else "-",
        "dp x tp x pp x sp": f"{layout.dp} x {layout.tp} x {layout.pp} x {layout.sp}",
        "experts": str(layout.ep) if layout.ep > 1 else "-",
        "micro x acc": f"{layout.micro_batch} x {layout.accumulation}",
        "ckpt": "yes" if layout.checkpointing else "no",
        "device": shown_bytes(memory.peak_bytes),
        "margin": _lacks(one.fit) if one.fit.exceeded else shown_bytes(one.fit.margin_bytes),
        "host/rank": shown_bytes(memory.host_bytes) if memory.host_bytes else "-",
        "NVMe/rank": shown_bytes(memory.nvme_bytes) if memory.nvme_bytes else "-",
        "step": f"{one.step_s:.3g} s",
        "speed": _rate(one.tokens_per_s or one.samples_per_s),
        "MFU": f"{one.mfu:.0%}" if one.mfu is not None else "-",
        "hours": _rate(outlook.hours) if outlook and outlook.hours is not None else "-",
        "GPU hours": _rate(outlook.gpu_hours) if outlook and outlook.gpu_hours is not None else "-",
        "cost": f"${_rate(outlook.cost)}" if outlook and outlook.cost is not None else "-",
    }


def _outlook(one: Outlook) -> list[str]:
    """Return how long the best layout trains, for how much, and when it should be saved."""
    good, lines = one.goodput, []
    if one.hours is not None and one.train_h is not None:
        words = f"{one.steps:,} steps: {_hours(one.train_h)} of steps, {_hours(one.hours)} with saves and failures"
        if one.hours_range:
            words += f" ({_hours(one.hours_range[0])} to {_hours(one.hours_range[1])})"
        lines.append(words)
    if one.price:
        lines.append(f"${one.price.per_gpu_hour:.4g} a GPU hour: {one.price.source}")
    elif one.gpu_hours is not None:
        lines.append("no list price of this node is known: --price USD, or --gpu with an instance type of a cloud")
    lines.append(
        f"save every {_time(good.save_every_s)}: goodput {good.share:.1%} "
        f"({good.low:.1%} to {good.high:.1%} in 8 of 10 months); saving {good.saving:.1%}, failures {good.lost:.1%}"
    )
    lines.append(
        f"a failure every {_time(good.mtbf_s)}, {good.failures_a_day:.3g} a day; a save takes {_time(good.save_s)}, "
        f"a restart {_time(good.restart_s)}; {good.spare_nodes} spare nodes are enough in 99% of all time"
    )
    return lines


def _hours(value: float) -> str:
    return f"{value:,.3g} h" if value < 1000 else f"{value:,.0f} h"


def _time(seconds: float) -> str:
    """Format seconds, minutes, hours or days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


def _lacks(fit: Fit) -> str:
    """Return what a layout lacks that does not fit."""
    place = "" if fit.exceeded == "device" else f" {fit.exceeded}"
    return f"lacks {shown_bytes(fit.lacking_bytes)}{place}"


def _nearest(console: Console, plan: Plan) -> None:
    near = plan.result.nearest
    if near:
        console.print(f"  nearest: {near.layout}: {near.message}")
        if near.hint:
            console.print(f"           {near.hint}")
    for one in plan.remedies:
        console.print(f"  would fit: {one}" if "not even" not in one else f"  {one}")


def show_methods(found: MethodComparison) -> None:
    """Print one row for each way to train the model."""
    cluster, first = found.cluster, found.rows[0].plan.profile
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    console = out(WIDTH)
    console.print(f"{first.model} on {nodes}{cluster.gpus} x {cluster.label}", style="bold")
    tokens = f"at {first.seq_len} tokens: the fastest" if first.seq_len else "the fastest"
    table = make_table("method", "trained", tokens, "device", "tokens/s", "longest sequence", right=(1, 3, 4, 5))
    for row in found.rows:
        profile, best = row.plan.profile, row.best and row.best.ranked
        table.add_row(
            row.method,
            f"{profile.trained:,} of {profile.parameters:,}",
            str(best.layout) if best else f"nothing fits; {'; '.join(row.plan.remedies)}",
            shown_bytes(best.fit.device_bytes) if best else "-",
            f"{best.tokens_per_s:,.0f}" if best and best.tokens_per_s else "-",
            _longest(row.longest),
            style=None if best else "red",
        )
    console.print(table)


def _longest(answer: LargestFit | None) -> str:
    if answer is None:
        return "-"
    if answer.value is None:
        return "none fits"
    return f"{answer.value:,}" + (" (the model's limit)" if answer.bounded and answer.limit else "")


def _boxes(boxes: Sequence[Plan]) -> Table:
    known = any(box.layouts and box.layouts[0].outlook for box in boxes)
    money = ("hours", "GPU hours", "cost") if known else ()
    table = Table("box", "fits", "layout", "samples/s", "tokens/s", "MFU", *money, "what would fit")
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
            *(_row(1, best)[name] if best else "-" for name in money),
            "; ".join(box.remedies),
        )
    return table


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
