"""What `zerofit plan` prints for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from zerofit.plan.result import SAME_SPEED
from zerofit.spec.units import shown_bytes

LINES = 8  # of reasons


def show(result: dict[str, Any]) -> None:
    """The whole answer, from its JSON."""
    console = Console(width=None if Console().is_terminal else 150)
    cluster = result["cluster"]
    console.print(_title(result, cluster), highlight=False)
    for note in cluster["assumed"]:
        console.print(f"  assumed {note}", style="dim", highlight=False)
    if result["tuned"]:
        console.print(_tuned(result["tuned"]), highlight=False)
    if result.get("boxes"):
        console.print(_boxes(result["boxes"]))
    if result.get("asked"):
        console.print(_asked(result["asked"]), style="bold", highlight=False)
    if result["layouts"]:
        console.print(_layouts(result))
        shown = len(result["layouts"])
        if shown < min(result["top"], result["fitting"]):
            words = f"  {result['fitting']} fit in {shown} layouts: of each the fastest bucket and overlap is shown"
            console.print(words, highlight=False)
        _knobs(console, result["layouts"][0])
        if result["plainest"]:
            number = result["plainest"] + 1
            console.print(
                f"  {number}: simpler, and less than {SAME_SPEED:.0%} slower by this forecast", highlight=False
            )
    else:
        console.print("nothing fits", style="bold red")
        _nearest(console, result)
    _rejections(console, result)
    for path in result.get("written", ()):
        console.print(f"written: {path}", highlight=False)
    if result.get("written"):
        words = f"  layout {result['written_layout'] + 1}; data is for you to fill in: see the comment in run.yaml"
        console.print(words, highlight=False)
    if result.get("profile"):
        console.print(f"profile: {result['profile']}", style="dim", highlight=False)


def _tuned(tuned: dict[str, Any]) -> str:
    """How good the corrected step times are."""
    errors = tuned["errors"]
    words = f"  step times corrected by {tuned['trials']} trials of {tuned['model']}: there the plan was off by "
    words += f"{errors['planned']['median']:.0%} in the middle and {errors['planned']['most']:.0%} at most"
    if errors["learned"] is None:
        return words
    learned = errors["learned"]
    return f"{words}, corrected by the other trials by {learned['median']:.1%} and {learned['most']:.1%}"


def _title(result: dict[str, Any], cluster: dict[str, Any]) -> str:
    nodes = f"{cluster['nodes']} x " if cluster["nodes"] > 1 else ""
    length = f" at {result['seq_len']} tokens" if result["seq_len"] else ""
    return (
        f"{result['model']} ({result['parameters'] / 1e9:.3g} B parameters){length} in {result['precision']} on "
        f"{nodes}{cluster['gpus']} x {cluster['gpu']} of {shown_bytes(cluster['device_bytes'])}: "
        f"{result['considered']} layouts in {result['seconds']:.2f} s, {result['fitting']} fit"
    )


def _layouts(result: dict[str, Any]) -> Table:
    what = "tokens/s" if result["seq_len"] else "images/s"
    table = Table("", "ZeRO", "offload", "dp x tp x pp x sp", "micro x acc", "ckpt", "device", "margin", "host/rank")
    for name in ("NVMe/rank", "step", what, "MFU"):
        table.add_column(name, justify="right")
    for number, row in enumerate(result["layouts"], start=1):
        speed = row["tokens_per_s"] or row["samples_per_s"]
        table.add_row(
            str(number),
            str(row["zero_stage"]),
            row["offload"].replace("optimizer", "opt") if row["offload"] != "none" else "-",
            f"{row['dp']} x {row['tp']} x {row['pp']} x {row['sp']}",
            f"{row['micro_batch']} x {row['gradient_accumulation_steps']}",
            "yes" if row["activation_checkpointing"] else "no",
            shown_bytes(row["peak_bytes"]),
            shown_bytes(row["margin_bytes"]),
            shown_bytes(row["host_bytes"]) if row["host_bytes"] else "-",
            shown_bytes(row["nvme_bytes"]) if row["nvme_bytes"] else "-",
            f"{row['step_s']:.3g} s",
            _rate(speed),
            f"{row['mfu']:.0%}" if row["mfu"] is not None else "-",
        )
    return table


def _knobs(console: Console, best: dict[str, Any]) -> None:
    """Where the best one's memory and time go, and its buckets."""
    parts = sorted(best["breakdown"].items(), key=lambda item: -item[1])
    told = [part for part in parts if part[1] >= 0.01 * best["peak_bytes"]]
    kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in told)
    times = sorted(((name[:-2], s) for name, s in best["time"].items() if s > 0), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds / best['step_s']:.0%}" for name, seconds in times[:5])
    overlap = "true" if best["overlap_comm"] else "false"
    console.print(f"  1: buckets of {best['bucket_elements']:,} elements, overlap_comm {overlap}", highlight=False)
    console.print(f"     peak in {best['peak_phase']}: {kinds}", highlight=False)
    console.print(f"     step: {shares}", highlight=False)


def _nearest(console: Console, result: dict[str, Any]) -> None:
    near = result["nearest_miss"]
    if near:
        console.print(f"  nearest: {layout_words(near['layout'])}: {near['message']}", highlight=False)
        if near["hint"]:
            console.print(f"           {near['hint']}", highlight=False)
    for one in result.get("remedies", ()):
        console.print(f"  would fit: {one}" if "not even" not in one else f"  {one}", highlight=False)


def _rejections(console: Console, result: dict[str, Any]) -> None:
    if not result["rejections"]:
        return
    table = Table("rejected", "why (the nearest of them)", "layout", "what would help")
    table.columns[0].justify = "right"
    for one in result["rejections"][:LINES]:
        layout = layout_words(one["layout"]) if one["layout"] else "-"
        table.add_row(str(one["count"]), one["message"], layout, one["hint"])
    console.print(table)


def _boxes(boxes: list[dict[str, Any]]) -> Table:
    table = Table("box", "fits", "layout", "samples/s", "tokens/s", "MFU", "what would fit")
    for box in boxes:
        best = box["layout"]
        table.add_row(
            f"{box['nodes']} x {box['gpus']} x {box['gpu']}" if box["nodes"] > 1 else f"{box['gpus']} x {box['gpu']}",
            "yes" if best else "no",
            layout_words(best) if best else "-",
            _rate(best["samples_per_s"]) if best else "-",
            f"{best['tokens_per_s']:,.0f}" if best and best["tokens_per_s"] else "-",
            f"{best['mfu']:.0%}" if best and best["mfu"] is not None else "-",
            "; ".join(box["remedies"]),
        )
    return table


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _asked(asked: dict[str, Any]) -> str:
    if "min" in asked:
        if asked["value"] is None:
            return f"not even {asked['looked_up_to']} devices are enough"
        return f"fewest devices: {asked['value']} ({asked['nodes']} node(s) of {asked['gpus']})"
    if asked["value"] is None:
        return f"no {asked['max']} fits"
    words = f"largest {asked['max']}: {asked['value']}"
    if "now" in asked:
        words += f" (the model has {asked['now']} of {asked['layer']})"
    if asked["next_fits"] is False:
        return f"{words}; {asked['value'] + asked['step']} does not fit"
    return f"{words}, the most that the model takes" if asked.get("limit") else f"{words}, and no more was looked at"


def layout_words(layout: dict[str, Any]) -> str:
    """A layout in one line."""
    degrees = [f"{name} {layout[name]}" for name in ("dp", "tp", "pp", "sp") if layout[name] > 1]
    words = [f"ZeRO-{layout['zero_stage']}", *degrees, f"micro batch {layout['micro_batch']}"]
    if layout["offload"] != "none":
        words.append(f"offload {layout['offload']}")
    if layout["activation_checkpointing"]:
        words.append("checkpointing")
    return ", ".join(words)
