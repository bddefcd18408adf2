"""sbatch files under a real Slurm: run, asked to save before the limit and at pre-emption, queued again, finished."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.launch.hostile import HOSTILE
from tests.launch.slurm import CPUS, MISSING, slurm_of_one_node
from zerofit.launch.job_file import SlurmJob, sbatch_text

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start Slurm's daemons"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
]

# Saves and ends with 75 when asked, as `zerofit launch` does; is at its goal when it is started a second time.
ZEROFIT = """#!{python} -I
import json, os, signal, sys, time
got = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
until = time.monotonic() + (float(os.environ["WORK_S"]) if restarts == 0 else 0)
start = time.monotonic()
while time.monotonic() < until and not got:
    time.sleep(0.05)
time.sleep(1)
said = {{"argv": sys.argv[1:], "restarts": restarts, "got": got, "after_s": time.monotonic() - start}}
said |= {{"value": os.environ.get("VALUE"), "nodes": os.environ["SLURM_JOB_NODELIST"]}}
print(json.dumps(said), flush=True)
sys.exit(75 if got else int(os.environ.get("CODE", "0")))
"""

# Slow without work, so that a pre-emption finds it under way; once told twice it comes to its end.
SLOW = """
import os, time, torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def forward(self, x):
        time.sleep(0.2 if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < 2 else 0)
        return super().forward(x)
"""
STEPS = 200  # 40 seconds


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_of_one_node(tmp_path_factory.mktemp("slurm")) as one:
        yield one


@pytest.fixture(scope="module")
def submit(slurm, tmp_path_factory):
    """Submits a job whose `zerofit` is the stand-in; the job's number and the file of its output."""
    folder = tmp_path_factory.mktemp("jobs")
    program = folder / "bin" / "zerofit"
    program.parent.mkdir()
    program.write_text(ZEROFIT.format(python=sys.executable))
    program.chmod(0o755)

    def submitted(*, work_s=0.0, setup="", **changes):
        usual = {"name": "n", "run": "run.yaml", "output": "runs/a", "nodes": 1, "slots": 1, "device": "cpu"}
        usual |= {"time": "60", "setup": setup or f"PATH={program.parent}:$PATH"}
        job = SlurmJob(**usual | changes)
        file = folder / "job.sbatch"
        file.write_text(sbatch_text(job))
        number = slurm.submit(file, WORK_S=str(work_s))
        return number, folder / job.log.replace("%j", number).replace("%%", "%")

    return submitted


def said(log) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture(scope="module", autouse=True)
def near_its_limit(slurm, submit):
    """A job that comes near its limit of two minutes while the other tests run."""
    return submit(partition="high", time="2", save_s=59, work_s=600)


def test_a_job_runs_and_nothing_of_its_texts_is_read_as_more_than_text(slurm, submit):
    text = "".join(text for text in HOSTILE if text.isprintable()) + "\n#SBATCH --nodes=5\n"
    name = text.partition("\n")[0]
    number, log = submit(name=name, run=text, output=text, flags=(text,), env={"VALUE": text}, log="a %% #\"'b-%j.log")
    about = slurm.wait(number, "COMPLETED", "FAILED")
    assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0")
    only = said(log)[0]
    assert only["argv"] == ["launch", "--launcher", "slurm", f"--output={text}", "--env=VALUE", text, "--", text]
    assert (only["value"], only["restarts"], only["nodes"]) == (text, 0, about["NodeList"])
    shown = slurm.call("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%j")
    assert shown.rstrip("\n") == name
    assert not list(log.parent.glob("**/x"))


def test_an_exit_code_is_the_job_s(slurm, submit):
    number, _ = submit(env={"CODE": "3"})
    assert slurm.wait(number, "FAILED", "COMPLETED")["ExitCode"] == "3:0"


def pre_empted(slurm, submit, partition):
    """What a job's two starts say that a job of a higher partition has pushed aside."""
    number, log = submit(partition=partition, slots=CPUS - 2, work_s=600)
    slurm.wait(number, "RUNNING")
    time.sleep(2)
    other, _ = submit(partition="high", slots=CPUS - 2)
    slurm.wait(other, "COMPLETED")
    about = slurm.wait(number, "COMPLETED", "FAILED", "PREEMPTED")
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "1")
    return said(log)


def test_pre_emption_leaves_time_to_save_and_the_job_goes_on(slurm, submit):
    first, second = pre_empted(slurm, submit, "low")
    assert (first["got"][0], first["restarts"]) == (10, 0)  # on a busy machine, SIGTERM follows before the job ends
    assert (second["got"], second["restarts"]) == ([], 1)


@pytest.mark.slow
def test_pre_emption_without_grace_is_queued_again_by_slurm(slurm, submit):
    first, second = pre_empted(slurm, submit, "abrupt")
    assert first["got"][-1] == 15  # from Slurm to every process, here right after the signal that was asked for
    assert second["restarts"] == 1


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm, submit):
    number, log = submit(work_s=600)
    slurm.wait(number, "RUNNING")
    time.sleep(2)
    slurm.call("scancel", number)
    slurm.wait(number, "CANCELLED")
    time.sleep(4)
    about = slurm.about(number)
    assert (about["JobState"], about["Restarts"]) == ("CANCELLED", "0")
    assert [one["got"] for one in said(log)] == [[15]]


@pytest.mark.slow
def test_training_goes_on_where_it_was_pre_empted(slurm, submit, tmp_path):
    """First the job's shell is told, then the ranks are, as Slurm does without preempt_send_user_signal."""
    (tmp_path / "slow.py").write_text(SLOW)
    run = {"model": "slow:Net", "data": "digits", "steps": STEPS, "micro_batch": 16, "save_every": 0, "eval_samples": 8}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    usual = {"name": "real", "run": "run.yaml", "output": "out", "nodes": 1, "slots": 2, "device": "cpu"}
    job = SlurmJob(**usual, time="60", partition="low", log="log-%j", setup=f"PATH={Path(sys.executable).parent}:$PATH")
    (tmp_path / "job.sbatch").write_text(sbatch_text(job))
    number = slurm.submit(tmp_path / "job.sbatch")
    log, out = tmp_path / f"log-{number}", tmp_path / "out"

    def steps() -> list[int]:
        metrics = out / "metrics.jsonl"
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def after_more_steps(than: int, tell) -> None:
        deadline = time.monotonic() + 300
        while len(steps()) <= than:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        tell()

    after_more_steps(0, lambda: submit(partition="high", slots=CPUS - 1))
    deadline = time.monotonic() + 300
    while slurm.about(number)["Restarts"] != "1":
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    before = len(steps())
    assert 0 < before < STEPS
    after_more_steps(before, lambda: slurm.call("scancel", "--signal=TERM", number))
    about = slurm.wait(number, "COMPLETED", "FAILED", patience_s=240)
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "2"), log.read_text()
    assert steps() == list(range(1, STEPS + 1))
    assert int(json.loads((out / "result.json").read_text())["resumed_from"][-8:]) > before


@pytest.mark.slow
def test_a_run_saves_before_the_limit_and_goes_on(slurm, near_its_limit):
    number, log = near_its_limit
    about = slurm.wait(number, "COMPLETED", "TIMEOUT", "FAILED", patience_s=200)
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "1")
    first, second = said(log)
    assert (first["got"], second["got"], second["restarts"]) == ([10], [], 1)
    assert first["after_s"] < 120 - 59 + 10  # Slurm looks every few seconds
