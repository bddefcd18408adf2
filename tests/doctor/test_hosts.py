"""Three hosts with addresses of their own and a real sshd in each."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.launch.hosts import hosts, missing
from zerofit.doctor.check import FAIL, OK
from zerofit.doctor.preflight import PreflightRequest, preflight
from zerofit.launch.hostfile import Host, read_hostfile

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


@pytest.fixture
def three(made, monkeypatch):
    monkeypatch.setenv("PATH", made.env["PATH"])
    return made


def test_all_is_well(three, tmp_path):
    asked = PreflightRequest(run_folder=tmp_path, master_port=29555)
    start = time.perf_counter()
    found = preflight(read_hostfile(three.hostfile()), asked)
    assert time.perf_counter() - start < 20
    names = [node.name for node in three.nodes]
    assert all(check.status != FAIL for check in found.checks), found.findings
    assert found.master_address == names[0] and found.interfaces == dict.fromkeys(names, "eth0")
    assert [one["addresses"][-1]["address"] for one in found.facts.values() if one["addresses"]]
    assert not list(tmp_path.iterdir()) and not three.left()


def test_what_is_broken_is_named(three, tmp_path):
    first, second, third = three.nodes
    second.cut()
    third.inside("iptables", "-A", "OUTPUT", "-p", "tcp", "--dport", "29556", "-j", "REJECT")
    try:
        found = preflight(read_hostfile(three.hostfile()), PreflightRequest(master_port=29556))
    finally:
        second.mend()
        third.mend()
    bad = {(check.host, check.name): check for check in found.checks if check.status == FAIL}
    assert set(bad) == {(second.name, "reachable"), (third.name, "master-reachable")}
    assert bad[third.name, "master-reachable"].value.startswith(f"{first.name} port 29556: refused")


def test_a_taken_port_a_wrong_key_and_a_wrong_name(three, tmp_path):
    first, second, _ = three.nodes
    known = three.place / "known_hosts"
    right = known.read_text()
    known.write_text("".join(line for line in right.splitlines(True) if not line.startswith(second.name)))
    try:
        found = preflight(
            [Host(first.name, 1), Host(second.name, 1), Host("nohost.invalid", 1)], PreflightRequest(master_port=22)
        )
    finally:
        known.write_text(right)
    bad = {(check.host, check.name): check for check in found.checks if check.status == FAIL}
    assert set(bad) == {(first.name, "master-port"), (second.name, "reachable"), ("nohost.invalid", "reachable")}
    assert "port 22 is in use by sshd" in bad[first.name, "master-port"].value
    assert "Host key verification failed" in bad[second.name, "reachable"].value
    assert "esolve" in bad["nohost.invalid", "reachable"].value


def test_the_hosts_listen_to_the_command(three):
    from contextlib import closing
    from socket import create_server

    here = three.nodes[0].name.rpartition(".")[0] + ".254"
    asked = PreflightRequest(callback=(here, 0))
    with closing(create_server((here, 0))) as server:
        asked = replace(asked, callback=(here, server.getsockname()[1]))
        found = preflight(read_hostfile(three.hostfile()), asked)
    assert [c.status for c in found.checks if c.name == "command-reachable"] == [OK] * 3
    found = preflight(read_hostfile(three.hostfile()), asked)
    assert [c.status for c in found.checks if c.name == "command-reachable"] == [FAIL] * 3
