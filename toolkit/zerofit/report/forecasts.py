"""Build the page sections about simulations and plans, in which results share tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from zerofit.report.answers import PlanAnswer, ShownLayout, ShownMoment, SimulationAnswer
from zerofit.report.page import (
    COLORS,
    Answer,
    Bar,
    Bars,
    Block,
    Chart,
    ChartLine,
    Section,
    Table,
    Tone,
    named,
    table_of,
)
from zerofit.spec.run_folder import layout_words
from zerofit.spec.units import counted, shown_bytes, shown_count

MOMENTS = 1500  # of each timeline, if a page has at most three
PARTS = {  # of a step's time
    "compute_s": "forward and backward",
    "gather_s": "gather parameters",
    "reduce_s": "reduce gradients",
    "tensor_s": "tensor parallel",
    "sequence_s": "sequence parallel",
    "experts_s": "experts",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "transfer_s": "offload",
}
Simulations = Mapping[str, SimulationAnswer]  # name -> simulation
Plans = Mapping[str, PlanAnswer]


def verdict_tone(verdict: str, fits: bool) -> Tone:
    """Return the tone of a verdict: "warn" for "close to the limit"."""
    return "warn" if verdict.startswith("close") else "good" if fits else "bad"


def cost(slowdown: float | None) -> str:
    """Return a forecast slowdown as text, e.g. "+5.0%"."""
    return "" if slowdown is None else f"{slowdown:+.1%}"


def simulation_answer(found: SimulationAnswer) -> Answer:
    """Return the verdict of a simulation and the figures behind it."""
    needed = found.smi_bytes or found.reserved_bytes
    summary = ""
    if needed and found.device_total_bytes:
        free = found.device_total_bytes - needed
        summary = f"needs {_part(needed, found.device_total_bytes)}, "
        summary += f"{shown_bytes(abs(free))} {'free' if free >= 0 else 'too much'}"
    facts = [
        ("peak", f"{shown_bytes(found.peak_bytes)} in {found.peak_phase}"),
        ("allocated by", " ".join(filter(None, (found.peak_at.get("module"), found.peak_at.get("line"))))),
        ("your line", found.peak_at.get("own", "")),
        ("reserved", shown_bytes(found.reserved_bytes)),
        ("outside torch", ", ".join(f"{o.name}: {_span(o.low_bytes, o.high_bytes)}" for o in found.overheads)),
        ("host, per node", _part(found.host_node_bytes, found.host_total_bytes)),
        ("layout", layout_words(found.layout)),
        ("why", found.because),
    ]
    tone = verdict_tone(found.verdict, found.fits)
    return Answer(name=found.title, verdict=found.verdict.capitalize(), tone=tone, summary=summary, facts=facts)


def _part(size: int, total: int) -> str:
    return f"{shown_bytes(size)} of {shown_bytes(total)}" if size else ""


def _span(low: int, high: int) -> str:
    return shown_bytes(low) if low == high else f"{shown_bytes(low)} to {shown_bytes(high)}"


def simulation_sections(found: Simulations) -> Iterator[Section]:
    """Yield sections: memory, ranks, changes, faults of the script, and collectives."""
    # a page with many timelines shows fewer moments of each, so that its file stays small
    timed = {name: simulation for name, simulation in found.items() if simulation.timeline}
    note = "Device memory by kind. Hover over a moment to see the module and the line that allocates."
    most = min(MOMENTS, 3 * MOMENTS // max(1, len(timed)))
    yield Section(title="Memory over time", blocks=[memory_chart(*item, most) for item in timed.items()], note=note)
    yield Section(
        title="Memory at the peak", blocks=kind_blocks({n: s.breakdown for n, s in found.items()}, _limit(found))
    )
    yield Section(title="Peak of each phase", blocks=[_phases(found)])
    stages = [
        Bar(
            label=named(name, f"rank {s.rank}"),
            parts={"peak": s.peak_bytes},
            text=f"{shown_bytes(s.peak_bytes)} in {s.peak_phase}",
        )
        for name, simulation in found.items()
        for s in simulation.stages
    ]
    yield Section(title="Ranks", blocks=[Bars(bars=stages)] if stages else [])
    yield Section(title="Changes", blocks=_changes(found), note="Each change was simulated alone.")
    for name, simulation in found.items():
        yield Section(title=named(name, "The script"), blocks=list(_script(simulation.run)))
    traffic = [
        {
            "collective": named(name, c.op),
            "phase": c.phase,
            "ranks": str(c.group_size),
            "calls": f"{c.count:,}",
            "bytes": shown_bytes(c.bytes),
        }
        for name, simulation in found.items()
        for c in simulation.comm
    ]
    yield Section(title="Collectives of a step", blocks=table_of(traffic, words=("phase",)))


def _limit(found: Simulations) -> tuple[str, float] | None:
    """Return the device and its memory; None if the simulations differ in one of them."""
    devices = {(s.device, s.device_total_bytes) for s in found.values()}
    if len(devices) != 1:
        return None
    ((device, total),) = devices
    return f"{device}, {shown_bytes(total)}", total


def memory_chart(name: str, found: SimulationAnswer, most: int) -> Chart:
    """Return the chart of memory over time, stacked by kind, with at most `most` moments."""
    moments = _thinned(found.timeline, most)
    # COLORS has the order of the stack from the bottom: kinds that stay during the run come first.
    seen = {kind for moment in moments for kind, size in moment.bytes.items() if size}
    kinds = [*(kind for kind in COLORS if kind in seen), *sorted(seen - {*COLORS})]
    starts = [(float(next(group).t), phase) for (phase, _), group in groupby(moments, key=lambda m: (m.phase, m.step))]
    return Chart(
        title=named(name, f"memory of {found.title} ({shown_bytes(found.device_total_bytes)})"),
        x=[moment.t for moment in moments],
        x_label="allocations and releases",
        y_unit="bytes",
        lines=[ChartLine(label=kind, values=[m.bytes.get(kind, 0) for m in moments], style="area") for kind in kinds],
        hints=[_hint(moment) for moment in moments],
        phases=starts,
        limit=(f"{found.device}, {shown_bytes(found.device_total_bytes)}", found.device_total_bytes),
    )


def _hint(moment: ShownMoment) -> str:
    step = f" of step {moment.step + 1}" if moment.step >= 0 else ""
    # Memory is released by Python or the allocator, not by a line of code.
    return ", ".join(filter(None, (f"in {moment.phase}{step}", moment.module, moment.at or "after a release")))


def _thinned(moments: Sequence[ShownMoment], most: int) -> list[ShownMoment]:
    """Return at most `most` moments in order of time, with all peaks."""
    # the time is divided into intervals, and each interval's moment with the most memory is chosen
    ordered = sorted(moments, key=lambda moment: moment.t)
    length = -(-len(ordered) // most) or 1
    intervals = (ordered[start : start + length] for start in range(0, len(ordered), length))
    highest = [max(interval, key=lambda moment: sum(moment.bytes.values())) for interval in intervals]
    return [next(group) for _, group in groupby(highest, key=lambda moment: moment.t)]  # each t only once on the axis


def kind_blocks(found: Mapping[str, Mapping[str, int]], limit: tuple[str, float] | None = None) -> list[Block]:
    """Return stacked bars of memory by kind, and their figures."""
    if not any(found.values()):
        return []
    totals = {name: sum(kinds.values()) for name, kinds in found.items()}
    bars = [Bar(label=name or "peak", parts=kinds, text=shown_bytes(totals[name])) for name, kinds in found.items()]
    columns = [column for name in found for column in (name or "bytes", "share")]
    rows = []
    for kind in dict.fromkeys(kind for kinds in found.values() for kind in kinds):
        sizes = {name: kinds.get(kind, 0) for name, kinds in found.items()}
        if any(sizes.values()):
            row = [kind]
            for name, size in sizes.items():
                row += [shown_bytes(size), f"{size / totals[name]:.1%}" if totals[name] else ""]
            rows.append(row)
    return [Bars(bars=bars, limit=limit), Table(columns=["kind", *columns], rows=rows)]


def _phases(found: Simulations) -> Bars:
    peaks: dict[tuple[str, str], int] = {}
    for name, simulation in found.items():
        for phase in simulation.phases:
            # A phase occurs in several steps. The bar shows the highest of them.
            key = named(name, phase.name), phase.name
            peaks[key] = max(peaks.get(key, 0), phase.peak_bytes)
    bars = [Bar(label=label, parts={"peak": size}, text=shown_bytes(size)) for (label, _), size in peaks.items()]
    return Bars(bars=bars, limit=_limit(found))


def _changes(found: Simulations) -> list[Block]:
    rows, tones = [], list[Tone]()
    for name, simulation in found.items():
        for knob in simulation.knobs:
            growth = f"{knob.peak_bytes / simulation.peak_bytes - 1:+.0%}" if simulation.peak_bytes else ""
            rows.append(
                {
                    "change": named(name, knob.change),
                    "peak": shown_bytes(knob.peak_bytes),
                    "against now": growth,
                    "reserved": shown_bytes(knob.reserved_bytes),
                    # Some changes have no formula for the step time.
                    "step time": cost(knob.slowdown) or "unknown",
                    "verdict": "fits" if knob.fits else "does not fit",
                }
            )
            tones.append("good" if knob.fits else "bad")
    return table_of(rows, tones=tones)


def _script(run: Mapping[str, object]) -> Iterator[Block]:
    """Yield the faults of a script, and how its simulation approximates it."""
    # The settings of a run have no form here, so the types of these values are checked.
    listed = {key: run.get(key) for key in ("faults", "notes")}
    rows = {
        key: [row for row in value if isinstance(row, dict)] for key, value in listed.items() if isinstance(value, list)
    }
    faults = [
        {"line": str(f.get("line", "")), "problem": str(f.get("problem", "")), "change": str(f.get("mend", ""))}
        for f in rows.get("faults", [])
    ]
    yield from table_of(faults, words=("problem", "change"))
    yield from table_of(
        {"approximation": str(n.get("text", "")), "times": str(n.get("count", ""))} for n in rows.get("notes", [])
    )


def plan_answer(found: PlanAnswer) -> Answer:
    """Return how many layouts fit, and the best layout."""
    tokens = f", {found.seq_len:,} tokens" if found.seq_len else ""
    facts = [("model", f"{shown_count(found.parameters)} parameters{tokens}")]
    if found.layouts:
        best, simplest = found.layouts[0], found.plainest
        memory = f"{shown_bytes(best.peak_bytes)} of {shown_bytes(best.device_total_bytes)} per device"
        mfu = f", MFU {best.mfu:.0%}" if best.mfu is not None else ""
        facts += [("fastest", best.layout), ("step time", _step(best))]
        facts += [("speed", f"{_speed(best)}{mfu}"), ("memory", memory)]
        # Row 0 is the fastest layout, so there is nothing to add if it is also the simplest.
        if simplest and 0 < simplest < len(found.layouts):
            row = found.layouts[simplest]
            facts += [("simplest, about as fast", f"{row.layout}: {_step(row)}")]
    else:
        facts += [("instead", remedy) for remedy in found.remedies]
    facts += [("assumed", note) for note in found.cluster.assumed]
    facts += [("note", found.padding)]
    verdict = f"None of {found.considered:,} layouts fits"
    if found.layouts:
        verdict = f"Fits: {found.fitting:,} of {counted(found.considered, 'layout')}"
    tone: Tone = "good" if found.layouts else "bad"
    return Answer(name=found.title, verdict=verdict, tone=tone, facts=facts)


def _step(row: ShownLayout) -> str:
    span = f" ({row.step_s_range[0]:.3g} to {row.step_s_range[1]:.3g} s in 8 of 10 runs)" if row.step_s_range else ""
    return f"{row.step_s:.3g} s{span}"


def _speed(row: ShownLayout) -> str:
    return f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s else f"{row.samples_per_s:,.3g} samples/s"


def plan_sections(found: Plans) -> Iterator[Section]:
    """Yield sections: a map of layouts, step times, memory, figures, and what does not fit."""
    boxes = [
        {
            "machine": named(name, f"{box.nodes} x {box.gpus} x {box.gpu}"),
            "fastest layout": box.layout.layout if box.layout else "nothing fits",
            "memory": shown_bytes(box.layout.peak_bytes) if box.layout else "",
            "step": f"{box.layout.step_s:.3g} s" if box.layout else "",
            "speed": _speed(box.layout) if box.layout else "",
            "instead": "; ".join(box.remedies),
        }
        for name, plan in found.items()
        for box in plan.boxes
    ]
    yield Section(title="Machines", blocks=table_of(boxes, words=("fastest layout", "instead")))
    drawn = {name: plan for name, plan in found.items() if plan.layouts or plan.misfits}
    note = "Memory grows to the right, speed upwards. No layout beats the dashed line in both memory and speed."
    yield Section(title="Map of layouts", blocks=[_map(*item) for item in drawn.items()], note=note)
    note = "The line with end marks is the interval around the forecast that contains 8 of 10 published figures."
    yield Section(title="Step time by part", blocks=[_step_times(plan) for plan in drawn.values()], note=note)
    memory = [
        Bars(
            bars=[
                Bar(label=named(name, r.layout), parts=r.breakdown, text=shown_bytes(r.peak_bytes)) for r in _rows(plan)
            ],
            limit=(f"device, {shown_bytes(plan.cluster.device_bytes)}", plan.cluster.device_bytes),
        )
        for name, plan in drawn.items()
    ]
    yield Section(title="Memory of each layout", blocks=memory)
    yield Section(title="Layouts", blocks=_layouts(found))
    reasons = [
        {"layouts": named(name, f"{r.count:,}"), "reason": r.message, "change": r.hint}
        for name, plan in found.items()
        for r in plan.rejections
    ]
    yield Section(title="Why others do not fit", blocks=table_of(reasons, words=("reason", "change")))
    rates = [
        {"rate": named(name, rate), "value": f"{value:.4g}", "source": plan.rate_sources.get(rate, "")}
        for name, plan in found.items()
        for rate, value in plan.rates.items()
    ]
    yield Section(title="Rates of the hardware", blocks=table_of(rates, words=("source",)))


def _rows(plan: PlanAnswer) -> list[ShownLayout]:
    return [*plan.layouts, *plan.misfits]


def _map(name: str, plan: PlanAnswer) -> Chart:
    groups = {"fits": plan.layouts, "close to the limit": plan.close, "does not fit": plan.misfits}
    # The chart has one x axis for all groups, sorted by memory. A group has None at the points of the other groups.
    points = [(row.peak_bytes, row.samples_per_s, group, row.layout) for group, rows in groups.items() for row in rows]
    points += [(point.peak_bytes, point.samples_per_s, "frontier", point.layout) for point in plan.frontier]
    points.sort()
    colors = {"frontier": "soft", "fits": "good", "close to the limit": "warn", "does not fit": "bad"}
    lines = [
        ChartLine(
            label=group,
            values=[speed if group == of else None for _, speed, of, _ in points],
            style="dashed" if group == "frontier" else "dots",
            color=f"var(--{color})",
        )
        for group, color in colors.items()
        if any(group == of for _, _, of, _ in points)
    ]
    return Chart(
        title=named(name, f"samples per second against memory of a device, {plan.title}"),
        x=[size for size, *_ in points],
        x_unit="bytes",
        x_label="peak memory of a device",
        lines=lines,
        hints=[f"{layout}: {shown_bytes(size)}, {speed:,.3g} samples/s" for size, speed, _, layout in points],
        zero=False,
    )


def _step_times(plan: PlanAnswer) -> Bars:
    bars = [
        Bar(
            label=row.layout,
            parts={name: row.time.get(key, 0.0) for key, name in PARTS.items()},
            text=f"{row.step_s:.3g} s",
            low=row.step_s_range[0] if row.step_s_range else None,
            high=row.step_s_range[1] if row.step_s_range else None,
        )
        for row in _rows(plan)
    ]
    return Bars(bars=bars)


def _layouts(found: Plans) -> list[Block]:
    rows, tones = [], list[Tone]()
    for name, plan in found.items():
        for row in (*_rows(plan), *plan.close):
            rows.append(
                {
                    "layout": named(name, row.layout),
                    "memory": shown_bytes(row.peak_bytes),
                    "host": shown_bytes(row.host_bytes) if row.host_bytes else "",
                    "step": f"{row.step_s:.3g} s",
                    "8 of 10 runs": "{:.3g} to {:.3g} s".format(*row.step_s_range) if row.step_s_range else "",
                    "speed": _speed(row),
                    "MFU": f"{row.mfu:.0%}" if row.mfu is not None else "",
                    "verdict": row.verdict,
                }
            )
            tones.append(verdict_tone(row.verdict, row.fits))
    return table_of(rows, tones=tones)
