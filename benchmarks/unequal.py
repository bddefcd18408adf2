"""Parameter servers on unequal ranks: at which inequality does it pay to wait for nobody?

    python benchmarks/unequal.py                 # on a virtual clock: minutes, the same figures on every machine
    python benchmarks/unequal.py --processes     # some of it also in real processes, to hold the clock against

An mlp on scikit-learn's digits. A step of an even rank takes 0.05 s (`PACE_S`) and messages take none. On
the virtual clock every gradient is computed on the weights that its worker had at that time; only the waiting is not
waited for. Results are kept: what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zerofit.app.comparing.processes import one_server, run_job
from zerofit.app.comparing.rows import StrategyRow, strategy_row
from zerofit.compare.benchmark_task import PACE_S, STRAGGLER, BenchmarkTask, pause_s
from zerofit.compare.job import STRATEGIES, CompareJob
from zerofit.compare.strategies.parameter_server import gradients, set_gradients
from zerofit.spec.files import write_json

OUT = Path(__file__).parent / "results" / "unequal"
NAMES = ("parameter-server", "parameter-server-async", "parameter-server-ssp", "backup-workers")
RANKS, FACTORS, CHANCES = (2, 4), (1.0, 1.5, 2.0, 4.0, 8.0), (0.05, 0.2)
REAL = (1.0, 4.0)  # factors of --processes
JOB = CompareJob(strategy="", model="mlp", data="digits", global_batch=64, steps=60, lr=0.05, target=0.9)


def cases(seeds: int) -> Iterator[CompareJob]:
    """Yield every job, all of one seed before the next."""
    for seed in range(seeds):
        for ranks in RANKS:
            for factor, chance in [*((f, 0.0) for f in FACTORS), *((1.0, p) for p in CHANCES)]:
                for name in NAMES:
                    slow = {str(ranks - 1): factor}
                    yield replace(JOB, strategy=name, ranks=ranks, slow=slow, straggle=chance, seed=seed)


def key_of(job: CompareJob) -> str:
    """Return a job's name in the results."""
    factor = max(job.slow.values())
    return f"{job.strategy} ranks {job.ranks} slow {factor:g} straggle {job.straggle:g} seed {job.seed}"


@one_server()
def measured(job: CompareJob) -> StrategyRow:
    """Return the row of a job in real processes."""
    strategy = STRATEGIES[job.strategy]
    with tempfile.TemporaryDirectory() as folder:
        reports = run_job(job, Path(folder) / "row", lambda _: None)
    return strategy_row(strategy, job, reports, 0.0)


class VirtualRun:
    """A server and its workers in one process: who is done next pushes next."""

    def __init__(self, work: BenchmarkTask, job: CompareJob):
        """Take the work of the job's seed, which all strategies share."""
        self.work, self.job, self.name = work, job, job.strategy
        self.model, self._worker, self.ranks = work.model(), work.model(), job.ranks
        self._optimizer = work.optimizer(self.model.parameters())
        self._alone = self.name in ("parameter-server-async", "parameter-server-ssp")  # each gradient is a step
        if self._alone:
            self._optimizer.param_groups[0]["lr"] /= self.ranks
        options = STRATEGIES[self.name].options
        self._needed = self.ranks - options.get("spare", 0)
        self._bound = options.get("bound", math.inf)
        self._pulled = [(self._weights(), 0)] * self.ranks  # weights and version of each worker
        self._clocks, self._done = [0] * self.ranks, [0] * self.ranks  # accepted gradients, and all
        self._parts, self._early, self._held = list[Tensor](), list[int](), list[int]()
        self.version, self.staleness, self.dropped = 0, list[int](), 0
        self._queue: list[tuple[float, int]] = []

    def run(self) -> dict[str, Any]:
        """Train until all steps are done; the accuracy is looked at after each global batch up to the target."""
        for worker in range(self.ranks):
            self._start(worker, 0.0)
        reached, now, each = None, 0.0, self.ranks if self._alone else 1
        while self._queue and self.version < self.job.steps * each:
            now, worker = heapq.heappop(self._queue)
            before = self.version
            self._push(worker, now)
            looks = self.version > before and self.version % each == 0 and reached is None
            if looks and (self.work.evaluate(self.model)["accuracy"] or 0.0) >= (self.job.target or 1.0):
                reached = (now, self.version // each)
        about = {name: getattr(self.job, name) for name in ("strategy", "ranks", "straggle", "seed")}
        return {
            **about,
            "slow": max(self.job.slow.values()),
            "seconds_to_target": reached and round(reached[0], 3),
            "steps_to_target": reached and reached[1],
            "seconds": round(now, 3),
            "accuracy": self.work.evaluate(self.model)["accuracy"],
            "staleness": statistics.mean(self.staleness) if self._alone else None,
            "most_stale": max(self.staleness) if self._alone else None,
            "dropped": self.dropped if self.name == "backup-workers" else None,
        }

    def _start(self, worker: int, now: float) -> None:
        """Let a worker begin its next gradient, on the weights of this moment."""
        self._pulled[worker] = (self._weights(), self.version)
        heapq.heappush(self._queue, (now + pause_s(self.job, worker, self._done[worker]), worker))

    def _push(self, worker: int, now: float) -> None:
        gradient, of = self._gradient(worker), self._pulled[worker][1]
        self._done[worker] += 1
        if self._alone:
            self.staleness.append(self.version - of)
            self._step([gradient])
            self._clocks[worker] += 1
            self._held += [worker] if self._clocks[worker] < self.job.steps else []
            free = [one for one in self._held if self._clocks[one] - min(self._clocks) <= self._bound]
            self._held = [one for one in self._held if one not in free]
        elif of < self.version:
            self.dropped, free = self.dropped + 1, [worker]
        else:
            self._parts.append(gradient)
            self._early.append(worker)
            free = []
            if len(self._early) == self._needed:
                self._step(self._parts)
                free, self._parts, self._early = self._early, [], []
        for one in free:
            self._start(one, now)

    def _gradient(self, worker: int) -> Tensor:
        vector_to_parameters(self._pulled[worker][0], self._worker.parameters())
        size, step = self.job.global_batch // self.ranks, self._done[worker]
        x, y = self.work.batch(step * self.job.global_batch + worker * size, size)
        self._worker.zero_grad()
        self.work.loss(self._worker(x), y).backward()
        return gradients(self._worker)

    def _step(self, parts: Sequence[Tensor]) -> None:
        set_gradients(self.model, torch.stack(list(parts)).mean(0))
        self._optimizer.step()
        self.version += 1

    def _weights(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians over the seeds, for each number of ranks, inequality and strategy."""
    found = []
    for case in dict.fromkeys((r["ranks"], r["slow"], r["straggle"], r["strategy"]) for r in rows):
        mine = [r for r in rows if (r["ranks"], r["slow"], r["straggle"], r["strategy"]) == case]
        one = dict(zip(("ranks", "slow", "straggle", "strategy"), case, strict=True)) | {"runs": len(mine)}
        for name in ("seconds_to_target", "steps_to_target", "accuracy", "staleness", "most_stale", "dropped"):
            known = [r[name] for r in mine if r[name] is not None]
            one[name] = [statistics.median(known), min(known), max(known)] if known else None
        one["reached"] = sum(r["seconds_to_target"] is not None for r in mine)
        found.append(one)
    return sorted(found, key=lambda one: (one["ranks"], one["straggle"], one["slow"], NAMES.index(one["strategy"])))


def time_of(found: Sequence[dict[str, Any]], name: str, ranks: int, slow: float, straggle: float) -> float | None:
    """Return the median seconds to the target; None where a seed missed it."""
    case = {"strategy": name, "ranks": ranks, "slow": slow, "straggle": straggle}
    one = next((one for one in found if case.items() <= one.items()), None)
    return one["seconds_to_target"][0] if one and one["reached"] == one["runs"] else None


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown: medians of the seconds to the target, of accuracy and of staleness."""
    names = ("ranks", "slow rank", "straggle", "synchronous", "asynchronous", "bounded (SSP)", "backup", "async gains")
    names += ("accuracy at the end, in this order", "staleness of async, SSP (most)")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for ranks, slow, straggle in dict.fromkeys((one["ranks"], one["slow"], one["straggle"]) for one in found):
        times = [time_of(found, name, ranks, slow, straggle) for name in NAMES]
        mine = [one for one in found if (one["ranks"], one["slow"], one["straggle"]) == (ranks, slow, straggle)]
        cells = [str(ranks), f"x{slow:g}", f"{straggle:.0%}", *(f"{t:.2f} s" if t else "not reached" for t in times)]
        cells.append(f"{times[0] / times[1]:.2f}" if times[0] and times[1] else "-")
        cells.append(", ".join(f"{one['accuracy'][0]:.1%}" for one in mine))
        stale = [one for one in mine if one["staleness"]]
        cells.append(", ".join(f"{one['staleness'][0]:.2f} ({one['most_stale'][0]:.0f})" for one in stale))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw seconds to the target against the inequality, for each number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(
        f"seconds to {JOB.target:.0%} accuracy: mlp on digits, median and range over the seeds", fontsize=11
    )
    grid = figure.subplots(2, len(RANKS), squeeze=False)
    kinds = (("slow", "one rank's steps take so many times as long"), ("straggle", "chance of a step to take 5 times"))
    for line, (axis, words) in enumerate(kinds):
        for column, ranks in enumerate(RANKS):
            axes = grid[line][column]
            for name, color in zip(NAMES, ("#332288", "#CC6677", "#117733", "#DDCC77"), strict=True):
                other = {"straggle": 0.0} if axis == "slow" else {"slow": 1.0}
                case = {"strategy": name, "ranks": ranks, **other}
                mine = [one for one in found if case.items() <= one.items() and one["seconds_to_target"]]
                times = [one["seconds_to_target"] for one in mine]
                spread = [[m - low for m, low, _ in times], [high - m for m, _, high in times]]
                at = [one[axis] for one in mine]
                axes.errorbar(at, [t[0] for t in times], spread, fmt="o-", color=color, label=name, capsize=2)
            if axis == "slow":
                axes.set_xscale("log", base=2)
                axes.set_xticks(FACTORS, [f"{f:g}" for f in FACTORS])
            axes.set(xlabel=words, ylabel="seconds", title=f"{ranks} ranks", ylim=(0, None))
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Measure what is missing, keeping each result, and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", action="store_true", help="also in real processes: two ranks, seed 0")
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / "results.json"
    about = {name: getattr(JOB, name) for name in ("model", "data", "global_batch", "steps", "lr", "target")}
    about |= {"pace_s": PACE_S, "straggler": STRAGGLER}
    kept = json.loads(file.read_text()) if file.exists() else {}
    rows, real = (kept[name] if kept.get("about") == about else {} for name in ("rows", "processes"))
    works = {seed: BenchmarkTask(replace(JOB, seed=seed), OUT, 1) for seed in range(asked.seeds)}
    for job in cases(asked.seeds):
        if key_of(job) not in rows:
            rows[key_of(job)] = VirtualRun(works[job.seed], job).run()
            print(key_of(job), rows[key_of(job)]["seconds_to_target"], flush=True)
    if asked.processes:
        for job in cases(1):
            if job.ranks == 2 and max(job.slow.values()) in REAL and not job.straggle and key_of(job) not in real:
                row = measured(job)
                assert row.status == "ok", row.reason
                real[key_of(job)] = {"seconds_to_target": row.seconds_to_target, "accuracy": row.accuracy}
                print("processes:", key_of(job), row.seconds_to_target, flush=True)
    found = summary(list(rows.values()))
    write_json(file, {"about": about, "summary": found, "processes": real, "rows": rows})
    (OUT / "table.md").write_text(table(found))
    draw(found, OUT / "unequal.png")
    print(table(found))


if __name__ == "__main__":
    main()
