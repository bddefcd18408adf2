"""Tunings in which the favourite configuration fails in each way there is, and one that is killed itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

# a model whose time is that of its calls: the largest micro batch that does not fail is the fastest
MINE = """
import os, signal, time, torch
class Net(torch.nn.Linear):
    def __init__(self, fault):
        super().__init__(64, 10)
        self.fault, self.calls = fault, 0
    def forward(self, x):
        self.calls += 1
        if len(x) == 16 and self.training and self.calls > 5 and os.environ.get("RANK") == "1":
            if self.fault == "oom":
                raise torch.OutOfMemoryError("out of memory: tried to allocate 1.00 GiB")
            if self.fault == "crash":
                raise ValueError("no luck today")
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        return super().forward(x.flatten(1))
"""
SPACE = {"zero_stage": 1, "pp": 1, "tp": 1, "sp": 1, "micro_batch": [2, 4, 8, 16]}
SPACE |= {"overlap_comm": False, "activation_checkpointing": False}
STATUS = {"oom": "oom", "crash": "crash", "hang": "hang", "kill": "crash", "tuner killed": "ok"}


def failing(fault: str) -> dict[str, Any]:
    """One tuning; `right`: the fault is told as what it is, and the best of the other configurations has won."""
    with tempfile.TemporaryDirectory(prefix="zerofit-failing-") as folder:
        place, began = Path(folder), time.monotonic()
        (place / "mine.py").write_text(MINE)
        run = {"model": "mine:Net", "model_args": {"fault": fault}, "data": "digits", "global_batch": 32, "ranks": 2}
        (place / "run.yaml").write_text(yaml.safe_dump({**run, "heartbeat_timeout": 5}))
        (place / "space.yaml").write_text(yaml.safe_dump(SPACE))
        kept = 0
        if fault == "tuner killed":
            kept = _killed(place)
        code, out = _end(_start(place))
        answer = json.loads(out.strip().splitlines()[-1])
        seconds = round(time.monotonic() - began, 1)
    names = ("micro_batch", "status", "measured_step_s", "reason", "seconds")
    trials = [{name: row[name] for name in names} for row in answer["trials"]]
    told = {row["micro_batch"]: row["status"] for row in trials}
    winner = 16 if fault == "tuner killed" else 8
    right = code == 0 and told[16] == STATUS[fault] and answer["best"]["micro_batch"] == winner
    right &= kept >= 1 if fault == "tuner killed" else kept == 0
    return {"fault": fault, "right": right, "seconds": seconds, "known_before": kept, "trials": trials}


def _start(place: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "zerofit.cli", "tune", "run.yaml", "--space", "space.yaml", "--json"]
    argv += ["--output", "tuned", "--minutes", "8"]
    env = {**os.environ, "ZEROFIT_CACHE": str(place / "cache")}
    return subprocess.Popen(
        argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=600)
    return process.returncode, out


def _killed(place: Path) -> int:
    """Kill the tuner in the middle of its second trial; how many trials it had kept."""
    process = _start(place)
    while not list((place / "cache" / "tune").glob("*.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    time.sleep(5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(5)  # the trial's ranks notice that they are alone
    return sum(path.read_text().count("\n") for path in (place / "cache" / "tune").glob("*.jsonl"))
