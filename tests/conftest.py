"""Fixtures: ranks started once a session, and a cache of this session's own."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

WHOLE_SUITE = 1000  # tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait would slow a second worker down


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token caches and the like go to a folder of this session; compiled ops stay where they are."""
    _ops_stay()
    path = tmp_path_factory.mktemp("cache")
    os.environ["ZEROFIT_CACHE"] = str(path)
    return path


def _ops_stay() -> None:
    from zerofit.launch.host import ops_folder

    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))


@pytest.fixture(scope="session", autouse=True)
def op_in_background(request: pytest.FixtureRequest) -> None:
    """Where all tests run, the op that some need is compiled on one core while others, of one process, run before."""
    _ops_stay()
    if len(request.session.items) > WHOLE_SUITE:
        threading.Thread(target=_compile, daemon=True).start()


def _compile() -> None:
    from zerofit.launch.ops import build_ops
    from zerofit.spec.errors import RunFailed

    with suppress(RunFailed):  # the tests that need it say why
        build_ops(["AsyncIOBuilder"], {**os.environ, "DS_ACCELERATOR": "cpu", "MAX_JOBS": "1"}, lambda _: None)


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory, cache: Path):
    """Pools of waiting ranks by their number, each started when it is first used."""
    from tests.ranks.pool import RankPool

    made: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return made.setdefault(ranks, RankPool(ranks, tmp_path_factory.mktemp(f"ranks-{ranks}")))

    yield pool
    for one in made.values():
        one.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
