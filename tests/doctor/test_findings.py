"""Every finding before a start, each from one doctored answer; and that a host in order has none."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
from rich.console import Console

from zerofit.cli.console import show_checks
from zerofit.doctor import compare
from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.doctor.compare import clock
from zerofit.doctor.preflight import PreflightRequest, find_routes, interface_check, preflight
from zerofit.launch.hostfile import Host

GIB = 2**30


def put(facts: dict, path: str, value: object) -> dict:
    """A copy with one value changed."""
    told = copy.deepcopy(facts)
    *way, last = path.split("/")
    inner = told
    for key in way:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[int(last) if isinstance(inner, list) else last] = value
    return told


STRAY = {"pid": 4711, "run": "that-run", "user": "ann"}
USER = {"pid": 815, "name": "/usr/bin/python"}
# what is put where, the check, its status, words of what is found and of the hint
FAULTS = [
    ("versions/torch", "2.13.0", "versions", FAIL, "torch 2.13.0 (here", "pip install torch=="),
    ("versions/torch_git", "abc", "versions", FAIL, "torch_git abc", "same environment"),
    ("versions/deepspeed", None, "versions", FAIL, "deepspeed None", "deepspeed==0."),
    ("versions/nccl", "2.28.9", "versions", FAIL, "nccl 2.28.9", "same environment"),
    ("versions/cuda", "12.8", "versions", FAIL, "cuda 12.8", "same environment"),
    ("versions/numpy", "1.0", "versions", WARN, "numpy 1.0", "safer"),
    ("code/zerofit", "f" * 64, "code", FAIL, "zerofit's source differs (ffffffffffff)", "all hosts share"),
    ("code/model", None, "code", FAIL, "the model's source is missing", "copy this folder"),
    ("run_file", "e" * 64, "run-file", WARN, "the host's file of the same name differs", "update the file on the host"),
    ("gpus", [], "slots", FAIL, "no GPU found", "--exclude"),
    ("gpu_error", "NVML mismatch", "slots", FAIL, "nvidia-smi fails: NVML mismatch", "reboot"),
    ("gpus/1/used_bytes", 70 * GIB, "gpu-memory", FAIL, "GPU 1: 70.0 GiB in use", "stop the processes on it"),
    ("gpus/0/used_bytes", 2 * GIB, "gpu-memory", WARN, "GPU 0: 2.00 GiB in use", "stop the processes on it"),
    ("gpus/0/processes", [USER], "gpu-memory", WARN, "by /usr/bin/python (process 815)", "stop the processes on it"),
    ("gpus/0/name", "NVIDIA A100-SXM4-80GB", "gpu-kind", WARN, "A100", "speed of the slowest GPU"),
    ("strays", [STRAY], "processes", WARN, "1 of ann (run that-run)", "kill 4711"),
]


@pytest.fixture
def side(facts):
    """What the asking side says of itself."""
    return put(put(facts, "code/model", "d" * 64), "run_file", "c" * 64)


def compared(side, told, slots: int = 2):
    hosts = (Host("a", slots), Host("b", slots))
    return compare.checks(hosts, {"a": side, "b": told}, side)


@pytest.mark.parametrize(("path", "value", "name", "status", "found", "hint"), FAULTS)
def test_one_fault_is_one_finding(side, path, value, name, status, found, hint):
    checks = compared(side, put(side, path, value))
    bad = [check for check in checks if check.status != OK]
    assert [(check.host, check.name, check.status) for check in bad] == [("b", name, status)]
    assert found in bad[0].value and hint in bad[0].hint


def test_what_is_missing_here_is_not_to_be_installed_there(side):
    (finding,) = [check for check in compared(put(side, "versions/torch", None), side) if check.status != OK]
    assert "(here None)" in finding.value and finding.hint == "install the same environment on b"


def test_hosts_in_order_have_no_finding(side):
    checks = compared(side, side)
    assert {check.status for check in checks} == {OK}
    assert {"versions", "code", "run-file", "slots", "gpu-memory", "gpu-kind", "processes"} == {c.name for c in checks}


def test_more_slots_than_gpus(side):
    bad = [check for check in compared(side, side, slots=3) if check.status == FAIL]
    assert [check.host for check in bad] == ["a", "b"] and "slots=2" in bad[0].hint
    host = (Host("a", 1, devices=(5,)),)
    (bad,) = [c for c in compare.checks(host, {"a": side}, side) if c.status == FAIL]
    assert bad.value == "there is no device 5: the host has 2 GPUs"


def test_more_slots_than_cores_is_only_slow(side):
    told = put(put(side, "gpus", []), "cores/usable", 2)
    checks = compare.checks((Host("a", 3),), {"a": told}, told)
    assert [(c.name, c.status) for c in checks if c.status != OK] == [("slots", WARN)]
    assert compare.slots(Host("a", 1), told, cuda=True).value == "no GPU found"


def test_a_gpu_that_is_left_out_may_be_busy(side):
    told = put(side, "gpus/0/used_bytes", 70 * GIB)
    hosts = (Host("a", 1, devices=(1,)),)
    assert all(check.status == OK for check in compare.checks(hosts, {"a": told}, side))


FOLDER = {"exists": True, "same": True, "writable": True, "free_bytes": 100 * GIB, "error": None, "mark": ".m"}
FOLDERS = [
    ({}, True, OK, "shared and writable"),
    ({"same": False, "exists": False}, True, FAIL, "not shared: /runs/x is missing on b"),
    ({"same": False}, True, FAIL, "not shared: /runs/x is another folder on b"),
    ({"writable": False, "error": "Permission denied"}, True, FAIL, "cannot write to /runs/x: Permission denied"),
    ({}, False, FAIL, "does not appear here"),
]


@pytest.mark.parametrize(("change", "seen", "status", "value"), FOLDERS)
def test_run_folders(change, seen, status, value):
    told = {"b": {"run_folder": FOLDER | change}}
    (check,) = compare.folders(told, Path("/runs/x"), {"b"} if seen else set())
    assert check.status == status and value in check.value
    assert ("--output" in check.hint or "write permission" in check.hint) == (status == FAIL)


def test_room_for_checkpoints():
    told = {"b": {"run_folder": FOLDER}}
    status = {size: compare.disk(told, size * GIB)[0].status for size in (10, 60, 101)}
    assert status == {10: OK, 60: WARN, 101: FAIL}


def test_clocks():
    cases = [(0.5, 0.1), (-3.0, 0.1), (3.0, 1.5), (70.0, 0.5), (-61.0, 2.0)]
    assert [clock("b", *case).status for case in cases] == [OK, WARN, OK, FAIL, WARN]
    assert "behind" in clock("b", -3.0, 0.1).value and "ahead" in clock("b", 3.0, 0.1).value


SHIFT = r"""
import re, sys

for line in iter(sys.stdin.readline, ""):
    later = lambda m: f'"clock": [{float(m[1]) + 3600}, {float(m[2]) + 3600}]'
    print(re.sub(r'"clock": \[([0-9.]+), ([0-9.]+)\]', later, line), end="", flush=True)
"""


def test_the_clock_of_a_host_is_measured(stand_in, tmp_path):
    """Against a host whose clock is an hour ahead, shifted in its answers on the way."""
    (tmp_path / "shift.py").write_text(SHIFT)
    stand_in(f'test "$FAKE_HOST" = b && {{ sh -c "$*" | python3 -u {tmp_path}/shift.py; exit; }}')
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    (bad,) = [check for check in found.checks if check.name == "clock" and check.status != OK]
    assert (bad.host, bad.status) == ("b", FAIL) and bad.value.startswith("3.6e+03 s ahead")


class Answers:
    """A conversation that answers from a list."""

    def __init__(self, host, *answers):
        self.host, self.answers = host, list(answers)

    async def ask(self, question, patience_s=0.0, say=None):
        return self.answers.pop(0)


def reached(*errors, interface="eth0"):
    return {"reached": [{"error": e, "seconds": 0.001, "address": "x", "interface": interface} for e in errors]}


def routed(side, first, *others, port=29500, callback=None, master=None):
    # the last four are no candidates: loopback, link-local and IPv6
    addresses = ("10.0.0.1", "10.0.1.1", "127.0.0.1", "::1", "169.254.7.7", "fd00::1")
    rows = [{"interface": "eth0", "mtu": 9000, "speed_mbit": 100_000, "address": address} for address in addresses]
    told = put(put(side, "addresses", rows), "ssh_address", "10.0.1.1")
    there = {"a": Answers("a", *first), **{f"b{n}": Answers(f"b{n}", one) for n, one in enumerate(others)}}
    request = PreflightRequest(master=master, master_port=port, callback=callback)
    return asyncio.run(find_routes(list(there), there, dict.fromkeys(there, told), request))


def test_the_address_that_all_reach_is_taken(side):
    listening = {"error": None, "port": 29500}
    found = routed(side, [listening, reached(None, None)], reached(None, None), reached("no route", None))
    assert found.master_address == "10.0.0.1" and not [c for c in found.checks if c.status != OK]
    assert found.interfaces == {"a": "eth0", "b0": "eth0", "b1": "eth0"}
    # ssh came in at 10.0.1.1: that is asked about first, and taken where all reach it
    found = routed(side, [listening, reached(None, None)], reached(None, None))
    assert found.master_address == "10.0.1.1"


def test_a_master_that_is_not_reached(side):
    listening = {"error": None, "port": 29500}
    found = routed(side, [listening, reached(None, None)], reached("refused", "no answer in 4 s"))
    (bad,) = [c for c in found.checks if c.status == FAIL]
    assert (bad.host, bad.name) == ("b0", "master-reachable") and "10.0.1.1 port 29500: refused" in bad.value
    assert "--master-addr" in bad.hint


def test_a_master_port_that_is_taken(side):
    found = routed(side, [{"error": "port 29500 is in use by python (process 5)"}])
    (bad,) = found.checks
    assert (bad.host, bad.name, bad.status) == ("a", "master-port", FAIL) and "--master-port" in bad.hint


def test_the_command_is_not_reached(side):
    listening = {"error": None, "port": 29500}
    answers = reached(None, None, "no route")
    found = routed(side, [listening, answers], callback=("10.9.9.9", 4000))
    (bad,) = [c for c in found.checks if c.status == FAIL]
    assert bad.name == "command-reachable" and "10.9.9.9 port 4000: no route" in bad.value


def test_a_slow_interface(side):
    slow = put(side, "addresses", [{"interface": "eth0", "address": "10.0.0.1", "mtu": 1500, "speed_mbit": 1000}])
    check = interface_check("b", "eth0", slow, 2)
    assert check.status == WARN and "1 Gbit/s" in check.value and "--master-addr" in check.hint


@pytest.mark.parametrize("markup", [True, False])  # the command line's consoles read none
def test_hosts_are_joined_with_the_same_finding(markup, capsys):
    checks = [Check(name="code", host=f"n{n}", status=FAIL, value="differs [x]", hint="copy") for n in range(6)]
    checks += [Check(name="disk", host=f"n{n}", status=WARN, value="little") for n in range(7)]
    show_checks(checks, 7, Console(markup=markup, width=200))
    text = capsys.readouterr().out
    assert "n0, n1, n2, n3 and 2 more" in text and "all 7 hosts" in text and "differs [x]; on" in text
    assert text.index("fail code") < text.index("warn disk")
