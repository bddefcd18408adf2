"""Taking turns: several trainings are alive at once, one of them runs, the others sleep.

The referee (`benchmarks/overhead.py`) and each rank talk over a local socket in lines of JSON. A rank says who it is,
waits for "go", trains one turn of steps, answers with the seconds that it took and the CPU seconds that it used, and so
on; at last it sends its losses.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 300


class Line:
    """One end of a connection that carries JSON values, one a line."""

    def __init__(self, connection: socket.socket):
        self._file = connection.makefile("rw", encoding="utf-8")

    def send(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the other end is gone")
        return json.loads(line)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a contender does in one turn."""

    settle: int  # steps that are not timed: caches and CPUs wake up
    timed: int

    @property
    def steps(self) -> int:
        return self.settle + self.timed


class Player:
    """A rank's side: `step` is called at the beginning of each training step and sleeps where it is others' turn.

    What is timed runs from the beginning of one step to the beginning of a later one, so that nothing that a contender
    does in between (loading data, logging, bookkeeping) is left out.
    """

    def __init__(self, path: Path, contender: str, turn: Turn, turns: int):
        self._turn, self._left = turn, turns
        self._number = 0  # of the step that begins, in this turn
        self._start = (0.0, 0.0)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        self._line = Line(connection)
        self._line.send({"contender": contender, "rank": int(os.environ["RANK"])})
        self._slept_before = False

    def step(self) -> bool:
        """Whether this call slept."""
        if self._number == self._turn.steps:
            self._end()
        slept = self._number == 0 and self._left > 0
        if slept:
            self._begin()
        if self._number == self._turn.settle:
            synchronize()
            self._start = clocks()
        self._number += 1
        return slept

    def finish(self, losses: list[float] | None) -> None:
        """Hand over this rank's loss of each step, or None where it has only what another rank has, too."""
        self._line.send(losses)

    def _begin(self) -> None:
        import torch.distributed as dist

        assert self._line.receive() == "go"
        dist.barrier()

    def _end(self) -> None:
        synchronize()
        self._line.send([now - then for now, then in zip(clocks(), self._start, strict=True)])
        self._number, self._left = 0, self._left - 1


def clocks() -> tuple[float, float]:
    """Seconds of the wall's clock, and CPU seconds of all threads of this process."""
    return time.perf_counter(), time.process_time()


def synchronize() -> None:
    """Wait until the device has done all that it was told to do."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    assert accelerator
    accelerator.synchronize()
