"""Launchers of other people's that start `zerofit train`, a rank's death under them, and what comes of it.

Used by tests and by benchmarks/launchers.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
LOCAL = {  # without what starts it: the launchers that need no hosts or daemons
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", "-m", "zerofit"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--module", "zerofit"],
    "accelerate": [str(BIN / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2", "-m", "zerofit"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", str(BIN / "zerofit")],
}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # hosts that are made of one machine do not share its cores by themselves
SRUN = ["srun", "-n", "2", str(BIN / "zerofit")]
START_S = 600.0  # of two ranks on cores that are busy otherwise


def missing(name: str) -> str:
    """Which program of a launcher is not installed; empty where it is."""
    program = LOCAL[name][0]
    return "" if shutil.which(program) else f"not installed: {program}"


@dataclass
class Start:
    """One start of a launcher in a folder, whose output goes to a file there."""

    argv: list[str]
    place: Path
    output: Path | None = None  # the run folder, where --output names one
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self.log = self.place / "launcher.out"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv, cwd=self.place, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def run(self) -> Path:
        """The run folder; that of no file while it is not there."""
        return self.output or next(self.place.glob("runs/*"), self.place / "runs")

    @property
    def text(self) -> str:
        """What launcher and ranks have printed."""
        return self.log.read_text(errors="replace")

    def steps(self) -> list[int]:
        """The steps that are recorded."""
        metrics = self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def after(self, step: int) -> None:
        """Wait for a step."""
        deadline = time.monotonic() + START_S
        while (self.steps() or [0])[-1] < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def kill(self, rank: int) -> None:
        """Kill a rank, as the kernel does where memory is short."""
        workers = self.workers()
        workers[rank].send_signal(signal.SIGKILL)

    def workers(self) -> dict[int, psutil.Process]:
        """The ranks' processes."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cmdline()[-2:] == ["zerofit.worker", str(self.run)]:
                    found[int(process.environ()["RANK"])] = process
        return found

    def wait(self) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.text) from None

    def faults(self) -> list[dict[str, Any]]:
        """What went wrong, as the run folder has it."""
        path = self.run / "logs" / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self) -> dict[str, Any]:
        """The result of a run that came to its end."""
        return json.loads((self.run / "result.json").read_text())
