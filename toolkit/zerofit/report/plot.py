"""Loss, throughput and memory of one or more runs in one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.run_folder import RunFolder

PICTURES = (".png", ".pdf", ".svg")


def draw(runs: list[Path], out: Path) -> dict[str, Any]:
    """Draw the runs into a PNG. Raises UserError naming every folder that holds no metrics, or an unwritable file."""
    problems = Problems()
    histories = {str(run): _read(run, problems) for run in runs}
    if out.is_dir() or not out.absolute().parent.is_dir():
        problems.add("bad-value", f"{out} cannot be written", "name a PNG in an existing folder", "--out")
    if out.suffix.lower() not in PICTURES:
        problems.add("bad-value", f"{out} is not a picture", f"end its name in {', '.join(PICTURES)}", "--out")
    problems.raise_if_any()
    figure = _figure(histories, {str(run): _evaluations(run) for run in runs})
    try:
        figure.savefig(out, dpi=120)
    except OSError as error:
        raise UserError(Problem(kind="unwritable", message=f"cannot write {out}: {error}", where="--out")) from None
    return {"picture": str(out), "runs": {name: len(steps) for name, steps in histories.items()}}


def _read(run: Path, problems: Problems) -> list[dict[str, Any]]:
    path = RunFolder(run).metrics
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        problems.add("no-metrics", f"{run} holds no readable metrics.jsonl: {error}", "name run folders", str(run))
        return []
    if not steps:
        problems.add("no-metrics", f"{path} is empty: the run made no step", "name run folders", str(run))
    return steps


def _evaluations(run: Path) -> list[dict[str, Any]]:
    path = RunFolder(run).events
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in events if event["event"] == "eval"]


def _figure(histories: dict[str, list[dict[str, Any]]], evaluations: dict[str, list[dict[str, Any]]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    loss, rate, memory = figure.subplots(3, 1, sharex=True)
    text = all(steps[0]["tokens_per_s"] for steps in histories.values())
    key = "tokens_per_s" if text else "samples_per_s"
    for name, steps in histories.items():
        label, x = Path(name).name, [s["step"] for s in steps]
        (line,) = loss.plot(x, [s["loss"] for s in steps], label=label, linewidth=1)
        evals = evaluations[name]
        if evals:
            marks = {"marker": "o", "linestyle": "--", "color": line.get_color(), "label": f"{label} (validation)"}
            loss.plot([e["step"] for e in evals], [e["loss"] for e in evals], **marks)
        rate.plot(x, [s[key] for s in steps], label=label, linewidth=1)
        memory.plot(x, [s["memory_bytes"] / 2**30 for s in steps], label=label, linewidth=1)
    loss.set_ylabel("loss (nats)")
    rate.set_ylabel("tokens / s" if text else "samples / s")
    memory.set_ylabel("memory of rank 0 (GiB)")
    memory.set_xlabel("optimizer step")
    for axes in (loss, rate, memory):
        axes.grid(alpha=0.3)
    for axes in (rate, memory):
        axes.set_ylim(bottom=0)
    loss.legend(fontsize=8)
    return figure
