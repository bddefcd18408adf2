"""sbatch files: nothing of a user's runs in a shell, signals reach the run, and what stopped is queued again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.hostile import HOSTILE, LINES
from zerofit.launch.job_file import SlurmJob, sbatch_text, seconds, write_once
from zerofit.spec.errors import UserError

ZEROFIT = """#!{python} -I
import json, os, signal, sys, time
got = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
record = {{"argv": sys.argv[1:], "env": dict(os.environ)}}
open("started.part", "w").write(json.dumps(record))
os.rename("started.part", "started")
until = time.monotonic() + float(os.environ.get("WORK_S", "0"))
while time.monotonic() < until and not got:
    time.sleep(0.02)
time.sleep(float(os.environ.get("SAVE_S", "0")))
open("signals", "w").write(json.dumps([int(number) for number in got]))
sys.exit(int(os.environ["CODE"]))
"""
SCONTROL = """#!/bin/bash
printf '%s\\n' "$@" >> scontrol
"""
SQUEUE = """#!/bin/bash
echo "${STATE:-RUNNING}"
"""


def job(**changes) -> SlurmJob:
    usual = {"name": "n", "run": "run.yaml", "output": "runs/a", "nodes": 2, "slots": 4, "device": "gpu", "time": "60"}
    return SlurmJob(**usual | changes)


@pytest.fixture
def start(tmp_path):
    """Starts a job's file under bash as a Slurm batch step would, with stand-ins for every program that it calls."""
    programs = {"zerofit": ZEROFIT.format(python=sys.executable), "scontrol": SCONTROL, "squeue": SQUEUE}
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def started(asked: SlurmJob, code: int = 0, **env: str) -> subprocess.Popen[bytes]:
        (tmp_path / "job.sbatch").write_text(sbatch_text(asked))
        known = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "17", "CODE": str(code)}
        return subprocess.Popen(["bash", tmp_path / "job.sbatch"], cwd=tmp_path / "work", env=known | env)

    return started


def appeared(path, patience_s: float = 10.0):
    deadline = time.monotonic() + patience_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def requeued(tmp_path) -> list[str]:
    path = tmp_path / "work" / "scontrol"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("text", [*HOSTILE, *LINES])
def test_arguments_and_environment_arrive_as_they_are(start, tmp_path, text):
    asked = job(
        run=text, output=text, flags=("--lr", text), env={"VALUE": text}, name="n" + text if text.isprintable() else "n"
    )
    assert start(asked).wait(10) == 0
    record = json.loads((tmp_path / "work" / "started").read_text())
    assert record["argv"] == [
        "launch",
        "--launcher",
        "slurm",
        f"--output={text}",
        "--env=VALUE",
        "--lr",
        text,
        "--",
        text,
    ]
    assert record["env"]["VALUE"] == text
    assert sorted(os.listdir(tmp_path / "work")) == ["signals", "started"]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck (Debian: shellcheck)")
@pytest.mark.parametrize("text", ["plain", *HOSTILE, *LINES])
def test_shellcheck_finds_nothing(tmp_path, text):
    asked = job(run=text, output=text, flags=(text,), env={"VALUE": text}, setup="source venv/bin/activate; cd $x")
    (tmp_path / "job.sbatch").write_text(sbatch_text(asked))
    done = subprocess.run(["shellcheck", tmp_path / "job.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_options():
    text = sbatch_text(job(name='a "b" \\ #c', partition="gpu,big", account="me", save_s=120))
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        '#SBATCH --job-name="a \\"b\\" \\\\ #c"',
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=60",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --partition=gpu,big",
        "#SBATCH --account=me",
        "#SBATCH --output=slurm-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    assert "gpus" not in sbatch_text(job(device="cpu"))
    assert "#SBATCH --no-requeue" in sbatch_text(job(requeue=False))


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, 137])
def test_exit_codes_are_handed_on_and_nothing_is_queued(start, tmp_path, code):
    assert start(job(), code).wait(10) == code
    assert requeued(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "again"), [("RUNNING", ["requeue", "17"]), ("CANCELLED", []), ("COMPLETING", []), ("PENDING", [])]
)
def test_a_run_that_was_stopped_is_queued_again_unless_the_job_was_cancelled(start, tmp_path, state, again):
    assert start(job(), 75, STATE=state).wait(10) == 75
    assert requeued(tmp_path) == again


def test_nothing_is_queued_again_where_that_was_not_asked_for(start, tmp_path):
    assert start(job(requeue=False), 75).wait(10) == 75
    assert requeued(tmp_path) == []


def test_the_signal_before_the_limit_reaches_the_run_once(start, tmp_path):
    process = start(job(), 75, WORK_S="20", SAVE_S="1")
    appeared(tmp_path / "work" / "started")
    for _ in range(3):  # Slurm may send it again, and `wait` ends at each
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert process.wait(10) == 75
    assert json.loads((tmp_path / "work" / "signals").read_text()) == [signal.SIGUSR1]
    assert requeued(tmp_path) == ["requeue", "17"]


def test_a_termination_which_slurm_sends_to_all_processes_is_not_handed_on(start, tmp_path):
    process = start(job(), 75, WORK_S="2")
    appeared(tmp_path / "work" / "started")
    process.terminate()
    assert process.wait(10) == 75
    assert json.loads((tmp_path / "work" / "signals").read_text()) == []


def test_asked_before_there_was_anything_to_save(start, tmp_path):
    process = start(job(), 130, WORK_S="20")
    appeared(tmp_path / "work" / "started")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 130
    assert requeued(tmp_path) == ["requeue", "17"]


def test_the_setup_line_is_a_command_and_its_failure_ends_the_job(start, tmp_path):
    assert start(job(setup="export WHERE=here # a comment")).wait(10) == 0
    assert json.loads((tmp_path / "work" / "started").read_text())["env"]["WHERE"] == "here"
    (tmp_path / "work" / "started").unlink()
    assert start(job(setup="(exit 4)")).wait(10) == 4
    assert not (tmp_path / "work" / "started").exists()


def test_everything_that_cannot_be_written_is_named_at_once():
    asked = job(
        name="two\nlines", partition="", log="a\\b", nodes=0, setup="a\nb", run="a\0", env={"1A": "b\r\n"}, time="5"
    )
    with pytest.raises(UserError) as caught:
        sbatch_text(asked)
    places = [p.where for p in caught.value.problems]
    assert places == [
        "--nodes",
        "--job-name",
        "--partition",
        "--log",
        "--setup",
        "RUN",
        "--env",
        "--env",
        "--time",
    ]


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        *[("90", 5400), ("90:30", 5430), ("1:02:03", 3723), ("2-12", 216000), ("1-1:30", 91800), ("0-0:0:9", 9)],
        *[("0", None), ("1h", None), ("UNLIMITED", None), ("1:2:3:4", None), ("٣", None), ("", None)],
    ],
)
def test_time_limits(time, expected):
    assert seconds(time) == expected


def test_a_file_is_never_written_over_another(tmp_path):
    path = tmp_path / "job.sbatch"
    assert write_once(path, "a") is True
    assert write_once(path, "a") is False
    for place, kind in ((path, "output-exists"), (tmp_path, "output-exists"), (tmp_path / "no" / "f", "unwritable")):
        with pytest.raises(UserError) as caught:
            write_once(place, "b")
        assert [p.kind for p in caught.value.problems] == [kind]
    assert path.read_text() == "a"
