"""Trials of a tuning in one picture: forecast against measured step times, and the best after each trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_trials(trials: list[dict[str, Any]], out: Path) -> None:
    """Draw into a PNG; `trials` as `zerofit tune --json` gives them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    times, best = figure.subplots(1, 2)
    good = [(n, t) for n, t in enumerate(trials, start=1) if t["status"] == "ok"]
    for number, trial in good:
        times.plot(trial["forecast_step_s"], trial["measured_step_s"], "o", color=f"C{trial['zero_stage']}")
        times.annotate(str(number), (trial["forecast_step_s"], trial["measured_step_s"]), fontsize=8)
    ends = [value for _, t in good for value in (t["forecast_step_s"], t["measured_step_s"])]
    times.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color="gray")
    times.set(xscale="log", yscale="log", xlabel="forecast step time (s)", ylabel="measured step time (s)")
    rates = {n: t["global_batch"] / t["measured_step_s"] for n, t in good}
    most = [max(rate for m, rate in rates.items() if m <= n) for n in rates]
    best.step(list(rates), most, where="post")
    best.plot(list(rates), list(rates.values()), "o")
    for number, trial in enumerate(trials, start=1):
        if trial["status"] != "ok":
            best.axvline(number, color="gray", linestyle=":")
            best.annotate(trial["status"], (number, min(rates.values())), fontsize=8, rotation=90)
    best.set(xlabel="trial", ylabel="samples a second; line: the best so far")
    figure.savefig(out, dpi=120)
