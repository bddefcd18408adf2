"""DeepSpeed's own autotuner on the same job, in a folder of its own: what it comes to, or how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerofit.app.tuning.job import TuneJob
from zerofit.data.opening import open_data
from zerofit.launch.host import environment, this_machine
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.events import Reporter

PEER = Path(__file__).with_name("peer.py")
LAST = 12  # lines of what it printed, where it fails
NOISE = re.compile(r"^\[[^]]*\] *\[(INFO|WARNING)\]|^\s*$")


def autotune(job: TuneJob, ranks: int, limit_s: float) -> dict[str, Any]:
    """Run `deepspeed --autotuning tune` on this job for at most `limit_s` seconds."""
    began, batch = time.monotonic(), job.candidates[0].layout.global_batch
    with tempfile.TemporaryDirectory(prefix="zerofit-autotuner-") as place:
        config = {
            "train_batch_size": batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "autotuning": {"enabled": True, "fast": False, "max_train_batch_size": batch},
        }
        Path(place, "ds.json").write_text(json.dumps(config))
        argv = [sys.executable, "-m", "deepspeed.launcher.runner", "--autotuning", "tune", "--num_gpus", str(ranks)]
        argv += [str(PEER), *_arguments(job), "--deepspeed", "--deepspeed_config", "ds.json"]
        code, text = _run(argv, place, ranks, limit_s)
        best = _best(Path(place))
        trials = sum(1 for _ in Path(place, "autotuning_results").glob("*/ds_config.json"))
        rates = [_rate(path) for path in Path(place, "autotuning_results").glob("*/metrics.json")]
    lines = [line for line in text.replace(place, "PLACE").splitlines() if not NOISE.match(line)]
    return {
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "trials": trials,
        "measured": len(rates),
        "most_samples_per_s": max(rates, default=None),  # as it measured itself
        "best": best,
        "last_lines": [] if best else [re.sub(r"/\S*/", "", line) for line in lines[-LAST:]],
    }


def _arguments(job: TuneJob) -> list[str]:
    profile, run = next(iter(job.profiles.values())), job.run
    inputs = open_data(run, profile.task, run.seq_len, Reporter()).inputs
    args = ["--model", run.model, "--model-args", json.dumps(dict(run.model_args))]
    if isinstance(inputs, TextInputs):
        return [*args, "--seq-len", str(inputs.seq_len), "--classes", str(inputs.vocab_size)]
    assert isinstance(inputs, ImageInputs)  # AutoTuning is compared on models of images and of text
    return [*args, "--image", f"{inputs.channels}x{inputs.size}x{inputs.size}", "--classes", str(inputs.classes)]


def _run(argv: list[str], place: str, ranks: int, limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: it had to be ended) and all that it printed."""
    machine, log = this_machine(), Path(place, "log")
    with log.open("w") as out:
        process = subprocess.Popen(
            argv,
            cwd=place,
            env=environment(machine.accelerator, machine.cores, ranks),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, log.read_text(errors="replace")


def _rate(metrics: Path) -> float:
    return float(json.loads(metrics.read_text()).get("throughput", 0.0))


def _best(place: Path) -> dict[str, Any] | None:
    """The configuration that it recommends, if it got so far."""
    found = place / "autotuning_results" / "ds_config_optimal.json"
    return json.loads(found.read_text()) if found.exists() else None
