"""Rows of strategies as `zerofit compare` measures them, all with one job's folder around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofit.app.comparing.processes import one_server, run_job
from zerofit.app.comparing.rows import StrategyRow, strategy_row
from zerofit.compare.job import STRATEGIES, CompareJob


class Ranks:
    """Runs strategies; the folder also holds the single device's weights, for those that come after it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def row(self, job: CompareJob) -> StrategyRow:
        """What `zerofit compare` says of a strategy."""
        strategy = STRATEGIES[job.strategy]
        return strategy_row(strategy, job, self.words(job), 1.0)

    @one_server()
    def words(self, job: CompareJob) -> list[dict[str, Any]]:
        """What each process has left."""
        return run_job(job, self.folder / job.strategy, lambda _: None)
