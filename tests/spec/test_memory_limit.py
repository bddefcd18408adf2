"""The limit of a rank's memory: an error that it can report, and a control group where one may be made."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from zerofit.spec import memory_limit
from zerofit.spec.memory_limit import RESERVED_BYTES, leave_group, limit_memory
from zerofit.spec.overhead import CPU_LIBRARY_BYTES

MIB = 2**20
ASKS = """
import sys
from zerofit.spec.memory_limit import end_first, limit_memory
end_first()
limit_memory(int(sys.argv[1]), "zerofit-test")
print(open("/proc/self/oom_score_adj").read().strip(), flush=True)
kept = bytearray(int(sys.argv[2]))
"""


def asked(limit_bytes: int, more_bytes: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", ASKS, str(limit_bytes), str(more_bytes)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_an_allocation_beyond_the_limit_fails_and_one_below_it_does_not():
    done = asked(256 * MIB, 128 * MIB)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1000" or os.geteuid() != 0
    done = asked(256 * MIB, 256 * MIB + RESERVED_BYTES)
    assert done.returncode == 1 and done.stderr.strip().endswith("MemoryError")


def test_a_lower_limit_that_was_there_stays():
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (512 * MIB, 512 * MIB))

    argv = [sys.executable, "-c", ASKS, str(2**40), str(512 * MIB)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, preexec_fn=lower)
    assert done.stderr.strip().endswith("MemoryError")


def test_only_a_group_that_hands_the_controller_down_is_asked(tmp_path, monkeypatch):
    """The folders are made up: what the kernel makes of their files is its own affair (see the next test)."""
    around = tmp_path / "around"
    own = around / "own"
    own.mkdir(parents=True)
    monkeypatch.setattr(memory_limit, "control_groups", lambda controller: [tmp_path, around, own])
    monkeypatch.setattr(memory_limit.resource, "setrlimit", lambda which, limits: None)
    limit_memory(5 * MIB, "zerofit-test")
    assert not list(tmp_path.rglob("zerofit-test"))
    (around / "cgroup.subtree_control").write_text("cpu memory\n")
    limit_memory(5 * MIB, "zerofit-test")
    assert (around / "zerofit-test" / "memory.max").read_text() == str(5 * MIB + CPU_LIBRARY_BYTES)
    assert (around / "zerofit-test" / "cgroup.procs").read_text() == str(os.getpid())
    assert not leave_group("zerofit-test")
    (around / "zerofit-test" / "memory.events").write_text("max 4\noom 1\noom_kill 1\n")
    assert leave_group("zerofit-test")


@pytest.mark.skipif(not memory_limit._parents(), reason="no control group (version 2) here hands memory down")
def test_a_group_ends_what_takes_more_and_says_so():
    code = (
        "import sys, mmap\nfrom zerofit.spec.memory_limit import limit_memory\nlimit_memory(64 << 20, 'zerofit-test')\n"
    )
    code += "kept = mmap.mmap(-1, 2 << 30)\nfor at in range(0, len(kept), 4096): kept[at] = 1\n"  # not data: no rlimit
    done = subprocess.run([sys.executable, "-c", code], check=False)
    killed = leave_group("zerofit-test")
    if done.returncode == 0:
        pytest.skip("this process may make no child control group")
    assert done.returncode == -9 and killed
