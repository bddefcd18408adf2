"""Build the page sections about inference engines, reinforcement learning and trials."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.report.answers import RolloutAnswer, ServingAnswer, ShownTrial, TuneAnswer
from zerofit.report.forecasts import kind_blocks
from zerofit.report.page import Answer, Bar, Bars, Section, Tone, named, table_of
from zerofit.spec.units import shown_bytes

PHASES = {  # of a step's time
    "generate_s": "generate",
    "logprobs_s": "log-probs",
    "train_s": "train",
    "sync_s": "sync weights",
    "sleep_s": "sleep and wake",
}


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value else ""


def _answer(name: str, found: ServingAnswer | RolloutAnswer, facts: list[tuple[str, str]], summary: str = "") -> Answer:
    verdict, tone = ("Fits", "good") if found.fits else ("Does not fit", "bad")
    return Answer(name=name and named(name, found.title), verdict=verdict, tone=tone, summary=summary, facts=facts)


def serving_answer(name: str, found: ServingAnswer) -> Answer:
    """Return whether vLLM starts, and how many sequences it serves at once."""
    least, most = found.smallest_utilization, found.largest_utilization
    length = found.settings.get("max_model_len")
    facts = [
        ("KV cache", f"{found.cache_tokens:,} tokens on each GPU"),
        ("at once", f"{found.sequences:.3g} sequences of {length:,} tokens" if isinstance(length, int) else ""),
        ("safe", f"gpu_memory_utilization {least} to {most}; max_model_len up to {found.longest:,}"),
        *(("instead", remedy) for remedy in found.remedies),
    ]
    return _answer(name, found, facts, found.problem or "")


def serving_sections(found: ServingAnswer) -> Iterator[Section]:
    """Yield an engine's memory by kind, and its settings."""
    limit = f"{found.gpu}, {shown_bytes(found.device_total_bytes)}", found.device_total_bytes
    yield Section(title="Memory of a GPU", blocks=kind_blocks({"vLLM": found.breakdown}, limit))
    settings = ({"setting": key, "value": str(value)} for key, value in found.settings.items() if value is not None)
    yield Section(title="Settings of vLLM", blocks=table_of(settings, words=("value",)))


def rollout_answer(name: str, found: RolloutAnswer) -> Answer:
    """Return the best arrangement of trainer and vLLM, its step time and its highest phase."""
    best = found.arrangements[0]
    facts = [
        ("arrangement", best.name),
        ("training", best.training),
        ("highest", f"{best.highest}: {shown_bytes(best.highest_bytes)} of {shown_bytes(best.device_total_bytes)}"),
        ("step time", _seconds(best.time.get("step_s"))),
        ("sequences", f"{found.seq_len:,} tokens"),
        *(("note", finding.get("message", "")) for finding in found.findings),
    ]
    return _answer(name, found, facts)


def rollout_sections(found: RolloutAnswer) -> Iterator[Section]:
    """Yield sections: the memory of each phase, step times by phase, and all arrangements."""
    memory = [
        Bar(label=f"{row.name}: {phase}", parts=parts, text=shown_bytes(sum(parts.values())))
        for row in found.arrangements
        for phase, parts in row.phases.items()
    ]
    total = found.arrangements[0].device_total_bytes
    limit = f"{found.gpu}, {shown_bytes(total)} available", total
    yield Section(title="Memory of each phase", blocks=[Bars(bars=memory, limit=limit)])
    times = [
        Bar(
            label=row.name,
            parts={label: row.time.get(key) or 0.0 for key, label in PHASES.items()},
            text=_seconds(row.time.get("step_s")),
        )
        for row in found.arrangements
    ]
    yield Section(title="Step time by phase", blocks=[Bars(bars=times)])
    rows = (
        {
            "arrangement": row.name,
            "training": row.training,
            "highest phase": row.highest,
            "memory": shown_bytes(row.highest_bytes),
            "verdict": "fits" if row.fits else "does not fit",
        }
        for row in found.arrangements
    )
    tones: list[Tone] = ["good" if row.fits else "bad" for row in found.arrangements]
    yield Section(
        title="Arrangements", blocks=table_of(rows, words=("training", "highest phase", "verdict"), tones=tones)
    )


def tune_answer(name: str, found: TuneAnswer) -> Answer:
    """Return the fastest measured configuration, and what untried configurations may save."""
    measured = [trial for trial in found.trials if trial.measured_step_s is not None]
    best = min(measured, key=_measured, default=None)
    facts = [("configuration", best.configuration if best else ""), ("written", ", ".join(found.written))]
    saving = f"{found.regret.untried}; none saves more than {found.regret.at_most:.1%} (95 % sure)"
    facts.append(("untried", saving if found.regret.untried else ""))
    verdict = f"Best: {_seconds(found.regret.best_step_s)} per step"
    return Answer(name=name and named(name, found.title), verdict=verdict, tone="good", facts=facts)


def _measured(trial: ShownTrial) -> float:
    return trial.measured_step_s if trial.measured_step_s is not None else float("inf")


def tune_sections(found: TuneAnswer) -> Iterator[Section]:
    """Yield measured step times with their intervals, and all trials."""
    bars = [
        Bar(
            label=trial.configuration,
            parts={"measured": measured},
            text=f"{_seconds(measured)} (forecast {_seconds(trial.forecast_step_s)})",
            low=measured * (1 - (trial.spread or 0)),
            high=measured * (1 + (trial.spread or 0)),
        )
        for trial in found.trials
        if (measured := trial.measured_step_s) is not None
    ]
    note = "The line with end marks is the 95 % interval of the mean."
    yield Section(title="Measured step times", blocks=[Bars(bars=bars)], note=note)
    # Failed trials count as infinitely slow, so the table marks only a measured trial as the best.
    best = min(map(_measured, found.trials))
    rows = [
        {
            "trial": str(number),
            "configuration": trial.configuration,
            "measured": trial.status if trial.measured_step_s is None else _seconds(trial.measured_step_s),
            "+-": "" if trial.spread is None else f"{trial.spread:.1%}",
            "forecast": _seconds(trial.forecast_step_s),
            "memory": shown_bytes(trial.peak_bytes) if trial.peak_bytes else "",
            "reason": trial.reason,
        }
        for number, trial in enumerate(found.trials, start=1)
    ]
    tones: list[Tone] = [
        "bad" if t.measured_step_s is None else "good" if t.measured_step_s == best else "" for t in found.trials
    ]
    yield Section(title="All trials", blocks=table_of(rows, words=("configuration", "reason"), tones=tones))
