"""Fixtures: ranks started once a session, and a cache of this session's own."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ranks.pool import RankPool

MANY_FILES = 20
IDLE_S = 30
POOLS: dict[int, RankPool] = {}  # of this worker
# files of more than a minute, the longest first: one worker runs all of a file, and the workers should end together
LONGEST = Path(__file__).with_name("longest.txt").read_text().split()
SIMULATED = [f"tests/simulate/test_{name}.py" for name in ("memory", "patches", "traffic")]  # the fixture `simulated`
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait would slow a second worker down


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token caches and the like go to a folder of this worker, what is simulated to one of all; compiled ops stay."""
    from zerofit.launch.host import ops_folder, with_own_programs

    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))
    os.environ["PATH"] = with_own_programs(os.environ["PATH"])  # one ninja for all ops
    path = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    for name in ("facts", "forecasts", "profiles"):
        shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
        shared.mkdir(exist_ok=True)
        (path / name).symlink_to(shared)
    os.environ["ZEROFIT_CACHE"] = str(path)
    return path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collections of garbage do not walk through what test modules import, a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Let go of what was frozen: nanobind, in Triton, would report leaks."""
    gc.unfreeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """For many files, ops are compiled beside the tests, by the process that starts the workers."""
    config = session.config
    many = config.args_source is config.ArgsSource.TESTPATHS or len(config.args) > MANY_FILES
    if many and not config.option.collectonly and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.ranks.ops import compile_ops

        threading.Thread(target=compile_ops, daemon=True).start()


@pytest.fixture(scope="module", autouse=True)
def idle_ranks_end():
    """Ranks that no test has asked for lately give back their memory, half a GiB each and more."""
    yield
    for pool in POOLS.values():
        if pool.idle_s > IDLE_S:
            pool.close()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory, cache: Path):
    """Pools of waiting ranks by their number, each started when it is first used."""
    from tests.ranks.pool import RankPool

    def pool(ranks: int) -> RankPool:
        if ranks not in POOLS:
            POOLS[ranks] = RankPool(ranks, tmp_path_factory.mktemp(f"ranks-{ranks}"))
        return POOLS[ranks]

    yield pool
    for one in POOLS.values():
        one.close()


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's tuner end a trial once its step time is known roughly, after a second of steps."""
    from zerofit.app.tuning import tune as trials
    from zerofit.tune import trial as timings

    monkeypatch.setattr(timings, "WARM_S", 0.5)
    monkeypatch.setattr(timings, "CHUNK_S", 0.1)
    monkeypatch.setattr(trials, "SURE", 0.3)
    monkeypatch.setattr(trials, "TRAIN_S", 8.0)  # beside other tests no step time is sure for long


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any):
    """With `-n 2`, a file's tests stay on one worker, whose ranks were started for them, and files keep their order.

    Files that share simulations stay together.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "simulated" if file in SIMULATED else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that use waiting ranks come first, then long ones; what needs a GPU is skipped where there is none.

    Ranks end when they are idle for long, and each start of theirs costs seconds of CPU time.
    """
    places = {name: place for place, name in enumerate(LONGEST)}
    waiting = {item.path for item in items if "pools" in getattr(item, "fixturenames", ())}

    def place(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.relative_to(Path(__file__).parent).with_suffix("")
        return item.path not in waiting, places.get(path.as_posix(), len(LONGEST))

    items.sort(key=place)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
