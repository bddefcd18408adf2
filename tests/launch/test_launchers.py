"""Other people's launchers start `zerofit train`: LeNet on two ranks, a rank killed under each, resumed to the end.

benchmarks/launchers.py tries each of them at length.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack

import pytest

from tests.launch import hosts as network
from tests.launch import slurm
from tests.launch.worlds import BIN, LOCAL, SRUN, Start

STEPS = 300
JOB = ["train", "lenet", "--data", "digits", "--steps", str(STEPS), "--save-every", "20", "--eval-samples", "8"]


def killed(start: Start, after: int, code: int, name: str) -> None:
    """Kill rank 1; the first process alone names it, all end, and the launcher does with this code."""
    start.after(after)
    start.kill(1)
    assert start.wait() == code, start.text
    assert start.text.count(f"error: rank 1 on {name} was killed from outside (SIGKILL)") == 1, start.text
    assert start.workers() == {}
    assert start.faults()[-1]["kind"] == "killed"


def ended(start: Start) -> None:
    """The run goes on from a checkpoint, and comes to its end with both ranks."""
    assert start.wait() == 0, start.text
    result = start.result()
    assert (result["steps"], result["world_size"]) == (STEPS, 2)
    assert int(result["resumed_from"][-8:]) >= 20
    assert start.steps() == list(range(1, STEPS + 1))
    assert start.text.count("checking the run, the model and the data") == 1
    assert result["train_loss"] < 1.0


def test_torchrun_restarts_from_the_newest_checkpoint(tmp_path):
    """Without --output, too: the first start's folder is kept in torchrun's own store."""
    argv = [*LOCAL["torchrun"], *JOB]
    start = Start([*argv[:1], "--max-restarts", "1", *argv[1:]], tmp_path)
    start.after(40)
    start.kill(1)
    assert start.wait() == 0, start.text
    assert [fault["kind"] for fault in start.faults()] == ["killed"]
    assert "rank 1 on localhost was killed from outside (SIGKILL)" in start.text
    assert start.text.count("checking the run, the model and the data") == 2
    assert (start.result()["steps"], start.steps()) == (STEPS, list(range(1, STEPS + 1)))
    assert int(start.result()["resumed_from"][-8:]) >= 40
    assert len(list(tmp_path.glob("runs/*"))) == 1


@pytest.mark.root
@pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "hosts can be made")
def test_deepspeed_on_two_hosts(tmp_path):
    with network.hosts(tmp_path / "ssh", 2) as made:
        (tmp_path / ".deepspeed_env").write_text(f"ZEROFIT_CACHE={os.environ['ZEROFIT_CACHE']}\n")
        words = [str(BIN / "deepspeed"), "--hostfile", str(made.hostfile()), "--module", "zerofit"]
        argv, output = [*words, *JOB, "--output", "out"], tmp_path / "out"
        killed(Start(argv, tmp_path, output, made.env), 40, 3, f"{os.uname().nodename}-1")
        ended(Start(argv, tmp_path, output, made.env))
        assert made.left() == {}
        assert [node.listening() for node in made.nodes] == [[], []]


@pytest.mark.root
@pytest.mark.skipif(bool(slurm.MISSING) or not shutil.which("mpirun"), reason="needs slurm-wlm, munge and openmpi-bin")
def test_a_run_goes_on_under_any_launcher(tmp_path):
    """Begun by srun, resumed by mpirun, brought to its end by accelerate launch."""
    output = tmp_path / "out"
    job = [*JOB, "--output", "out"]
    with ExitStack() as stack:
        one = stack.enter_context(slurm.slurm_of_one_node(tmp_path))
        env = os.environ | {"SLURM_CONF": str(one.config)}
        killed(Start([*SRUN, *job], tmp_path, output, env), 40, 3, "localhost")
    killed(Start([*LOCAL["mpirun"], *job], tmp_path, output), 100, 3, "localhost")
    ended(Start([*LOCAL["accelerate"], *job], tmp_path, output))
