"""The same comparison on a GPU: one real rank under torch's own counters, beside the simulation of that GPU.

`python -m benchmarks.meter.cuda TARGET.json ANSWER.json` is that rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.simulate.record import SimulationTarget

from .configurations import target
from .pool import ROOT, Ranks
from .report import surroundings

ALLOCATED_MOST, RESERVED_MOST = 0.01, 0.03  # errors
TIMEOUT_S = 900
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "image_size": 224},
    "vit": {"model": "vit-b-16-hf", "image_size": 224},
    "bert": {"model": "bert-large", "seq_len": 512},
    "gpt2": {"model": "gpt2", "seq_len": 1024},
    "llama-1b": {"model": "llama-3.2-1b", "seq_len": 2048},
    "llama-8b": {"model": "llama-3.1-8b", "seq_len": 4096},
}
# as in `configurations`; what does not fit into the GPU by our own simulation is left out, and said
NAMES = [
    f"{model} {layout} x1"
    for model in MODELS
    for layout in (
        "zero0 fp32 mb2",
        "zero0 bf16 mb8",
        "zero1 bf16 mb2 ga2",
        "zero2 bf16 mb8 ckpt",
        "zero2 bf16 mb2 offload",
        "zero3 bf16 mb2",
        "zero3 bf16 mb8 ckpt offload-all",
    )
]


class DeviceMeter:
    """torch's own count of the current GPU's memory (`zerofit.simulate.phases.MemoryMeter`)."""

    def __init__(self) -> None:
        self.reserved_bytes = 0  # the most so far

    def live(self) -> int:
        """Bytes alive now, rounded up by the allocator."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Most bytes alive since the last reset."""
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Begin to look for a new peak."""
        self.peak()
        torch.cuda.reset_peak_memory_stats()


def measure(asked: SimulationTarget) -> dict[str, Any]:
    """Train the only rank for real in this process: its phases, and the most that was reserved."""
    from zerofit.simulate.phases import PhaseLog, empty_batches, start, train_steps
    from zerofit.train import process_group

    process_group.start(timedelta(seconds=TIMEOUT_S))
    meter = DeviceMeter()
    log = PhaseLog(meter)
    driver = start(asked.job, 0, asked.inputs, log)
    train_steps(driver, empty_batches(asked.job, asked.inputs), asked.steps, log)
    return {"phases": [asdict(phase) for phase in log.done], "reserved_bytes": meter.reserved_bytes}


def compare(name: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Real and simulated figures of one configuration, bytes. Raises RuntimeError where the real rank fails."""
    asked = target(name, MODELS)
    simulated = ranks.simulated_rank(asked)
    found = {"name": name, "simulated": _figures(simulated)}
    if simulated["reserved_bytes"] > 0.95 * asked.device_bytes:
        return found
    files = folder / "target.json", folder / "answer.json"
    files[0].write_text(json.dumps(asked.as_dict()))
    machine = this_machine()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place = {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    env = environment(machine.accelerator, machine.cores, 1) | alone | place
    build_ops(needed_ops(asked.job.ds_config, machine), env, ranks.show)
    ranks.show("training")
    argv = [sys.executable, "-m", "benchmarks.meter.cuda", *map(str, files)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return found | {"real": _figures(json.loads(files[1].read_text()))}


def _figures(answer: dict[str, Any]) -> dict[str, int]:
    peak = max(phase["peak_bytes"] for phase in answer["phases"] if phase["step"] >= 0)
    return {"allocated_bytes": peak, "reserved_bytes": answer["reserved_bytes"]}


def main(out: Path | None) -> int:
    """All configurations on this machine's first GPU; 0, or 1 where an error is above its limit."""
    if not torch.cuda.is_available():
        raise SystemExit("--cuda needs a CUDA device, and there is none")
    found: list[dict[str, Any]] = []
    with Progress() as progress, tempfile.TemporaryDirectory() as folder, Ranks(Path(folder)) as ranks:
        bar = progress.add_task("", total=len(NAMES))
        for name in NAMES:
            ranks.show = lambda text, name=name: progress.update(bar, description=f"{name}: {text}")
            try:
                found.append(compare(name, ranks, Path(folder)))
            except RuntimeError as error:
                progress.print(f"{name}: {error}", markup=False)
            progress.advance(bar)
    Console().print(_table(found))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        everything = surroundings() | {"device": torch.cuda.get_device_name(0), "configurations": found}
        (out / "memory-accuracy-cuda.json").write_text(json.dumps(everything, indent=1) + "\n")
    return 0 if all(_within(one) for one in found if "real" in one) else 1


def _errors(one: dict[str, Any]) -> tuple[float, float]:
    """Of allocated and of reserved memory."""
    allocated, reserved = (one["simulated"][k] / one["real"][k] - 1 for k in ("allocated_bytes", "reserved_bytes"))
    return allocated, reserved


def _within(one: dict[str, Any]) -> bool:
    return all(abs(e) <= most for e, most in zip(_errors(one), (ALLOCATED_MOST, RESERVED_MOST), strict=True))


def _table(found: list[dict[str, Any]]) -> Table:
    made = Table("configuration", "allocated GB", "error", "reserved GB", "error")
    for one in found:
        if "real" not in one:
            made.add_row(one["name"], "does not fit by simulation")
            continue
        real, errors = one["real"], [f"{100 * e:+.2f} %" for e in _errors(one)]
        sizes = [f"{real[k] / 1e9:.2f}" for k in ("allocated_bytes", "reserved_bytes")]
        made.add_row(one["name"], sizes[0], errors[0], sizes[1], errors[1])
    return made


if __name__ == "__main__":
    wanted = SimulationTarget.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(measure(wanted)))
    os._exit(0)  # not by way of DeepSpeed's exit handlers
