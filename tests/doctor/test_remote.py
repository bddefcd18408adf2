"""Conversations over ssh: what can go wrong, what reaches a shell, and how long many take."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from zerofit.doctor import remote
from zerofit.doctor.check import FAIL
from zerofit.doctor.preflight import Preflight, PreflightRequest, preflight
from zerofit.launch.hostfile import Host


def one(found, name="reachable"):
    (check,) = [check for check in found.checks if check.name == name]
    return check


# what is printed with which exit code by an ssh or by what it starts, what is found, what is to be done
FAILURES = [
    ("a: Permission denied (publickey,password).", 255, "Permission denied", "ssh-copy-id a"),
    ("No ED25519 host key is known.\nHost key verification failed.", 255, "Host key verification failed", "accept it"),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", 255, "CHANGED", "ssh-keygen -R a"),
    ("ssh: Could not resolve hostname a: Name or service not known", 255, "resolve", "/etc/hosts"),
    ("ssh: connect to host a port 22: Connection refused", 255, "refused", "--ssh-port"),
    ("ssh: connect to host a port 22: Connection timed out", 255, "timed out", "is running"),
    ("kex_exchange_identification: Connection closed by remote host", 255, "kex_exchange", "its log"),
    ("python: No module named zerofit.doctor", 1, "No module named zerofit", "install the same zerofit"),
    ("sh: 1: /opt/venv/bin/python: not found", 127, "not found", sys.executable),
    ("something else", 3, "exit code 3: something else", "ssh -o BatchMode=yes a true"),
]


def statuses(found: Preflight) -> set[str]:
    return {check.status for check in found.checks}


@pytest.mark.parametrize(("said", "code", "value", "hint"), FAILURES)
def test_a_host_that_does_not_answer(stand_in, said, code, value, hint):
    stand_in(f"echo {shlex.quote(said)} >&2; exit {code}")
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    check = next(check for check in found.checks if check.host == "a")
    assert (check.name, check.status) == ("reachable", "fail") and value in check.value and hint in check.hint
    assert FAIL in statuses(found) and not found.facts and len(found.findings) == 2


def test_no_ssh_here(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    assert {check.host for check in found.findings} == {"a", "b"} and "openssh-client" in found.checks[0].hint


def test_what_a_remote_shell_prints_is_passed_over(stand_in):
    stand_in("echo 'Welcome!'; printf 'no newline'")
    assert FAIL not in statuses(preflight([Host("a", 1), Host("b", 1)], PreflightRequest()))


@pytest.mark.parametrize("said", ["head -c 5000000 /dev/zero", "echo 'zerofit-answers {'"])
def test_an_answer_that_cannot_be_read_is_a_finding(stand_in, said):
    stand_in(said)
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    assert FAIL in statuses(found) and "no JSON line of at most 4 MiB" in found.checks[0].value


def test_no_pipe_is_left_to_an_event_loop_that_is_closed(stand_in, monkeypatch):
    stand_in("sleep 5 &")  # holds the pipes for longer than the conversation
    caught: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", caught.append)
    assert FAIL not in statuses(preflight([Host("a", 1), Host("b", 1)], PreflightRequest()))
    gc.collect()
    assert not caught


def test_names_that_are_none_reach_no_program(stand_in):
    log = stand_in()
    for name in ("-oProxyCommand=touch x", "a;touch x", "$(touch x)", "a b", "", "a\nb"):
        found = preflight([Host(name, 1), Host("b", 1)], PreflightRequest())
        check = one(found)
        assert check.host == name and "not a valid host name" in check.value
    assert "touch" not in log.read_text()


HOSTILE = ["$(touch {0})", "`touch {0}`", "'; touch {0}; '", '"; touch {0}; "', "a\n touch {0}\n", "-rf {0} *"]


def test_hostile_names_reach_no_shell(stand_in, tmp_path, monkeypatch):
    """Folders and files travel over standard input; the interpreter's path is quoted."""
    stand_in()
    trap = tmp_path / "trap"
    for number, text in enumerate(HOSTILE):
        name = text.format("trap").replace("/", "")
        folder = tmp_path / f"{number}{name}"
        folder.mkdir()
        (folder / name).write_text("x")
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(os.path.abspath(sys.executable))} "$@"\n')
        python.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(remote.sys, "executable", str(python))
            asked = PreflightRequest(run_folder=folder, run_file=folder / name, code=folder, master_port=None)
            found = preflight([Host("a", 1), Host("b", 1)], asked)
        assert FAIL not in statuses(found), found.findings
        assert one_of(found, "run-folder", "a").value == "shared and writable"
        assert one_of(found, "run-file", "b").value == "the same"
        assert not trap.exists() and sorted(p.name for p in folder.iterdir()) == sorted(["python", name])
    assert not trap.exists()


def one_of(found, name, host):
    (check,) = [check for check in found.checks if check.name == name and check.host == host]
    return check


def test_a_single_local_host_needs_no_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = preflight([Host("localhost", 1)], PreflightRequest(run_folder=tmp_path))
    assert FAIL not in statuses(found)
    assert found.master_address == "127.0.0.1" and found.interfaces == {"localhost": "lo"}


def test_the_ssh_port_and_no_prompt(stand_in):
    log = stand_in()
    preflight([Host("a", 1), Host("b", 1)], PreflightRequest(ssh_port=2222))
    assert all("-p 2222" in line and "BatchMode=yes" in line for line in log.read_text().splitlines())


# a host that answers from a file; before it tells its facts, it runs `wait`
REPLAY = """
clock() {{ now=$(date +%s.%N); printf '"clock": [%s, %s]}}\\n' "$now" "$now"; }}
say() {{ printf 'zerofit-answers %s' "$1"; clock; }}
printf 'zerofit-answers {{"greeting": true}}\\n'
while read -r question; do
  case "$question" in
    *'"facts"'*) {wait}; say "$(cat {facts})" ;;
    *'"listen"'*) say '{{"error": null, "port": 29500, ' ;;
    *'"reach"'*) say '{{"reached": [{{"error": null, "seconds": 0.001, "interface": "eth0"}}], ' ;;
  esac
done
exit 0
"""


@pytest.fixture
def replay(true_facts, tmp_path):
    """The script of a host that answers at once, whatever this machine is busy with."""
    usable = {"interface": "eth0", "address": "10.0.0.1", "mtu": 1500, "speed_mbit": 100_000}
    told = {**true_facts, "addresses": [usable], "strays": []}
    (tmp_path / "facts").write_text(json.dumps(told)[:-1] + ", ")
    return lambda wait=":": REPLAY.format(facts=tmp_path / "facts", wait=wait)


def test_a_host_with_another_zerofit_is_a_finding(stand_in, replay, tmp_path):
    """Facts have other names there."""
    stand_in(replay())
    path = tmp_path / "facts"
    path.write_text(path.read_text().replace('"ssh_address"', '"asked_from"'))
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    assert [check.hint for check in found.findings] == [f"install the same zerofit on {host}" for host in "ab"]
    assert not found.facts


def test_64_hosts_are_asked_at_once(stand_in, replay, tmp_path, monkeypatch):
    """None answers before all have been asked."""
    asked = tmp_path / "asked"
    asked.mkdir()
    wait = f'touch "{asked}/$FAKE_HOST"; until [ -e "{asked}/all" ]; do sleep 0.2; done'
    stand_in(replay(wait))
    hosts = [Host(f"node{n}", 1) for n in range(64)]
    seen, ended = [], threading.Event()

    def let_go() -> None:
        while len(seen) < 64 and not ended.wait(0.05):
            seen[:] = [path.name for path in asked.iterdir()]
        (asked / "all").touch()

    watching = threading.Thread(target=let_go)
    watching.start()
    try:
        found = preflight(hosts, PreflightRequest(master_port=29500))
    finally:
        ended.set()
        watching.join()
    assert len(seen) == 64
    assert not found.findings, found.findings[:3]
    assert len(found.facts) == 64 and len(found.interfaces) == 64 and found.master_address == "10.0.0.1"


def test_a_host_that_hangs_does_not_hold_the_others_up(stand_in, replay, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 4.0)  # for the greeting
    stand_in('test "$FAKE_HOST" = b && exec sleep 600\n' + replay())
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    check = one(found)
    assert check.host == "b" and "no answer in 4 s" in check.value and set(found.facts) == {"a"}
    after = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not [p for p in after if p.status() != psutil.STATUS_ZOMBIE]


def test_a_child_that_keeps_the_pipe_holds_nobody_up(stand_in):
    """An older ssh that shares its connection (ControlPersist) leaves a process with its standard error."""
    stand_in("sleep 15 < /dev/null > /dev/null & exit 3")
    begun = time.monotonic()
    found = preflight([Host("a", 1), Host("b", 1)], PreflightRequest())
    assert ["exit code 3" in check.value for check in found.findings] == [True, True]
    assert time.monotonic() - begun < 12


def test_a_late_answer_is_not_taken_for_the_next_one(monkeypatch):
    """`doctor` asks a host again whose first answer took too long."""
    import asyncio

    code = "import json, sys, time\n"
    code += "say = lambda **what: print('zerofit-answers ' + json.dumps(what), flush=True)\nsay(greeting=True)\n"
    code += "for line in sys.stdin: time.sleep(json.loads(line)['wait_s']); say(line=line, clock=[0, 0])\n"
    monkeypatch.setattr(remote, "command", lambda *_: [sys.executable, "-c", code])

    async def ask() -> list:
        async with remote.conversations(["a", "b"]) as opened:
            first = {"a": {"wait_s": 1.5}, "b": {"wait_s": 0}}
            return [await remote.ask_all(opened, question, 1.0) for question in (first, {"ask": "", "wait_s": 0.2})]

    early, late = asyncio.run(ask())
    assert "no answer" in early["a"].message and late["a"] is early["a"]
    assert json.loads(early["b"]["line"]) == {"wait_s": 0} and json.loads(late["b"]["line"])["wait_s"] == 0.2


def test_nothing_is_left_when_the_asking_command_is_killed(stand_in, tmp_path):
    """The processes on the hosts end with the connection."""
    import subprocess

    stand_in()
    code = (
        "import asyncio\nfrom zerofit.doctor.remote import conversations\n"
        "async def main():\n"
        "    async with conversations(['a', 'b']) as there:\n"
        "        print(*(one.process.pid for one in there.values()), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        pids = [int(pid) for pid in asking.stdout.readline().split()]
        below = [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
        asking.kill()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert len(pids) == 2 and not alive


def test_the_stand_in_is_used(stand_in):
    stand_in()
    assert Path(shutil.which("ssh")).parent.name == "stand-in"
