"""Every strategy of `zerofit compare` on 1, 2 and 4 CPU ranks: how far from one device's weights, what is sent.

python -m benchmarks.same_weights [--ranks 1 2 4] [--model lenet]

Strategies that compute the same sums must end within 1e-5 of the single device. Processes are forked from one that has
imported everything, and no speed is told: neither figure here depends on what else the machine does. The same command
goes on after a kill.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.compare.ranks import Ranks
from zerofit.app.comparing.processes import one_server
from zerofit.app.comparing.rows import AGREES
from zerofit.compare.job import STRATEGIES, CompareJob
from zerofit.spec.files import write_json, write_text
from zerofit.spec.local_machine import versions

OUT = Path(__file__).parent / "results" / "same-weights"
STEPS, BATCH, LR = 30, 64, 0.05


def measure(made: Ranks, job: CompareJob) -> dict[str, Any]:
    """Return what is kept of a strategy's row."""
    least = STRATEGIES[job.strategy].least_ranks
    if job.ranks < least:
        why = f"needs {least} ranks"
        return {"strategy": job.strategy, "ranks": job.ranks, "status": "not-here", "reason": why, "synchronous": None}
    row = made.row(job)
    names = ("strategy", "status", "reason", "processes", "synchronous", "loss", "max_weight_difference", "agrees")
    kept = {name: getattr(row, name) for name in names}
    return {**kept, "ranks": job.ranks, "sent_bytes_a_step": row.comm_bytes_per_step}


def cell(row: dict[str, Any] | None) -> str:
    """Return a row's figures in a line."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return row["status"]
    sent = row["sent_bytes_a_step"]
    return f"{row['max_weight_difference']:.1e}" + (f", {sent / 1024:,.0f} KiB" if sent else "")


def table(rows: list[dict[str, Any]], counts: list[int]) -> str:
    """Return Markdown: strategies down, ranks across, the reasons below."""
    titles = [f"{count} rank{'s' * (count > 1)}" for count in counts]
    lines = ["| strategy | same sums | " + " | ".join(titles) + " |", "|---" * (len(counts) + 2) + "|"]
    for one in STRATEGIES.values():
        mine = {row["ranks"]: row for row in rows if row["strategy"] == one.name}
        figures = " | ".join(cell(mine.get(count)) for count in counts)
        lines.append(f"| `{one.name}` | {'yes' if one.synchronous else 'no'} | {figures} |")
    reasons = dict.fromkeys(f"- `{row['strategy']}`: {row['reason']}" for row in rows if row["reason"])
    return "\n".join([*lines, "", *reasons, ""])


def main() -> None:
    """Measure what is not known yet; end with an error where a synchronous strategy is farther off than 1e-5."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="lenet")
    asked = parser.parse_args()
    file, sizes = OUT / "results.json", {"steps": STEPS, "global_batch": BATCH, "lr": LR, "eval_samples": 100}
    about = {"model": asked.model, "data": "digits", **sizes}
    kept = json.loads(file.read_text()) if file.exists() else {}
    rows = kept.get("rows", []) if kept.get("about") == about else []
    with one_server(), tempfile.TemporaryDirectory() as folder:
        made = Ranks(Path(folder))
        job = CompareJob(strategy="single", model=asked.model, data="digits", **sizes)
        made.row(job)
        for count in asked.ranks:
            for name in STRATEGIES:
                if any((row["strategy"], row["ranks"]) == (name, count) for row in rows):
                    continue
                rows.append(measure(made, replace(job, strategy=name, ranks=count)))
                print(f"{count} ranks, {name}: {cell(rows[-1])}", flush=True)
                if rows[-1]["status"] == "failed":
                    print(rows.pop()["reason"])
                    continue
                OUT.mkdir(parents=True, exist_ok=True)
                write_json(file, {"about": about, "versions": versions(), "rows": rows})
    write_text(OUT / "table.md", table(rows, asked.ranks))
    apart = [row for row in rows if row["synchronous"] and row["status"] == "ok" and not row["agrees"]]
    if apart:
        raise SystemExit(
            f"farther than {AGREES:g} from one device: {[(row['strategy'], row['ranks']) for row in apart]}"
        )


if __name__ == "__main__":
    main()
