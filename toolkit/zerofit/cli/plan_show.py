"""Print the answers of `zerofit plan`, also with `--serve` and `--method`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.cli.console import fitting_table, out, print_facts, print_verdict, stage_table
from zerofit.plan.fit import CLOSE
from zerofit.plan.pipeline import planned_stages
from zerofit.plan.result import PlanResult, RankedLayout
from zerofit.rollout.methods import METHODS, WITH_PROCESSES
from zerofit.spec.mesh import AXES, mesh_table
from zerofit.spec.run_folder import Layout
from zerofit.spec.units import counted, shown_bytes, shown_count, shown_rate

if TYPE_CHECKING:
    from zerofit.app.planning.corrections import TunedLayouts
    from zerofit.app.planning.largest_fit import LargestFit
    from zerofit.app.planning.plan import Plan
    from zerofit.app.planning.rollouts import Arrangement, RolloutPlan
    from zerofit.app.planning.serving import ServingPlan
    from zerofit.app.planning.training_methods import MethodComparison
    from zerofit.plan.layout import PlannedLayout
    from zerofit.plan.outlook import Outlook
    from zerofit.spec.cluster import Cluster


MAX_REASONS = 8  # why layouts do not fit
ANY_WIDTH = 1000  # wider than any table, in columns
RIGHT = ("", "memory", "margin", "host", "NVMe", "step", "tokens/s", "images/s", "MFU", "hours", "GPU hours", "cost")
# columns by importance: a narrow terminal shows only the first columns
KEEP = ("", "layout", "memory", "step", "tokens/s", "images/s", "cost", "hours", "MFU", "margin", "host", "NVMe")
COLUMNS = (*KEEP[2:], "GPU hours")  # what `--columns` may name
MISFIT = ("", "layout", "memory", "margin", "step", "tokens/s", "images/s")
PARTS = 3  # of a phase's memory that its row names


def show(plan: Plan, mesh: bool, details: bool, columns: Sequence[str] = ()) -> None:
    """Print how many layouts fit, the fastest layouts, and why others do not fit.

    With `mesh`, also print the mesh of ranks of the best layout. `columns`: the columns to show next to the layout; ()
    shows as many columns as fit the console.
    """
    console, result = out(), plan.result
    word = ("FITS", "bold green") if result.layouts else ("NOTHING FITS", "bold red")
    where = f"{_machines(result.cluster)} ({shown_bytes(result.cluster.device.memory_bytes)})"
    title = f"{result.fitting:,} of {counted(result.considered, 'layout')} on {where}"
    console.print(Text.assemble(word, "  ", title))
    print_facts(console, _assumptions(plan))
    if plan.boxes:
        console.print(_boxes(console, plan.boxes))
    if plan.answer:
        console.print(str(plan.answer), style="bold")
    listed = (*result.layouts, *result.misfits)
    if listed:
        rows = [_row(number, layout) for number, layout in enumerate(listed, start=1)]
        console.print()
        styles = ["red" if layout.fit.exceeded else None for layout in listed]
        # Of layouts that do not fit, the first columns show what is missing.
        keep = MISFIT if result.misfits else KEEP
        if columns:
            keep = ("", "layout", *columns)
            rows = [{name: row.get(name, "-") for name in keep} for row in rows]
        table = fitting_table(console, rows, RIGHT, keep, "layout", styles)
        console.print(table)
        # The table decides by the width of the console which columns it leaves out, so its columns are read back.
        printed = {str(column.header) for column in table.columns}
        left_out = [name for name in keep if name not in printed and any(row.get(name, "-") != "-" for row in rows)]
        console.print()
        print_facts(console, [("layouts", _abbreviations(listed))])
        if left_out:
            how = "in a wider terminal" if columns else "in a wider terminal, or with --columns"
            print_facts(console, [("more columns", f"{', '.join(left_out)} {how}")])
    print_facts(console, _best(plan, details) if result.layouts else _nearest(plan))
    if result.layouts and mesh:
        best = result.layouts[0].layout
        _print_mesh(console, best)
        if stages := planned_stages(plan.profile, best):
            console.print(stage_table(console, [asdict(stage) for stage in stages]))
    print_facts(console, _close(result))
    for rejection in result.rejections[:MAX_REASONS] if details else ():
        nearest = f"{rejection.count:,}; the nearest is {rejection.layout or '-'}: {rejection.message}"
        print_facts(console, [("rejected", f"{nearest}; {rejection.hint}" if rejection.hint else nearest)])


def _close(result: PlanResult) -> Iterator[tuple[str, str]]:
    """Yield facts about the fastest layout that is close to the limit."""
    for row in result.close[:1]:
        free = row.fit.device_available_bytes - row.memory.peak_bytes
        yield "close", f"{row.layout} ({row.step_s:.3g} s/step) is {CLOSE}"
        yield "", f"{shown_bytes(free)} free at its peak, less than the margin of {shown_bytes(row.fit.margin_bytes)}"
        yield "", f"--confirm {len(result.close)} simulates it"


def _machines(cluster: Cluster) -> str:
    """Return a cluster in words, such as "2 x 8 x H100": nodes and devices per node."""
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.gpus} x {cluster.label}"


def show_end(plan: Plan, details: bool) -> None:
    """Print the results of simulated layouts, the files that were written, and how to see more."""
    console = out()
    print_facts(console, (("simulated", outcome.described(details)) for outcome in plan.confirmed))
    print_facts(console, _files(plan, details))
    if not details:
        files = "" if plan.written else "configuration files: --write FOLDER    "
        print_facts(console, [("details", f"--details    {files}--json")])


def _assumptions(plan: Plan) -> Iterator[tuple[str, str]]:
    result = plan.result
    length = f", {result.seq_len:,} tokens" if result.seq_len else ""
    yield "model", f"{result.model}, {shown_count(result.parameters)} parameters, {result.precision}{length}"
    for note in result.cluster.notes:
        yield "assumed", note
    notes = (_tuned(plan.tuned) if plan.tuned else "", plan.scaling, plan.by_trace, result.padding)
    yield from (("note", str(note)) for note in notes if note)


def _tuned(tuned: TunedLayouts) -> str:
    report = tuned.to_dict()
    planned, learned = report["errors"]["planned"], report["errors"]["learned"]
    words = f"step times corrected by {report['trials']} trials of {tuned.model}; the plan's errors were "
    words += f"{planned['median']:.0%} (median) and {planned['most']:.0%} (largest)"
    if learned is None:
        return words
    return f"{words}; corrected by the other trials, {learned['median']:.1%} and {learned['most']:.1%}"


def _best(plan: Plan, details: bool) -> Iterator[tuple[str, str]]:
    result = plan.result
    best = result.layouts[0]
    memory, layout = best.memory, best.layout
    # Leave out parts below 1 % of the peak, and below 0.5 % of the step.
    parts = sorted(memory.breakdown.items(), key=lambda item: -item[1])
    parts = [(kind, size) for kind, size in parts if size >= 0.01 * memory.peak_bytes]
    kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in parts[: None if details else 3])
    seconds = {
        name.removesuffix("_s"): s
        for name, s in asdict(best.time).items()
        if name != "step_s" and s >= 0.005 * best.step_s
    }
    times = sorted(seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {s / best.step_s:.0%}" for name, s in times[:5])
    interval = ""
    if best.errors and best.errors.low < best.errors.high:
        what, figures, low, high, narrower = best.errors
        interval = f", {low * best.step_s:.3g} to {high * best.step_s:.3g} s in 8 of 10 runs"
        if details:
            interval += f" (from {figures} published figures: {what}; `{narrower}` narrows the interval)"
    yield "layout 1", f"peak memory in {memory.peak_phase}: {kinds}"
    yield "", f"step time: {shares}{interval}"
    overlap = "with" if layout.overlap else "without"
    storage = f"buckets of {layout.bucket:,} elements, {overlap} overlap_comm"
    # FSDP2 and torchtitan exchange layers, not buckets.
    if layout.by_layer:
        storage = f"{'bf16' if layout.weight_bytes == 2 else 'float32'} weights and moments"
    yield "", f"{layout.optimizer}, {storage}"
    yield from _outlook(best.outlook) if best.outlook else ()
    if result.plainest:
        slower = best.samples_per_s / result.layouts[result.plainest].samples_per_s - 1
        share = f"{slower:.0%}" if slower >= 0.005 else "less than 1%"
        yield "simplest", f"layout {result.plainest + 1}, about as fast (forecast {share} slower)"
    if details and len(result.layouts) < min(plan.request.top, result.fitting):
        yield "table", f"{len(result.layouts)} layouts, each with its fastest bucket size and overlap_comm"


def _print_mesh(console: Console, layout: PlannedLayout) -> None:
    """Print the mesh of ranks of a layout."""
    # A row is a pipeline stage, a column a data or sequence rank, and a cell has its tensor ranks.
    titles, *rows = mesh_table(Layout(**{axis: getattr(layout, axis) for axis in AXES}))
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(f"\nlayout 1, {counted(layout.world_size, 'rank')}")
    # If the console is too narrow for the columns, each stage gets its own lines.
    if console.measure(table, options=console.options.update(width=ANY_WIDTH)).maximum <= console.width:
        console.print(table)
        return
    for first, *cells in rows:
        pairs = zip(titles[1:], cells, strict=True)
        print_facts(console, [(first, ", ".join(f"{title}: {cell}" for title, cell in pairs))])


def _row(number: int, ranked: RankedLayout) -> dict[str, str]:
    layout, memory, outlook = ranked.layout, ranked.memory, ranked.outlook
    micro = f"micro batch {layout.micro_batch}"
    # Most layouts that offload use host memory, so only NVMe is named.
    words = str(layout).replace(micro, f"{micro} x {layout.accumulation}").replace(":cpu", "")
    speed = "tokens/s" if ranked.tokens_per_s else "images/s"
    margin = shown_bytes(ranked.fit.margin_bytes)
    if ranked.fit.exceeded:
        place = "" if ranked.fit.exceeded == "device" else f" {ranked.fit.exceeded}"
        margin = f"lacks {shown_bytes(ranked.fit.lacking_bytes)}{place}"
    return {
        "": "-" if ranked.fit.exceeded else str(number),
        "layout": words,
        "memory": shown_bytes(memory.peak_bytes),
        "margin": margin,
        "host": shown_bytes(memory.host_bytes) if memory.host_bytes else "-",
        "NVMe": shown_bytes(memory.nvme_bytes) if memory.nvme_bytes else "-",
        # "#" keeps three digits (1.50), but also leaves a point at the end of 150.
        "step": f"{f'{ranked.step_s:#.3g}'.rstrip('.')} s",
        speed: shown_rate(ranked.tokens_per_s or ranked.samples_per_s),
        "MFU": f"{ranked.mfu:.0%}" if ranked.mfu is not None else "-",
        "hours": shown_rate(outlook.hours) if outlook and outlook.hours is not None else "-",
        "GPU hours": shown_rate(outlook.gpu_hours) if outlook and outlook.gpu_hours is not None else "-",
        "cost": f"${shown_rate(outlook.cost)}" if outlook and outlook.cost is not None else "-",
    }


def _abbreviations(shown: Sequence[RankedLayout]) -> str:
    """Return the meanings of the abbreviations in these layouts."""
    degrees = {"dp": "data parallel ranks", "tp": "tensor parallel ranks", "pp": "pipeline stages"}
    degrees |= {"sp": "sequence parallel ranks", "ep": "expert parallel ranks"}
    used = [f"{name}: {words}" for name, words in degrees.items() if any(getattr(r.layout, name) > 1 for r in shown)]
    return "; ".join([*([", ".join(used)] if used else []), "micro batch: samples x accumulation steps"])


def _files(plan: Plan, details: bool) -> Iterator[tuple[str, str]]:
    for path in plan.written:
        yield "written", str(path)
    if plan.written:
        chosen = plan.chosen or 0
        next_steps = {
            "deepspeed": "fill in `data` in run.yaml, as its comment explains",
            "fsdp2": f"accelerate launch --config_file {plan.written[-1]} SCRIPT",
            "torchtitan": f"bash {plan.written[-1]} --hf_assets_path FOLDER",
        }
        yield "", f"layout {chosen + 1}; {next_steps[plan.layouts[chosen].layout.engine]}"
    if plan.traced:
        # A trace shows what makes a layout slow, also of one that does not fit.
        words = f"layout {plan.shown + 1}" if plan.layouts else "the first layout, which does not fit"
        yield "trace", f"{plan.traced}, a step of {words} (opens in https://ui.perfetto.dev)"
    if plan.profile_file and details:
        yield "profile", str(plan.profile_file)


def _outlook(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Yield facts about the full training: its time, price, and what saving and failures cost."""
    goodput = outlook.goodput
    if outlook.hours is not None and outlook.train_h is not None:
        span = f" ({_hours(outlook.hours_range[0])} to {_hours(outlook.hours_range[1])})" if outlook.hours_range else ""
        yield "training", f"{_hours(outlook.hours)}{span} for {outlook.steps:,} steps, saves and failures included"
    if outlook.price:
        total = f"${shown_rate(outlook.cost)} in all, " if outlook.cost is not None else ""
        yield "price", f"{total}${outlook.price.per_gpu_hour:.4g} a GPU hour: {outlook.price.source}"
    elif outlook.gpu_hours is not None:
        yield "price", "unknown for this node: pass --price USD, or a cloud instance type as --gpu"
    months = f"({goodput.low:.1%} to {goodput.high:.1%} in 8 of 10 months)"
    losses = f"{goodput.saving:.1%} are lost to saving, {goodput.lost:.1%} to failures"
    yield "goodput", f"{goodput.share:.1%} {months}: {losses}"
    yield "saves", f"save every {_time(goodput.save_every_s)}; a save takes {_time(goodput.save_s)}"
    restart = f"one every {_time(goodput.mtbf_s)}; a restart takes {_time(goodput.restart_s)}"
    yield "failures", f"{restart}; {goodput.spare_nodes} spare nodes suffice 99% of the time"


def _hours(value: float) -> str:
    # Three digits would turn 1,234 h into 1.23e+03 h.
    return f"{value:,.3g} h" if value < 1000 else f"{value:,.0f} h"


def _time(seconds: float) -> str:
    # The largest unit of which there are at least two: 90 min, not 1.5 h.
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


def _nearest(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield facts about the layout that nearly fits, and about what would make one fit."""
    nearest = plan.result.nearest
    if nearest:
        yield "nearest", f"{nearest.layout}: {nearest.message}" + (f"; {nearest.hint}" if nearest.hint else "")
    for remedy in plan.remedies:
        yield ("would fit" if "are not enough" not in remedy else ""), str(remedy)


def show_methods(comparison: MethodComparison) -> None:
    """Print one row for each way to train the model."""
    console, first = out(), comparison.rows[0].plan.profile
    console.print(f"{first.model} on {_machines(comparison.cluster)}", style="bold")
    fastest = f"fastest at {first.seq_len} tokens" if first.seq_len else "fastest"
    table = []
    for row in comparison.rows:
        profile, best = row.plan.profile, row.best
        table.append(
            {
                "method": row.method,
                "trained": f"{profile.trained / profile.parameters:.2%}",
                fastest: str(best.layout) if best else f"nothing fits; {'; '.join(row.plan.remedies)}",
                "memory": shown_bytes(best.fit.device_bytes) if best else "-",
                "tokens/s": f"{best.tokens_per_s:,.0f}" if best and best.tokens_per_s else "-",
                "longest": _longest(row.longest),
            }
        )
    keep = ("method", fastest, "memory", "tokens/s", "longest", "trained")
    console.print(fitting_table(console, table, ("trained", "memory", "tokens/s", "longest"), keep, fastest))


def _longest(answer: LargestFit | None) -> str:
    if answer is None:
        return "-"
    if answer.value is None:
        return "none fits"
    return f"{answer.value:,}" + (" (the model's limit)" if answer.bounded and answer.limit else "")


def _boxes(console: Console, boxes: Sequence[Plan]) -> Table:
    """Return a table of the fastest layout of each kind of machine."""
    rows = []
    for box in boxes:
        row = _row(1, box.result.layouts[0]) if box.result.layouts else {}
        rows.append(
            {
                "machines": _machines(box.cluster),
                "fastest layout": row.get("layout", f"nothing fits; {'; '.join(box.remedies)}"),
                "tokens/s": row.get("tokens/s", "-"),
                "images/s": row.get("images/s", "-"),
                **{name: row.get(name, "-") for name in ("MFU", "hours", "GPU hours", "cost")},
            }
        )
    keep = ("machines", "fastest layout", "tokens/s", "images/s", "cost", "hours", "GPU hours", "MFU")
    return fitting_table(console, rows, RIGHT, keep, "fastest layout")


def show_serving(plan: ServingPlan) -> None:
    """Print whether a model fits in vLLM, what uses the memory, and which settings are safe."""
    engine, settings, console = plan.engine, plan.engine.settings, out()
    memory = shown_bytes(plan.cluster.device.memory_bytes)
    where = f"{settings.tensor_parallel_size} x {plan.cluster.label} ({memory})"
    verdict = "FITS" if engine.fits else "DOES NOT FIT"
    release = ".".join(map(str, settings.release))
    print_verdict(console, verdict, f"{engine.model.name} in vLLM {release} on {where}", engine.fits)
    print_facts(console, _serving_facts(plan))


def _serving_facts(plan: ServingPlan) -> Iterator[tuple[str, str]]:
    engine, settings = plan.engine, plan.engine.settings
    if plan.problem:
        yield "because", plan.problem
    for remedy in plan.remedies if plan.problem else ():
        yield "try", f"--rollout {remedy}"
    # vLLM divides the memory that is left into blocks of the KV cache. Their number limits the sequences at once.
    if engine.blocks:
        tokens = engine.cache.tokens(engine.blocks, engine.need)
        blocks = f"{engine.blocks:,} blocks, {tokens:,} tokens"
        yield "KV cache", f"{shown_bytes(engine.cache_bytes)} on each GPU: {blocks}"
        sequences = f"{engine.sequences:,.1f} sequences of {settings.max_model_len:,} tokens"
        limit = f", at most {settings.max_num_seqs:,} of any length (max_num_seqs)"
        copies = f"; {plan.copies} engines on {plan.cluster.ranks} GPUs" if plan.copies > 1 else ""
        yield "at once", f"{sequences}{limit}{copies}"
    parts = ", ".join(f"{part.name} {shown_bytes(part.bytes)}" for part in engine.parts)
    allowed = f"{settings.gpu_memory_utilization:g} of {shown_bytes(plan.cluster.device.memory_bytes)}"
    yield "memory", f"{shown_bytes(engine.requested)} ({allowed}): {parts}"
    if engine.fits:
        low, high = engine.smallest_utilization, engine.largest_utilization
        yield "safe", f"gpu_memory_utilization {low:.2f} to {high:.2f}; max_model_len up to {engine.longest:,}"
    batch = f"{settings.max_num_batched_tokens:,} tokens per step (max_num_batched_tokens), {settings.dtype}"
    if settings.quantization:
        published = " as published" if settings.quantization == engine.model.published else ""
        batch += f", weights in {settings.quantization}{published}"
    if engine.model.reads_images:
        yield "note", "without the activations of the image encoder, as with --limit-mm-per-prompt image=0"
    yield "assumed", f"{batch}; other releases and settings: --rollout release=0.19,enforce_eager=true,..."


def show_rollouts(plan: RolloutPlan) -> None:
    """Print whether a method fits, its memory by phase, and how it can share the GPUs with vLLM."""
    best, console = plan.best, out()
    total = shown_bytes(plan.cluster.device.memory_bytes)
    where = f"{plan.cluster.ranks} x {plan.cluster.label} ({total})"
    verdict = "FITS" if best.fits else "DOES NOT FIT"
    print_verdict(console, verdict, f"{plan.name} of {plan.setup.profile.model} on {where}: {best.name}", best.fits)
    console.print()
    rows = []
    for phase in best.memory.phases:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:PARTS]
        parts = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in largest)
        rows.append({"phase": phase.name, "memory": shown_bytes(phase.bytes), "largest parts": parts})
    highest = best.memory.highest.name
    styles = ["bold" if row["phase"] == highest else None for row in rows]
    console.print(fitting_table(console, rows, ("memory",), tuple(rows[0]), "largest parts", styles))
    console.print()
    # An arrangement is a way in which trainer and vLLM share the GPUs.
    rows = [_arrangement(row) for row in plan.arrangements]
    styles = [None if row.fits else "red" for row in plan.arrangements]
    console.print(fitting_table(console, rows, tuple(rows[0])[2:], tuple(rows[0]), "training", styles))
    console.print()
    print_facts(console, _rollout_facts(plan))


def _arrangement(row: Arrangement) -> dict[str, str]:
    """Return the cells of an arrangement; those about vLLM only if it is used."""
    cells = {
        "arrangement": row.name,
        "training": str(row.ranked.layout),
        "step": f"{row.time.step_s:.3g} s",
        "highest": shown_bytes(row.memory.highest.bytes),
    }
    if row.engine is None:
        return cells
    return cells | {
        "generate": f"{row.time.generate_s:.3g} s",
        "utilization": f"{row.engine.settings.gpu_memory_utilization:.2f}",
        "tokens/s": f"{row.time.tokens_per_s:,.0f}",
    }


def _rollout_facts(plan: RolloutPlan) -> Iterator[tuple[str, str]]:
    best, settings = plan.best, plan.settings
    highest = best.memory.highest
    free = best.memory.room
    balance = f"{shown_bytes(free)} are left" if free >= 0 else f"{shown_bytes(-free)} are missing"
    yield "highest", f"{highest.name}: {shown_bytes(highest.bytes)} on each GPU; {balance}"
    for _, message in plan.findings:
        yield "note", message
    if best.memory.engine and best.fits:
        engine = best.memory.engine
        largest, smallest = best.memory.largest_utilization, engine.smallest_utilization
        sequences = f"{min(engine.sequences, engine.settings.max_num_seqs or 0):,.0f} completions at once"
        share = f"{settings.own_name('vllm_gpu_memory_utilization')} {engine.settings.gpu_memory_utilization:.2f}"
        yield "vLLM", f"{share}: {sequences}; {smallest:.2f} to {largest:.2f} are safe"
    if best.memory.host_bytes:
        yield "host", f"{shown_bytes(best.memory.host_bytes)} per rank"
    batch = f"{counted(best.ranked.layout.global_batch, 'sequence')} of {plan.setup.profile.seq_len:,} tokens per step"
    lengths = f" (each with {settings.max_completion_length:,} generated tokens)" if best.engine else ""
    # Which models are in memory in which phase depends on the trainer.
    trl = "TRL 1.16"
    if plan.name in WITH_PROCESSES:
        trl = "TRL 1.15 and later; others: --rollout trainer=verl or openrlhf"
    elif METHODS[plan.name].head is None:
        trl = "GRPO in TRL with critic and reward model, since TRL 1.16 has no PPO"
    other = " (FSDP 1, the default; or fsdp2)" if settings.strategy == "fsdp" else ""
    trainer = {
        "trl": trl,
        "verl": f"verl {settings.trainer_release} with strategy={settings.strategy}{other}",
        "openrlhf": "OpenRLHF with --train.colocate_all and --ds.packing_samples",
    }[settings.trainer]
    yield "assumed", f"{batch}{lengths}; all have the full length; the phases are those of {trainer}"
    for path in plan.written:
        yield "written", str(path)
    if best.fits and plan.files:
        names = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
        yield "next", plan.command or f"--write DIR writes {plan.files} for {names[settings.trainer]}"
