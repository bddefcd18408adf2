"""Measures every configuration of a tuning: the same ranks, steps and clock as its trials, without their start-up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from zerofit.app.training.train import prepare
from zerofit.app.tuning.job import TuneJob
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port
from zerofit.spec.events import Reporter
from zerofit.spec.files import JsonlTail, number_in
from zerofit.spec.run import load_run
from zerofit.spec.run_folder import RunFolder
from zerofit.tune.trial import Candidate, Timing, timing

ROOT = Path(__file__).parents[2]
SURE = 0.02  # half the confidence interval, as a share of the mean
MOST_S, START_S = 6.0, 120.0  # of measuring; until the first step


class Sweep:
    """A server that forks ranks, and what is measured with it."""

    def __init__(self, ranks: int):
        machine = this_machine()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.regret.server", str(ranks)],
            env=environment(machine.accelerator, machine.cores, ranks) | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def measure(self, job: TuneJob, candidate: Candidate) -> Timing | str:
        """The step time of one configuration, or what its ranks died of."""
        with tempfile.TemporaryDirectory(prefix="zerofit-sweep-") as place:
            file = Path(place) / "run.yaml"
            file.write_text(yaml.safe_dump(job.trial_run(candidate), sort_keys=False), encoding="utf-8")
            folder = prepare(load_run(file, {"output": Path(place) / "run"}), Reporter()).folder
            self._ask({"folder": str(folder.path), "port": free_port()})
            found = self._watch(folder)
            ended = self._ask({"stop": True})
            return found or _why(folder, ended)

    def _watch(self, folder: RunFolder) -> Timing | None:
        metrics, times, began, first = JsonlTail(folder.metrics), list[float](), time.monotonic(), None
        while not any(folder.rank_error(rank).exists() for rank in (0, 1)):
            times += filter(None, (number_in(record, "step_s") for record in metrics.read()))
            now, found = time.monotonic(), timing(times)
            first = first or (now if times else None)
            late = now - (first or began) > (MOST_S if first else START_S)
            if found and (found.spread < SURE or (late and math.isfinite(found.spread))):
                return found
            if late and (first is None or now - first > 5 * MOST_S):
                return None
            time.sleep(0.05)
        return None

    def _ask(self, task: dict[str, Any]) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())


def _why(folder: RunFolder, ended: list[int]) -> str:
    for rank in (0, 1):
        if folder.rank_error(rank).exists():
            return json.loads(folder.rank_error(rank).read_text())["problems"][0]["message"]
    return f"exit codes {ended}" if ended else "no step time within a minute"
