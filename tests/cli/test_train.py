"""The whole path: from the command, through the launcher, to the run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from zerofit.app.training.result import TrainingResult
from zerofit.cli.main import main
from zerofit.cli.train import DEFAULT_JOB, _default_job, show
from zerofit.spec.run import Run

KEYS = {
    *("run_dir", "steps", "samples", "tokens", "train_loss", "eval", "samples_per_s", "tokens_per_s", "world_size"),
    *("layout", "resumed_from", "against_forecast"),
}
MLP = ("mlp", "--data", "digits", "--json")
PATIENCE_S = 300  # of a machine on which everything else runs, too
STARTED: list[subprocess.Popen] = []


def zerofit(*args: str, cwd: Path, behind: tuple[str, ...] = ()) -> subprocess.Popen:
    """As from a terminal: where the tests run in the background, their children would ignore Ctrl-C."""
    argv = [*behind, sys.executable, "-m", "zerofit.cli", "train", *args]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    STARTED.append(subprocess.Popen(argv, cwd=cwd, **pipes, text=True, preexec_fn=heed))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def no_run_outlives_its_test():
    """An endless run of a failed test would slow down all tests after it. The ranks end with the command."""
    yield
    while STARTED:
        STARTED.pop().kill()


@pytest.mark.versions(of="deepspeed")
def test_a_run_file_with_a_flag_over_it(tmp_path, monkeypatch):
    """Every step also goes to W&B, offline: its file holds each value as JSON text, as metrics.jsonl does.

    Triton's bindings would report objects that are left at the end.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "run.yaml").write_text("model: mlp\ndata: digits\nsteps: 7\nlr: 1.0e-2\nds_config: zero1\n")
    process = zerofit(
        "run.yaml", "--steps", "30", "--eval-every", "15", "--json", "--ranks", "2", "--wandb", "tests", cwd=tmp_path
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    result = json.loads(out.strip().splitlines()[-1])
    assert set(result) >= KEYS
    assert (result["steps"], result["samples"], result["tokens"], result["world_size"]) == (30, 480, None, 2)
    assert result["layout"] == {"dp": 2, "tp": 1, "pp": 1, "sp": 1, "ep": 1, "zero_stage": 1}
    assert set(result["eval"]) == {"loss", "accuracy"}
    assert "step 30" in err
    forecast = result["against_forecast"]["memory_bytes"]["forecast"]
    assert f" of {forecast / 2**30:.2f} GiB forecast" in err
    assert "validation" in err
    assert "nanobind" not in err and "leaked" not in err

    folder = Path(result["run_dir"])
    assert folder.parent == tmp_path / "runs"
    names = {p.name for p in folder.iterdir()}
    assert names >= {"run.json", "ds_config.json", "metrics.jsonl", "logs", "env.json", "model", "result.json"}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 30
    (written,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    assert all(json.dumps(step["loss"]).encode() in content for step in steps)
    assert content.count(b"train/loss") >= 30
    assert json.loads((folder / "run.json").read_text())["lr"] == 0.01
    assert json.loads((folder / "ds_config.json").read_text())["zero_optimization"]["stage"] == 1
    assert {p.name for p in (folder / "logs").iterdir()} >= {"rank-0.log", "rank-1.log", "launcher.log"}
    env = json.loads((folder / "env.json").read_text())
    assert set(env["versions"]) == {"zerofit", "torch", "torchvision", "deepspeed", "transformers", "accelerate"}


def test_the_end_shows_what_was_measured_beside_its_forecast(capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")  # else the end says how to get the command
    row = {"measured": 3 << 29, "forecast": 1 << 30, "difference": 0.5}
    result = TrainingResult(
        run_dir="my run",
        steps=3,
        samples=24,
        tokens=None,
        train_loss=1.0,
        eval={},
        samples_per_s=8.0,
        tokens_per_s=None,
        world_size=1,
        layout={"dp": 1, "zero_stage": 0},
        resumed_from=None,
        against_forecast={"memory_bytes": row, "step_s": {"measured": 1.25, "forecast": None, "difference": None}},
    )
    show(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "DONE  3 steps on 1 rank, ZeRO-0"
    shown = {line[:23].rstrip(): line[23:] for line in lines[2 : lines.index("next")]}
    assert shown == {
        "run folder": "my run",
        "training loss": "1.00",
        "process memory": "1.50 GiB  (1.00 GiB forecast, +50.0%)",
        "step time": "1.25 s  (not forecast)",
    }
    assert lines[lines.index("next") + 1 :] == [
        "  zerofit eval 'my run'",
        "  zerofit report 'my run'",
        "  zerofit ckpt export 'my run' exported",
    ]
    for chats, way in ((None, "--prompt def"), ({"conversations": 9}, "--chat")):
        show(replace(result, sample="def f():\n    pass", conversations=chats))
        assert f"  zerofit generate 'my run' {way}" in capsys.readouterr().out.splitlines()


def waiting_for_steps(process: subprocess.Popen, metrics: Path, more_than: int = 3) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_text().count("\n") > more_than):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [process for process in children if "zerofit.worker" in process.cmdline()]


def test_a_request_to_stop_saves_the_same_command_goes_on_and_ctrl_c_leaves_no_rank_behind(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    endless = (*MLP, "--steps", "1000000", "--output", "run", "--log-every", "1000000")
    process = zerofit(*endless, cwd=tmp_path, behind=("nohup",))
    waiting_for_steps(process, metrics)
    workers = workers_of(process)
    os.kill(process.pid, signal.SIGHUP)  # the terminal is closed, which nohup is there for
    waiting_for_steps(process, metrics, metrics.read_text().count("\n") + 20)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    error = json.loads(out.strip().splitlines()[-1])["error"]
    assert error["kind"] == "stopped"
    assert "zerofit train" in error["hint"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))

    damaged = next((checkpoint / "state").iterdir())
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    process = zerofit("run", "--json", cwd=tmp_path)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2  # there is nothing whole to go on from, and beginning anew would hide it
    assert json.loads(out.strip().splitlines()[-1])["error"]["kind"] == "checkpoint-damaged"
    damaged.write_bytes(content)

    process = zerofit(*endless, cwd=tmp_path)
    waiting_for_steps(process, metrics, step + 3)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        for left in (*workers, process):  # a failure here is not to slow down all tests after it
            with suppress(psutil.NoSuchProcess):
                left.kill()
    assert f"resuming from step {step}" in err
    lines = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_model_that_throws_is_reported_with_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "throwing.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(64, 10)\n"
        "    def forward(self, x):\n        raise ValueError('no luck today')\n"
    )
    words = ["train", "throwing:Net", "--data", "digits", "--ranks", "1", "--json", "--output", "run"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 3
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "no luck today" in error["message"]
    assert Path(error["where"]).read_text().count("Traceback") >= 1
    assert "Traceback" not in done.stderr


def test_a_rank_that_hangs_is_named_and_all_are_stopped(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(64, 10)\n        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls > 200 and os.environ['RANK'] == '1':\n            time.sleep(1000)\n"
        "        return super().forward(x.flatten(1))\n"
    )
    arguments = ["mine:Net", "--data", "digits", "--json", "--output", "run", "--heartbeat-timeout", "5"]
    process = zerofit(*arguments, "--steps", "100000", cwd=tmp_path)
    waiting_for_steps(process, tmp_path / "run" / "metrics.jsonl")
    workers = workers_of(process)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    error = json.loads(out.strip().splitlines()[-1])["error"]
    assert error["kind"] == "hang"
    assert "rank 1 on localhost is at step 201, forward (train/engines.py" in error["message"]
    assert "rank 0 on localhost at step 201, backward, in all_reduce" in error["message"]
    stacks = (Path(error["where"]) / "rank-1.stacks.txt").read_text()
    assert "forward (mine.py" in stacks or 'mine.py", line 9 in forward' in stacks  # py-spy's words, or faulthandler's
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_default_job_says_what_is_there_and_goes_on_with_an_unfinished_run(tmp_path):
    runs = tmp_path / "runs"
    assert _default_job(runs) == (DEFAULT_JOB, "")
    folder = runs / "llama-tiny-pysource-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(Run(**DEFAULT_JOB).model_dump_json())
    other = runs / "lenet"
    other.mkdir()
    (other / "run.json").write_text(Run(model="lenet").model_dump_json())  # newer, and another run
    job, text = _default_job(runs)
    assert job == DEFAULT_JOB and str(folder) in text and "before its first checkpoint" in text
    (folder / "checkpoints" / "step-00000200").mkdir(parents=True)
    job, text = _default_job(runs)
    assert job == {**DEFAULT_JOB, "output": folder} and "resuming" in text
    (folder / "result.json").write_text("{}")
    job, text = _default_job(runs)
    assert job == DEFAULT_JOB and "complete" in text and "new one" in text
