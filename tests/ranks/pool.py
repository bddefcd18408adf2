"""Ranks that are started once and train many jobs: a launch costs 10 s and more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerofit.app.training.prepare_folder import make_ready
from zerofit.app.training.train import Gate, prepare
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port, launcher
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import load_run
from zerofit.spec.run_folder import Job, RunFolder

JOB_TIMEOUT_S = 180  # on an idle machine
SHORT = {"eval_samples": 8}  # evaluating everything would take most of the time of a test's run
ROOT = Path(__file__).parents[2]
# this tree's code before whatever is installed, and where else packages lie
PATHS = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "toolkit"), os.environ.get("PYTHONPATH"))))


class Trained:
    """A finished run, as a user finds it in its folder."""

    def __init__(self, folder: RunFolder, job: Job):
        self.folder, self.job = folder, job

    @property
    def steps(self) -> list[dict]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [s["loss"] for s in self.steps]

    @property
    def result(self) -> dict:
        return json.loads(self.folder.result.read_text())


class RankPool:
    """`ranks` processes that wait for jobs."""

    def __init__(self, ranks: int, folder: Path):
        self.ranks, self._inbox, self._number = ranks, folder, 0
        self._process: subprocess.Popen | None = None
        self._used = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the ranks had a job."""
        return time.monotonic() - self._used

    def train(self, output: Path, *, gate: Gate | None = None, **options) -> Trained:
        """What `zerofit train` does with these options, on the waiting ranks, with a short evaluation.

        The test is skipped where NVMe offload cannot be compiled. `gate` gives the memory forecast. Raises what
        preparing raises."""
        run = load_run(None, {"output": output, "ranks": self.ranks, "save_every": "0", **SHORT, **options})
        try:
            prepared = prepare(run, Reporter(), gate=gate)
        except UserError as error:
            if [problem.kind for problem in error.problems] == ["libaio"]:
                pytest.skip(f"{error}: {error.problems[0].hint}")
            raise
        job, folder, machine = prepared.job, prepared.folder, prepared.machine
        make_ready(folder, job.start)
        env = environment(machine.accelerator, machine.cores, self.ranks)
        build_ops(needed_ops(job.ds_config, machine), env, print)
        words = self._submit(folder)
        assert words == ["ok"] * self.ranks, "\n".join(w for w in words if w != "ok")
        return Trained(folder, job)

    def fail(self, output: Path, **options) -> list[dict]:
        """The problems with which every rank stopped."""
        job_folder = prepare(load_run(None, {"output": output, "ranks": self.ranks, **options}), Reporter()).folder
        return [json.loads(word) for word in self._submit(job_folder)]

    def _submit(self, folder: RunFolder) -> list[str]:
        self._start()
        number, self._number = self._number, self._number + 1
        aside = self._inbox / ".job"
        aside.write_text(str(folder.path))
        aside.rename(self._inbox / f"{number:04}.job")
        answers = [self._inbox / f"{number:04}.rank{rank}" for rank in range(self.ranks)]
        start = time.monotonic()
        while not all(path.exists() for path in answers):
            alive = self._process.poll() is None
            failed = [p.read_text() for p in answers if p.exists() and p.read_text() != "ok"]
            if not alive or time.monotonic() - start > JOB_TIMEOUT_S * slowdown() or (failed and _waited(answers)):
                said = "\n".join(failed) or self._said()
                self.close()
                raise AssertionError(said)
            time.sleep(0.01)
        self._used = time.monotonic()
        return [path.read_text() for path in answers]

    def _start(self) -> None:
        if self._process is not None:
            return
        self._inbox = self._inbox / f"pool-{time.time_ns()}"
        self._inbox.mkdir(parents=True)
        self._number = 0
        machine, port = this_machine(), free_port()
        served = ["zerofit.spec.server_process", "tests.ranks.server", str(self._inbox)]
        group = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # forked ranks cannot use GPUs that the process before them has asked for
        forks = machine.accelerator == "cpu"
        argv = [sys.executable, "-m", *served] if forks else [*launcher(self.ranks, port), "--module", *served]
        with (self._inbox / "log").open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment(machine.accelerator, machine.cores, self.ranks) | {"PYTHONPATH": PATHS} | group,
                stdout=log,
                stderr=log,
            )

    def _said(self) -> str:
        """The end of the ranks' output; those that live write where they are."""
        assert self._process is not None
        if self._process.poll() is None:
            for process in psutil.Process(self._process.pid).children(recursive=True):
                if "tests.ranks.server" in process.cmdline()[-3:]:
                    process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        return (self._inbox / "log").read_text()[-8000:]

    def close(self) -> None:
        """End the ranks."""
        if self._process is None:
            return
        (self._inbox / "stop").touch()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(40)
        self._process, self._inbox = None, self._inbox.parent


def slowdown() -> float:
    """Return how much longer than alone a process may take: the processes that want to run, for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _waited(answers: list[Path]) -> bool:
    """Whether the first answer has been there for ten seconds: the other ranks hang."""
    ages = [time.time() - path.stat().st_mtime for path in answers if path.exists()]
    return max(ages) > 10 * slowdown()
