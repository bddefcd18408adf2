"""An `ssh` that runs the remote command here, through a shell as sshd does; and true facts to doctor."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path

import pytest

from zerofit.doctor.facts import collect

# options up to "--", then the host, then the words that the remote shell reads
STAND_IN = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != -- ]; do shift; done
shift; FAKE_HOST="$1"; export FAKE_HOST; shift
{before}
exec sh -c "$*"
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put an `ssh` on PATH; `before` runs first, with $FAKE_HOST. Gives the file with the arguments it got."""
    monkeypatch.delenv("ZEROFIT_RUN", raising=False)

    def make(before: str = "") -> Path:
        folder = tmp_path / "stand-in"
        folder.mkdir()
        log = folder / "arguments"
        (folder / "ssh").write_text(STAND_IN.format(log=log, before=before))
        (folder / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return log

    return make


@pytest.fixture(scope="session")
def true_facts():
    with ExitStack() as stack:
        return collect({"compilers": True}, stack)


@pytest.fixture
def facts(true_facts):
    """A copy of this host's facts, as of a host with two H100."""
    found = copy.deepcopy(true_facts)
    gpu = {"name": "NVIDIA H100 80GB HBM3", "total_bytes": 81559 * 2**20, "used_bytes": 0, "processes": []}
    found["gpus"] = [{**gpu, "index": n, "uuid": f"GPU-{n}", "compute_capability": "9.0"} for n in range(2)]
    found["driver"], found["gpu_error"], found["strays"] = "580.82.07", None, []
    found["versions"] |= {"nccl": "2.30.7", "cuda": "13.0"}
    return copy.deepcopy(found)
