"""How fast checkpoints are written and read, against plain `torch.save` and `torch.load` of the same bytes.

Each rank builds a GPT-2 under ZeRO 2 and trains two steps. Then, in turns: (a) every rank writes all tensors of its
share of the checkpoint with one plain `torch.save`, and syncs the file; (b) zerofit saves: the same tensors through
DeepSpeed, synced, hashed, with a manifest, made visible; (c) zerofit saves in the background, of which only the time
for which training stands still counts. Reading: `torch.load` of a plain file with what the rank reads against
`zerofit.train.restore` (which also puts everything into the engine). Medians over the rounds, on one
machine in one call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port, launcher
from zerofit.spec.local_machine import versions
from zerofit.spec.run import load_run
from zerofit.spec.run_folder import Job, RunFolder, Start

MODEL = {"n_embd": 512, "n_layer": 16, "n_head": 8, "vocab_size": 512}
ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", type=Path, help="folder to write in (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        return rank_main(RunFolder(asked.rank_of), asked.rounds)
    with tempfile.TemporaryDirectory(dir=asked.place) as place:
        folder = prepared(asked.ranks, Path(place) / "run")
        argv = [*launcher(asked.ranks, free_port()), "--module", "benchmarks.checkpoint_bandwidth"]
        argv += ["--rounds", str(asked.rounds), "--rank-of", str(folder.path)]
        machine = this_machine()
        env = environment(machine.accelerator, machine.cores, asked.ranks) | {"PYTHONPATH": str(ROOT)}
        subprocess.run(argv, check=True, cwd=ROOT, env=env)
        figures = json.loads((folder.path / "figures.json").read_text())
    about = {"date": datetime.date.today().isoformat(), "versions": versions(), "cpu_cores": os.cpu_count()}
    text = json.dumps({**about, "ranks": asked.ranks, "model": MODEL, **figures}, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")
    return 0


def prepared(ranks: int, output: Path) -> RunFolder:
    """A run folder with a job that nobody has started."""
    from zerofit.app.training.train import prepare
    from zerofit.spec.events import Reporter

    options = {"model": "gpt2", "model_args": MODEL, "data": "synthetic:512", "seq_len": 32, "micro_batch": 1}
    asked = load_run(
        None, {**options, "steps": 2, "ranks": ranks, "ds_config": "zero2", "output": output, "save_every": "0"}
    )
    return prepare(asked, Reporter()).folder


def rank_main(folder: RunFolder, rounds: int) -> int:
    """What one rank does."""
    from zerofit.train.process_group import start, stop

    start(timeout=timedelta(minutes=10))
    import torch.distributed as dist

    figures = measured(Job.read(folder), folder, rounds)
    if dist.get_rank() == 0:
        (folder.path / "figures.json").write_text(json.dumps(figures))
    stop()
    return 0


def measured(job: Job, folder: RunFolder, rounds: int) -> dict[str, Any]:
    """Medians of seconds, and ratios."""
    import torch
    import torch.distributed as dist

    from zerofit.checkpoint import safe_load
    from zerofit.checkpoint.store import Store
    from zerofit.data.opening import open_data
    from zerofit.spec.events import Reporter
    from zerofit.spec.files import sync_file
    from zerofit.spec.mesh import coords_of
    from zerofit.train.callbacks import EventLog
    from zerofit.train.engines import ZeroTrainer
    from zerofit.train.heartbeat import RankProgress
    from zerofit.train.restore import resume
    from zerofit.train.saver import Saver

    data = open_data(job.run, job.facts.task, job.run.seq_len, Reporter())
    driver = ZeroTrainer(job, coords_of(dist.get_rank(), job.layout), data.inputs)
    tokens = torch.arange(33).reshape(1, -1) % 512
    for _ in range(2):
        driver.train_step(iter([{"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "weight": 1.0 / 32}]))
    saver, store = Saver(driver, data.inputs, folder, EventLog(None, RankProgress())), Store(folder.checkpoints)
    assert saver.save(1, {}, False) is None
    first = next(entry for entry in store.entries())
    mine = [f for f in first.path.rglob("*.pt") if written_by(dist.get_rank(), f.name)]
    same = {f.name: safe_load.load(f, mmap=False, for_engine=True) for f in mine}  # the same bytes as this rank's files
    read = [f for f in first.path.rglob("*.pt") if read_by(dist.get_rank(), f.name)]
    plain, plain_read = (folder.path / f"plain-{what}-{dist.get_rank()}.pt" for what in ("written", "read"))
    torch.save({f.name: safe_load.load(f, mmap=False, for_engine=True) for f in read}, plain_read)

    def plain_save() -> None:
        torch.save(same, plain)
        sync_file(plain)

    times: dict[str, list[float]] = {}
    for step in range(2, 2 + 2 * rounds, 2):
        note(times, "plain_save_s", plain_save)
        note(times, "save_s", partial(saver.save, step, {}, False))
        note(times, "stall_s", partial(saver.save, step + 1, {}, True))
        saver.wait()
        note(times, "plain_load_s", partial(torch.load, plain_read, weights_only=False))
        newest = store.entries()[-1]
        begin = Start(checkpoint=str(newest.path), step=newest.step, samples=0, same_layout=True)
        note(times, "load_s", partial(resume, driver, begin, print))
    medians = {name: statistics.median(all_times[1:] or all_times) for name, all_times in times.items()}
    assert first.manifest
    gib = first.manifest.total_bytes / 2**30
    shutil.rmtree(folder.checkpoints) if dist.get_rank() == 0 else None
    return {
        "checkpoint_gib": gib,
        "medians": medians,
        "save_gib_per_s": gib / medians["save_s"],
        "save_against_torch_save": medians["plain_save_s"] / medians["save_s"],
        "load_against_torch_load": medians["plain_load_s"] / medians["load_s"],
        "stall_of_blocking_save": medians["stall_s"] / medians["save_s"],
        "all": times,
    }


def written_by(rank: int, name: str) -> bool:
    """Whether this rank has written a file of a ZeRO checkpoint."""
    return f"zero_pp_rank_{rank}_" in name or name == f"rank-{rank:05}.pt" or (rank == 0 and name.startswith("mp_rank"))


def read_by(rank: int, name: str) -> bool:
    """Whether this rank reads a file of a ZeRO checkpoint when it goes on: the model's, and its own."""
    return written_by(rank, name) or name.startswith("mp_rank")


def note(times: dict[str, list[float]], name: str, work: Callable[[], Any]) -> None:
    """Seconds until all ranks have done it."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    work()
    dist.barrier()
    times.setdefault(name, []).append(time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
