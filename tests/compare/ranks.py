"""Processes of strategies, forked from one that has imported everything: a start of their own takes seconds each."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from zerofit.app.comparing.rows import StrategyRow, strategy_row
from zerofit.compare.job import STRATEGIES, CompareJob
from zerofit.launch.host import environment
from zerofit.launch.local import free_port

PRELOADED = ["torch._dynamo", "torchvision", "deepspeed", "accelerate", "zerofit.train.engines"]
PRELOADED += ["zerofit.compare.worker"]
TIMEOUT_S = 120


class Ranks:
    """Runs strategies; the folder also holds the single device's weights, for those that come after it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def row(self, job: CompareJob) -> StrategyRow:
        """What `zerofit compare` says of a strategy."""
        strategy = STRATEGIES[job.strategy]
        words = self.words(job, strategy.processes(job.ranks))
        return strategy_row(strategy, job, words, 1.0)

    def words(self, job: CompareJob, processes: int) -> list[dict[str, Any]]:
        """What each process has left."""
        place = self.folder / job.strategy
        place.mkdir(parents=True, exist_ok=True)
        job.write(place / "job.json")
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(processes)}
        started = [
            self._context.Process(target=_run, args=(str(place), common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(TIMEOUT_S)
            process.kill()
        return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(processes)]


def _run(folder: str, env: dict[str, str]) -> None:
    import sys

    import torch

    from zerofit.compare import worker

    os.environ.update(environment("cpu", 2, 2) | env)
    torch.set_num_threads(1)
    sys.argv = ["zerofit.compare.worker", folder]
    worker.main()
