"""Other people's launchers start `zerofit train`: LeNet on two ranks, a rank killed under each, resumed to the end.

benchmarks/launchers.py tries each of them at length.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.launch import hosts as network
from tests.launch import slurm
from tests.launch.worlds import BIN, LOCAL, ONE_THREAD, SRUN, Start

STEPS = 100
LACKING = network.missing() or ", ".join([*slurm.MISSING, *([] if shutil.which("mpirun") else ["mpirun"])])
JOB = ["train", "lenet", "--data", "digits", "--steps", str(STEPS), "--save-every", "10", "--eval-samples", "8"]


def killed(start: Start, after: int, code: int, name: str) -> None:
    """Kill rank 1; the first process alone names it, all end, and the launcher does with this code."""
    start.after(after)
    start.kill(1)
    assert start.wait() == code, start.text
    assert start.text.count(f"error: rank 1 on {name} was killed (SIGKILL)") == 1, start.text
    assert start.workers() == {}
    assert start.faults()[-1]["kind"] == "killed"


def test_torchrun_restarts_from_the_newest_checkpoint(tmp_path):
    """Without --output, too: the first start's folder is kept in torchrun's own store."""
    argv = [*LOCAL["torchrun"], *JOB]
    start = Start([*argv[:1], "--max-restarts", "1", *argv[1:]], tmp_path)
    start.after(20)
    start.kill(1)
    assert start.wait() == 0, start.text
    assert [fault["kind"] for fault in start.faults()] == ["killed"]
    assert "rank 1 on localhost was killed (SIGKILL)" in start.text
    assert start.text.count("checking the run, the model and the data") == 2
    assert (start.result()["steps"], start.steps()) == (STEPS, list(range(1, STEPS + 1)))
    assert int(start.result()["resumed_from"][-8:]) >= 10
    assert len(list(tmp_path.glob("runs/*"))) == 1


@pytest.mark.root
@pytest.mark.skipif(bool(LACKING), reason=LACKING or "all launchers are there")
@pytest.mark.slow
def test_a_run_goes_on_under_any_launcher(tmp_path):
    """Begun by deepspeed on two hosts, resumed by srun, then by mpirun, brought to its end by accelerate launch."""
    output, job = tmp_path / "out", [*JOB, "--output", "out"]
    exported = {"ZEROFIT_CACHE": os.environ["ZEROFIT_CACHE"], **ONE_THREAD}
    (tmp_path / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in exported.items()))
    with network.hosts(tmp_path / "ssh", 2) as made:
        words = [str(BIN / "deepspeed"), "--hostfile", str(made.hostfile()), "--module", "zerofit"]
        killed(Start([*words, *job], tmp_path, output, made.env), 20, 3, f"{os.uname().nodename}-1")
        assert made.left() == {}
        assert [node.listening() for node in made.nodes] == [[], []]
    with slurm.slurm_of_one_node(tmp_path) as one:
        env = os.environ | {"SLURM_CONF": str(one.config)}
        killed(Start([*SRUN, *job], tmp_path, output, env), 40, 3, "localhost")
    killed(Start([*LOCAL["mpirun"], *job], tmp_path, output), 60, 3, "localhost")
    last = Start([*LOCAL["accelerate"], *job], tmp_path, output)
    assert last.wait() == 0, last.text
    assert (last.result()["steps"], last.result()["world_size"]) == (STEPS, 2)
    assert int(last.result()["resumed_from"][-8:]) >= 50
    assert last.steps() == list(range(1, STEPS + 1))
    assert last.text.count("checking the run, the model and the data") == 1
    assert [fault["kind"] for fault in last.faults()] == ["killed"] * 3
