"""Measure what `--check-loss` costs on two CPU ranks: steps with and without it take turns within one run.

    python benchmarks/check_loss_cost.py

Whatever else the machine does hits neighboring steps alike. The result is the median over pairs of neighbors of the
ratio of their times, with its quartiles. Results: benchmarks/results/check_loss_cost.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port
from zerofit.spec.events import Reporter
from zerofit.spec.run import load_run
from zerofit.spec.run_folder import Job, RunFolder

RESULTS = Path(__file__).parent / "results" / "check_loss_cost.json"
RANKS, WARM = 2, 20  # steps that are not counted
COMMON = {"ranks": RANKS, "check_loss": True, "save_every": "0"}
WORKLOADS: dict[str, dict[str, Any]] = {
    "llama of 2 layers, ZeRO-2": {
        "model": "llama-tiny",
        "data": "synthetic",
        "seq_len": 64,
        "micro_batch": 2,
        "steps": 220,
        "ds_config": "zero2",
    },
    "lenet, without ZeRO": {"model": "lenet", "data": "digits", "micro_batch": 32, "steps": 620, "ds_config": "zero0"},
}


def rank(folder: RunFolder) -> None:
    """Train on this rank, every other step without the check; rank 0 writes the ratios of neighbors."""
    import torch.distributed as dist

    from zerofit.train.process_group import start, stop
    from zerofit.train.run import RankRun
    from zerofit.train.zero_layouts import inner_optimizer

    start(timeout=timedelta(minutes=10))
    run = RankRun(Job.read(folder), folder)
    trainer, check = run.trainer, run.trainer.loss_check
    assert check
    hooks = inner_optimizer(trainer.engine)._optimizer_step_pre_hooks
    attached, times = dict(hooks), list[tuple[bool, float]]()
    for step, batches, _ in run.loop.steps():
        checked = step % 4 in (0, 3)  # each kind goes first as often
        trainer.loss_check = check if checked else None
        hooks.clear()
        hooks.update(attached if checked else {})
        dist.barrier()
        start_s = time.perf_counter()
        losses = trainer.train_step(batches)
        if checked:
            check.after_step()
        float(losses.sum())
        times.append((checked, time.perf_counter() - start_s))
    if dist.get_rank() == 0:
        pairs = [dict(times[at : at + 2]) for at in range(WARM, len(times), 2)]
        ratios = [pair[True] / pair[False] for pair in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result = {"step_s": statistics.median(pair[False] for pair in pairs), "ratio": middle, "quartiles": [low, high]}
        folder.result.write_text(json.dumps(result | {"pairs": len(pairs)}))
    stop()


def measured(options: dict[str, Any], output: Path) -> dict[str, Any]:
    """Start both ranks, and return what rank 0 wrote."""
    from zerofit.app.training.train import prepare

    folder = prepare(load_run(None, COMMON | options | {"output": output}), Reporter()).folder
    machine = this_machine()
    env = environment(machine.accelerator, machine.cores, RANKS)
    env |= {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    command = [sys.executable, __file__, "--rank", str(folder.path)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **env, "RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(RANKS)
    ]
    assert [process.wait() for process in ranks] == [0] * RANKS
    return json.loads(folder.result.read_text())


def main() -> None:
    """Measure all workloads, print the ratios, and write them."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            {"workload": name, "ranks": RANKS, "device": "cpu", **measured(options, Path(scratch) / str(number))}
            for number, (name, options) in enumerate(WORKLOADS.items())
        ]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        low, high = row["quartiles"]
        print(f"{row['workload']}: {1e3 * row['step_s']:.1f} ms, ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    rank(RunFolder(Path(sys.argv[2]))) if sys.argv[1:2] == ["--rank"] else main()
