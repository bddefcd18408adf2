"""What DeepSpeed's own runners make of the command that zerofit gives them: the real ones, asked in a process."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.launch.hostfile import Host
from zerofit.launch.local import GUARD
from zerofit.launch.runner import PLAIN, RUNNERS, Runner, runner_environment
from zerofit.spec.errors import Problems

ORDERS = "b3JkZXJz"
EVEN = (Host("n1", 2), Host("n2", 2))
UNEVEN = (Host("n1", 2), Host("n2", 1))
PICKED = (Host("n1", 2, (0, 3)), Host("n2", 2, (1, 2)))
# what DeepSpeed's runner would export, and put into a shell's double quotes or none at all
HOSTILE = {
    "NCCL_SOCKET_IFNAME": "$(touch /tmp/x)",
    "PYTHONPATH": "/tmp/`touch x`; touch x",
    "UCX_NET": "a,b c",
    "LD_LIBRARY_PATH": '"; touch x; "',
}
# deepspeed.launcher.runner.main as it is, but for the start of the command that it has made
ASK = """
import json, sys
import deepspeed.launcher.runner as runner
from deepspeed.launcher import multinode_runner
made = {}
class Popen:
    returncode = 0
    def __init__(self, cmd, env): made.update(cmd=cmd, env=env)
    def wait(self): pass
runner.subprocess.Popen = Popen
for one in runner.LAUNCHER_CLASSES.values():
    one.backend_exists = lambda self: True
answers = []
for argv in json.load(sys.stdin):
    made.clear()
    try:
        runner.main(argv)
        answers.append(dict(made))
    except (ValueError, AssertionError) as error:
        answers.append({"error": str(error)})
sys.stderr.flush()
print("\\n" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Commands of DeepSpeed's runners, by the runner's name and what is particular."""
    logs = tmp_path_factory.mktemp("logs")
    asked: dict[tuple[str, str], list[str]] = {}
    for kind in RUNNERS:
        for name, hosts in (("even", EVEN), ("uneven", UNEVEN)):
            place = logs / kind / name
            place.mkdir(parents=True)
            asked[kind, name] = Runner(kind=kind).command(hosts, place, ("10.0.0.1", 29500), ORDERS)
    (logs / "more").mkdir()
    asked["pdsh", "picked"] = Runner().command(PICKED, logs / "more", ("10.0.0.1", 29500), ORDERS)
    mca = "--mca btl_tcp_if_include ib0 --mca plm_rsh_args '-p 2222'"
    asked["openmpi", "network"] = Runner(kind="openmpi", arguments=mca).command(EVEN, logs, ("10.0.0.1", 29500), ORDERS)
    environment = os.environ | HOSTILE
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HOSTILE.items():
            patch.setenv(name, value)
        environment = runner_environment(logs, {"ZEROFIT_TOKEN": "abc123"})
    given = json.dumps([argv[argv.index("deepspeed.launcher.runner") + 1 :] for argv in asked.values()])
    call = [sys.executable, "-c", ASK]
    done = subprocess.run(call, input=given, env=environment, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))


def after(cmd: list[str], word: str) -> str:
    return cmd[cmd.index(word) + 1]


@pytest.mark.parametrize("kind", RUNNERS)
def test_every_rank_is_python_with_our_script_and_orders(made, kind):
    cmd = made[kind, "even"]["cmd"]
    assert cmd[-2:] == [str(GUARD), ORDERS]  # a path: the slurm runner passes over --module
    assert Path(GUARD).is_file()
    assert [sys.executable, "-u"] == cmd[cmd.index(sys.executable) :][:2]
    assert "--local_rank" not in " ".join(cmd)


@pytest.mark.parametrize("kind", RUNNERS)
def test_nothing_of_the_user_s_environment_is_in_a_command(made, kind):
    text = "\n".join(made[kind, "even"]["cmd"])
    assert "ZEROFIT_TOKEN=abc123" in text  # the file of exports is read
    assert not [value for value in HOSTILE.values() if value in text]
    assert not [word for word in re.split(r"[\s;]+", text) if not PLAIN.fullmatch(word) and word != "^openib"]


def test_pdsh(made):
    cmd = made["pdsh", "even"]["cmd"]
    assert cmd[0] == "pdsh"
    assert after(cmd, "-w") == "n1,n2"
    remote = cmd[cmd.index("n1,n2") + 1 :]
    assert remote[1] == "cd /;"  # the one word of a path that it does not quote
    assert remote[2:6] == [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    assert {"--node_rank=%n", "--master_addr=10.0.0.1", "--master_port=29500", "--no_local_rank"} <= set(remote)
    assert world(remote) == {"n1": [0, 1], "n2": [0, 1]}
    assert world(made["pdsh", "uneven"]["cmd"]) == {"n1": [0, 1], "n2": [0]}
    assert made["pdsh", "even"]["env"]["PDSH_RCMD_TYPE"] == "ssh"


def world(cmd: list[str]) -> dict[str, list[int]]:
    word = next(w for w in cmd if w.startswith("--world_info="))
    return json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))


def test_devices_are_picked_by_pdsh_alone(made):
    assert world(made["pdsh", "picked"]["cmd"]) == {"n1": [0, 3], "n2": [1, 2]}
    for kind in ("slurm", "openmpi", "mpich"):
        problems = Problems()
        Runner(kind=kind).check(PICKED, problems)
        assert problems


def test_slurm(made):
    cmd = made["slurm", "even"]["cmd"]
    assert cmd[0] == "srun"
    assert after(cmd, "-n") == "4"
    export = next(word for word in cmd if word.startswith("--export="))
    assert export.startswith("--export=ALL,")
    assert all("=" in word for word in export.split(",")[1:])  # srun cuts at commas, also within a value
    assert "-m" not in cmd


def test_openmpi(made):
    cmd = made["openmpi", "even"]["cmd"]
    assert cmd[:3] == ["mpirun", "-n", "4"]
    assert Path(after(cmd, "-hostfile")).read_text().split() == ["n1", "slots=2", "n2", "slots=2"]
    assert after(cmd, "btl_tcp_if_include") == "eth0"  # the runner's own, unless something else is given
    assert made["openmpi", "uneven"]["cmd"][:3] == ["mpirun", "-n", "3"]
    network = made["openmpi", "network"]["cmd"]
    assert [after(network, "btl_tcp_if_include"), after(network, "plm_rsh_args")] == ["ib0", "-p 2222"]
    assert "eth0" not in network


def test_mpich(made):
    cmd = made["mpich", "even"]["cmd"]
    assert cmd[:5] == ["mpirun", "-n", "4", "-ppn", "2"]
    assert after(cmd, "-hosts") == "n1,n2"
    assert [after(cmd, name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_SIZE")] == [
        "10.0.0.1",
        "29500",
        "4",
        "2",
    ]
    helper = cmd.index(str(GUARD)) - 3
    assert cmd[helper].endswith("launcher_helper.py")  # which gives each rank its RANK and LOCAL_RANK
    assert cmd[helper + 1 : helper + 3] == ["--launcher", "mpich"]


@pytest.mark.parametrize("kind", RUNNERS)
def test_uneven_hosts_are_refused_by_us_where_deepspeed_refuses_them(made, kind):
    problems = Problems()
    Runner(kind=kind).check(UNEVEN, problems)
    assert bool(problems) == ("error" in made[kind, "uneven"])
