"""Runs on three hosts: network namespaces with addresses of their own, a real sshd in each, pdsh, DeepSpeed's runner.

What breaks is measured at length by benchmarks/faults.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.hosts import hosts, missing
from tests.train.reference import Plan, digits, train
from zerofit.models.inputs import ImageInputs

WHY_NOT = missing()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts can be made")]
BAD_NAME = """it's $(touch PWNED) `touch PWNED`; touch PWNED "&" ü"""
BAD_VALUE = "'\"; touch PWNED; $(touch PWNED) `touch PWNED`\nsecond line %n ,x"
MINE = """
import os, torch
class Net(torch.nn.Sequential):
    def __init__(self, expected):
        if "RANK" in os.environ:
            assert os.environ["HOSTILE"] == os.environ["NCCL_HOSTILE"] == expected, os.environ["HOSTILE"]
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
SLOW = """
import time, torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)
"""
JOB = ["--data", "digits", "--loss", "cross-entropy", "--ds-config", "zero2", "--micro-batch", "4", "--lr", "3e-3"]
JOB += ["--schedule", "constant", "--warmup-steps", "0", "--eval-samples", "8", "--steps", "5"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("hosts") / "ssh") as three:
        yield three


def launch(made, place, *args, env=None, wait=True):
    argv = [sys.executable, "-m", "zerofit.cli", "launch", *args, "--hostfile", str(made.hostfile()), "--json"]
    process = subprocess.Popen(
        argv, env={**made.env, **(env or {})}, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return ended(process) if wait else process


def ended(process):
    out, err = process.communicate(timeout=300)
    lines = out.strip().splitlines()
    return process.returncode, json.loads(lines[-1]) if lines else {}, err


def losses(folder: Path):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def nothing_left(made):
    assert made.left() == {}
    assert [node.listening() for node in made.nodes] == [[], [], []]


def test_hostile_strings_reach_no_shell_and_losses_are_those_of_plain_pytorch(made, tmp_path, monkeypatch):
    place = tmp_path / BAD_NAME
    place.mkdir()
    (place / "hostile_net.py").write_text(MINE)
    expected = {"expected": BAD_VALUE}
    job = ["hostile_net:Net", *JOB, "--model-args", json.dumps(expected)]
    env = {"NCCL_HOSTILE": BAD_VALUE, "PYTHONHOSTILE": "$(touch PWNED)"}
    code, answer, err = launch(made, place, *job, "--output", BAD_NAME, "--env", f"HOSTILE={BAD_VALUE}", env=env)
    assert code == 0, err
    assert answer["layout"]["dp"] == answer["world_size"] == 3
    around = {place, tmp_path, Path.home(), Path("/"), Path.cwd(), made.place}
    assert [folder for folder in around if (folder / "PWNED").exists()] == []
    nothing_left(made)
    log = (place / BAD_NAME / "logs" / "launcher.log").read_text()
    for node in made.nodes:
        assert f"{node.name}: " in log
    monkeypatch.syspath_prepend(place)
    count, samples = digits(image_size=8)
    images = ImageInputs(channels=1, size=8, classes=10)
    plain, _ = train(Plan("hostile_net:Net", images, expected, samples, count, global_batch=12, steps=5, lr=3e-3))
    found = losses(place / BAD_NAME)
    assert found[-1] < found[0] and found == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_a_host_that_is_lost_for_good_is_left_out(made, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)  # so that the cable is pulled between two checkpoints
    job = ["slow:Net", "--data", "digits", "--global-batch", "48", "--steps", "24", "--save-every", "8"]
    process = launch(
        made,
        tmp_path,
        *(*job, "--output", "run", "--eval-samples", "8"),
        *("--heartbeat-timeout", "5", "--max-restarts", "1", "--min-nodes", "2"),
        wait=False,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 10):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    made.nodes[2].cut()
    try:
        code, answer, err = ended(process)
    finally:
        made.nodes[2].mend()
    assert code == 0, err
    assert "no report from " + made.nodes[2].name in err
    assert f"continuing without {made.nodes[2].name}" in err
    assert "2 data parallel ranks x micro batch 8 x 3 accumulation steps = 48 samples per step" in err
    assert (answer["world_size"], answer["steps"], answer["samples"]) == (2, 24, 24 * 48)
    assert int(answer["resumed_from"][-8:]) >= 8
    found = losses(tmp_path / "run")
    assert len(found) == 24
    undone = [json.loads(line) for p in (tmp_path / "run" / "logs").glob("metrics-undone-*") for line in p.open()]
    assert undone  # the same steps, before on three hosts
    assert [found[r["step"] - 1] for r in undone] == pytest.approx([r["loss"] for r in undone], rel=1e-4)
    fault = json.loads((tmp_path / "run" / "logs" / "faults.jsonl").read_text().splitlines()[0])
    assert (fault["kind"], fault["ranks"]) == ("host-unreachable", [2])
    stacks = sorted(p.name for p in (tmp_path / "run" / fault["stacks"]).iterdir())
    assert "rank-0.stacks.txt" in stacks
    assert "train/loop.py" in (tmp_path / "run" / fault["stacks"] / "rank-0.stacks.txt").read_text()
    nothing_left(made)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs OpenMPI (Debian: openmpi-bin)")
@pytest.mark.slow
def test_openmpi_starts_the_ranks(made, tmp_path):
    how = ["--launcher", "openmpi", "--launcher-args", "--allow-run-as-root", "--exclude", made.nodes[2].name]
    code, answer, err = launch(made, tmp_path, "mlp", "--data", "digits", "--steps", "3", "--output", "run", *how)
    assert code == 0, err
    assert (answer["world_size"], answer["steps"]) == (2, 3)
    assert "cmd = mpirun" in (tmp_path / "run" / "logs" / "launcher.log").read_text()
    nothing_left(made)


def test_what_is_wrong_with_hosts_is_said_before_a_rank_starts(made, tmp_path):
    taker = "import socket, time; s = socket.create_server(('', 29500)); print(flush=True); time.sleep(60)"
    taken = ["ip", "netns", "exec", made.nodes[0].space, sys.executable, "-c", taker]
    with subprocess.Popen(taken, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        made.nodes[1].cut()
        code, answer, err = launch(made, tmp_path, "mlp", "--data", "digits", "--output", "run")
        made.nodes[1].mend()
        process.kill()
    assert code == 2
    said = {(p["where"], p["kind"]): p for p in answer["errors"]}
    assert "29500" in said[made.nodes[0].name, "host-master-port"]["message"], said
    assert (made.nodes[1].name, "host-reachable") in said
    assert "try: " in err
    assert not (tmp_path / "run").exists()
    assert os.listdir(tmp_path) == []
