"""What runs have reserved: counted while their process lives, less what their ranks have taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from zerofit.spec import reservations
from zerofit.spec.reservations import free_for, is_reserved, release, reserve, reserved_on_gpus, reserved_on_host

MIB = 2**20
# stands for a rank: its command line, and memory of its own
RANK = "import sys, time; kept = bytearray(b'x') * (64 << 20); print(flush=True); time.sleep(600)"
KEEPER = """
import sys, time
from pathlib import Path
from zerofit.spec import reservations
from zerofit.spec.reservations import reserve
reserve(Path(sys.argv[1]), 512 << 20, {"GPU-1": 1 << 30})
print(flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))


def started(*argv: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", *argv], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline()
    return process


def test_what_its_ranks_have_taken_is_no_longer_claimed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    reserve(run, 512 * MIB, {"GPU-0": 3, "GPU-1": 4})
    reserve(tmp_path / "other", 100, {"GPU-1": 1})
    assert reserved_on_host() == 512 * MIB + 100 and reserved_on_host(except_run=run) == 100
    assert reserved_on_gpus() == {"GPU-0": 3, "GPU-1": 5} and reserved_on_gpus(except_run=run) == {"GPU-1": 1}
    rank = started(RANK, "zerofit.worker", str(run))
    try:
        memory = psutil.Process(rank.pid).memory_info()
        assert reserved_on_host() == 512 * MIB + 100 - (memory.rss - memory.shared)
        assert reserved_on_host() < (512 - 64) * MIB
        monkeypatch.setattr(reservations, "host_memory", lambda: (0, 1000 * MIB))
        assert free_for(run) == 1000 * MIB + (memory.rss - memory.shared) - 100
        assert free_for(tmp_path / "third") == 1000 * MIB - reserved_on_host()
    finally:
        rank.kill()
        rank.wait()
    release(run)
    assert reserved_on_host() == 100 and not is_reserved(run) and is_reserved(tmp_path / "other")


def test_a_process_that_is_gone_reserves_nothing(tmp_path):
    run = tmp_path / "run"
    keeper = started(KEEPER, str(run))
    assert is_reserved(run) and reserved_on_host() == 512 * MIB and reserved_on_gpus() == {"GPU-1": 2**30}
    release(run)  # it is not this process's to give back
    assert is_reserved(run)
    keeper.kill()
    keeper.wait()
    assert not is_reserved(run) and reserved_on_host() == 0 and not reserved_on_gpus()
    assert not list(Path(tmp_path, "cache").rglob("*.json"))


@pytest.mark.root
def test_another_container_keeps_what_runs_here_have_reserved(tmp_path):
    """Its processes have other numbers, so it cannot tell whether a run here lives."""
    reserve(tmp_path / "run", 512 * MIB, {})
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    code = "from zerofit.spec.reservations import reserved_on_host; print(reserved_on_host())"
    done = subprocess.run([*argv, code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("cannot make a namespace here")
    assert done.stdout == "0\n" and reserved_on_host() == 512 * MIB


def test_what_another_user_has_left_is_not_counted(tmp_path, monkeypatch):
    keeper = started(KEEPER, str(tmp_path / "run"))
    keeper.kill()
    keeper.wait()

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert reserved_on_host() == 0


def test_a_cache_that_cannot_be_written_reserves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "file"))
    reserve(tmp_path / "run", 1, {})
    assert reserved_on_host() == 0
