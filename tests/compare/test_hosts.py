"""Processes of a row on other hosts: an `ssh` that runs on this one what it is told to run there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import zerofit as zf
from zerofit.app.comparing.on_host import order
from zerofit.app.comparing.processes import ON_HOST
from zerofit.spec.errors import UserError


def test_a_row_on_a_host(tmp_path, cache, monkeypatch):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ZEROFIT_MARK", "kept")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    run = zf.Run(model="mlp", data="digits", global_batch=16, steps=8, output=tmp_path / "out")
    compared = zf.compare_strategies(run, strategies=["single"], hostfile=tmp_path / "hosts")
    (row,) = compared.rows
    assert row.status == "ok", row
    assert compared.about["hosts"] == [("127.0.0.1", 1)] and compared.about["ranks"] == 1
    assert "-- 127.0.0.1 " in (tmp_path / "asked").read_text()
    assert b'"ZEROFIT_MARK": "kept"' in order(tmp_path, "cpu", 1, {})
    with pytest.raises(UserError, match="2 ranks, but 1 slots in the hostfile"):
        zf.compare_scaling(run.model_copy(update={"ranks": 2}), hostfile=tmp_path / "hosts")


def test_a_host_without_the_folder_says_so(tmp_path):
    asked = order(tmp_path / "elsewhere", "cpu", 1, {"MASTER_ADDR": "127.0.0.1"})
    done = subprocess.run([sys.executable, "-P", "-m", ON_HOST], input=asked, capture_output=True)
    assert done.returncode == 1
    assert b"must be on a file system that all hosts share" in done.stderr
