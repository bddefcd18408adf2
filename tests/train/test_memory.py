"""The memory of ranks beside its forecast, on real ranks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor, nn

from zerofit.spec.run_folder import MemoryForecast
from zerofit.train.callbacks import MeasuredMemory
from zerofit.train.memory import MemoryWatch

MIB = 2**20
MORE = 300 * MIB
AMPLE = MemoryForecast(
    phases={"step": 64 << 30},
    reserved_bytes=64 << 30,
    beside_bytes=0,
    margin_bytes=2 << 30,
    free_bytes=64 << 30,
    host_bytes=0,
    pinned_bytes=0,
    host_margin_bytes=1 << 30,
)
SHORT = replace(AMPLE, phases={"step": 64 * MIB}, reserved_bytes=64 * MIB, margin_bytes=2 * MIB)
HOW = {"data": "digits", "loss": "cross-entropy", "steps": 3, "eval_samples": 8}


class Even(nn.Module):
    """A classifier of digits that takes as much on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


class HungryOnRank1(Even):
    """One that takes more on rank 1, for a moment of its first step."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ["RANK"] == "1":
            np.ones(MORE // 8)
        return super().forward(x)


def events_of(trained, kind: str) -> list[dict]:
    return [e for e in map(json.loads, trained.folder.events.read_text().splitlines()) if e["event"] == kind]


def trained_with(pools, folder, model: type, forecast: MemoryForecast | None):
    gate = None if forecast is None else lambda *asked: forecast
    return pools(2).train(folder, model=f"{__name__}:{model.__name__}", gate=gate, **HOW)


def test_records_have_the_peak_of_the_rank_that_takes_most(pools, tmp_path):
    trained_with(pools, tmp_path / "first", Even, None)  # the ranks' peaks before it are other tests'
    even = trained_with(pools, tmp_path / "even", Even, AMPLE)
    hungry = trained_with(pools, tmp_path / "hungry", HungryOnRank1, AMPLE)
    taken = [run.steps[-1]["memory_bytes"] for run in (even, hungry)]
    assert taken[1] - taken[0] == pytest.approx(MORE, rel=0.2)
    for run in (even, hungry):
        assert [s["host_bytes"] for s in run.steps] == [s["memory_bytes"] for s in run.steps]
        assert {s["forecast_bytes"] for s in run.steps} == {AMPLE.reserved_bytes}
        assert not events_of(run, "warning")
        found = run.result["against_forecast"]
        assert set(found) == {"memory_bytes", "step_s"}
        assert found["memory_bytes"]["measured"] >= run.steps[-1]["memory_bytes"]
        assert found["memory_bytes"]["difference"] == found["memory_bytes"]["measured"] / AMPLE.reserved_bytes - 1
        assert found["step_s"]["measured"] == statistics.median(s["step_s"] for s in run.steps[1:])
        assert found["step_s"]["forecast"] is None


def test_a_run_that_leaves_its_forecast_says_so_once(pools, tmp_path):
    trained = trained_with(pools, tmp_path / "run", Even, SHORT)
    (warning,) = events_of(trained, "warning")
    assert warning["text"].startswith("step 1: a rank uses ")
    assert "more than forecast (margin: 2.00 MiB); memory of the process" in warning["text"]
    measured = trained.result["against_forecast"]["memory_bytes"]
    assert measured["forecast"] == SHORT.reserved_bytes < measured["measured"]


def test_without_a_forecast_nothing_is_held_against_it(pools, tmp_path):
    trained = trained_with(pools, tmp_path / "run", Even, None)
    assert {s["forecast_bytes"] for s in trained.steps} == {None}
    assert not events_of(trained, "warning")
    assert trained.result["against_forecast"]["memory_bytes"]["forecast"] is None


def test_what_comes_after_the_steps_counts_too():
    said: list[str] = []
    watch = MemoryWatch(SHORT, said.append)
    size = 65 * MIB
    taken = MeasuredMemory(memory_bytes=size, reserved_bytes=None, outside_bytes=None, host_bytes=size, shared_bytes=0)
    watch.look(taken, "step 2")
    assert not said
    more = taken | {"memory_bytes": size + 25 * MIB, "host_bytes": size + 25 * MIB}
    watch.look(more, "at the end of the run")
    watch.look(more, "again")
    (text,) = said
    assert text.startswith("at the end of the run: a rank uses 90.0 MiB of memory, 26.0 MiB more")


LOOK = """
import sys, mmap, torch, torch.distributed as dist
from zerofit.train.memory import RankMemory
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
memory = RankMemory(torch.device("cpu"), None)
def taken():
    return memory.most(memory.slots())["memory_bytes"]
before = taken()
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[n] for n in range(0, len(mapped), mmap.PAGESIZE))
read = taken()
tensor = torch.ones(1 << 26)
del tensor
print(read - before, taken() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own counts")
def test_pages_of_data_files_are_not_memory_that_a_rank_needs(tmp_path):
    (tmp_path / "data").write_bytes(bytes(MORE))
    argv = [sys.executable, "-c", LOOK, str(tmp_path / "data"), str(tmp_path / "store")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    read, tensor = map(int, done.stdout.split())
    assert read < 64 * MIB
    assert tensor == pytest.approx(256 * MIB, rel=0.25)
