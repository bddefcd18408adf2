"""Real and simulated ranks on demand, each a process forked from a server that has imported all: 0.1 s, not 10."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from zerofit.launch.local import free_port
from zerofit.simulate.record import SimulationTarget

from .meter import build
from .script_task import ScriptTask

ROOT = Path(__file__).parents[2]
# no GPU: none is asked for, and processes that have asked for one cannot be forked
PATHS = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "toolkit"), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {"PYTHONPATH": PATHS, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
TIMEOUT_S = 1300  # longer than the server's
POLL_S = 0.5


class Ranks:
    """A server of ranks; a context manager. `show` hears what is going on twice a second."""

    def __init__(self, folder: Path, show: Callable[[str], None] = lambda text: None):
        self._folder, self.show = folder, show
        build(show)
        folder.mkdir(parents=True, exist_ok=True)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with (folder / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.meter.server", str(folder)],
                cwd=ROOT,
                env=os.environ | one_thread | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._server.stdin and self._server.stdout
        self._to, self._from = self._server.stdin, self._server.stdout
        self._receive("starting the server of ranks")

    def real(self, target: SimulationTarget) -> list[dict[str, Any]]:
        """All ranks of the target's job, trained for real at the same time; each one's phases."""
        return self._all("metered", target, "training")

    def built(self, target: SimulationTarget) -> list[dict[str, Any]]:
        """The same ranks, which end when they have their model."""
        return self._all("built", target, "building")

    def simulated(self, target: SimulationTarget, ranks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """The same ranks, or these of them, simulated (`tally.simulated`)."""
        chosen = [replace(target, rank=rank) for rank in ranks or range(target.job.layout.world_size)]
        return self._ask("simulated", chosen, "simulating")

    def planned(self, target: SimulationTarget) -> dict[str, Any]:
        """The forecast of `zerofit plan` for the rank that needs most."""
        return self._ask("planned", [target], "forecasting")[0]

    def script(self, call: str, task: ScriptTask, ranks: Sequence[int] = ()) -> list[dict[str, Any]]:
        """All ranks of a script, or these, at the same time: "script_metered" for real, or "script_simulated"."""
        chosen = [replace(task, rank=rank) for rank in ranks or range(task.ranks)]
        return self._ask(call, chosen, call.replace("_", " "))

    def _all(self, call: str, target: SimulationTarget, doing: str) -> list[dict[str, Any]]:
        return self._ask(call, [replace(target, rank=rank) for rank in range(target.job.layout.world_size)], doing)

    def _ask(self, call: str, targets: Sequence[SimulationTarget | ScriptTask], doing: str) -> list[dict[str, Any]]:
        port = free_port()
        tasks = [{"call": call, "target": target.as_dict(), "port": port} for target in targets]
        self._to.write(json.dumps(tasks) + "\n")
        self._to.flush()
        answers = self._receive(f"{doing} {len(tasks)} rank{'s' * (len(tasks) > 1)}")
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"{doing} rank {rank} failed:\n{answer['error']}")
        return answers

    def _receive(self, doing: str) -> Any:
        start = time.monotonic()
        while not select.select([self._from], [], [], POLL_S)[0]:
            waited_s = time.monotonic() - start
            self.show(f"{doing} ({waited_s:.0f} s)")
            if waited_s > TIMEOUT_S:
                raise RuntimeError(f"{doing}: no answer in {TIMEOUT_S} s")
        line = self._from.readline()
        if not line:
            raise RuntimeError(f"the server of ranks ended:\n{(self._folder / 'server.log').read_text()[-4000:]}")
        return json.loads(line)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._to.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
