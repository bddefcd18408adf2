"""`zerofit doctor` as a command."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launch.hosts import hosts, missing
from zerofit.cli.main import main
from zerofit.doctor.check import Check

KEYS = {"name", "host", "status", "value", "expected", "hint"}


def doctor(*arguments: str):
    done = CliRunner().invoke(main, ["doctor", *arguments, "--json"])
    assert done.exit_code in (0, 1, 2), done.output
    return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


def test_this_machine():
    code, answer = doctor("--quick")
    checks = answer["checks"]
    assert all(check.keys() >= KEYS and check["status"] in ("ok", "warn", "fail") for check in checks)
    assert code == int(any(check["status"] == "fail" for check in checks))
    names = {check["name"] for check in checks}
    assert {"versions", "slots", "gpus", "compiler g++", "libaio", "limit nofile", "shared-memory"} <= names
    assert {"op cpu_adam", "op async_io"} <= names and not {"disk write", "master-reachable"} & names


def test_a_host_that_is_not_there_is_a_failure(stand_in, tmp_path):
    stand_in('test "$FAKE_HOST" = b && { echo "ssh: connect to host b port 22: No route to host" >&2; exit 255; }')
    file = tmp_path / "hosts"
    file.write_text("a slots=1\nb slots=1\n")
    done = CliRunner().invoke(main, ["doctor", "--hostfile", str(file), "--quick"])
    assert done.exit_code == 1
    assert "NOT READY  1 failed" in done.stdout
    assert "No route to host" in done.stdout and "next  follow the advice" in done.stdout


def test_a_report_is_a_table_without_names(monkeypatch):
    from zerofit.cli import machine

    rows = [asdict(Check(name="gpus", host="alice-box", status="ok", value=f"{Path.home()}/a|b"))]
    monkeypatch.setattr(machine, "_examine", lambda *_, **options: {"checks": rows, "hosts": 1, **options})
    done = CliRunner().invoke(main, ["doctor", "--report"])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == r"| gpus | ok | ~/a\|b |"
    assert f"torch {version('torch')}" in done.stdout and "alice-box" not in done.stdout


def test_a_hostfile_with_errors(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=1\nb slot=1\n")
    code, answer = doctor("--hostfile", str(file))
    assert code == 2 and answer["error"]["where"] == f"{file}:2:3"
    code, answer = doctor("--hostfile", str(tmp_path / "none"))
    assert code == 2 and "cannot read the hostfile" in answer["error"]["message"]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_hosts_are_measured_together(tmp_path, monkeypatch):
    with hosts(tmp_path / "hosts", 2) as made:
        monkeypatch.setenv("PATH", made.env["PATH"])
        _, answer = doctor("--hostfile", str(made.hostfile()))
        checks = {(check["host"], check["name"]): check for check in answer["checks"]}
        assert not [check for check in answer["checks"] if check["status"] == "fail"]
        first, second = (node.name for node in made.nodes)
        for name in ("matrix products fp32", "memory bandwidth", "disk write", "disk read", "op cpu_adam"):
            assert checks[first, name]["value"] and checks[second, name]["value"]
        assert checks[first, "all-reduce between hosts"]["figure"] > 1e6
        assert 0 < checks[first, "all-reduce latency between hosts"]["figure"] < 1
        assert not made.left()
