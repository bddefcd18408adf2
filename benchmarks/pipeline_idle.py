"""How long do the ranks of a pipeline wait, in one forward, one backward and in DualPipeV?

    python -m benchmarks.pipeline_idle [--output benchmarks/results/pipeline_idle.json]

DeepSpeed's own schedules (runtime/pipe/schedule.py) are followed instruction by instruction on a clock: equal layers,
a backward that takes twice a forward's time, sends and receives that take no time and that both ends wait for. Idle is
the share of the step in which a rank computes nothing. No rank is started.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe import schedule

from zerofit.spec.local_machine import versions
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.run import PipelineSchedule

FORWARD, BACKWARD = 1.0, 2.0  # of one rank's layers; a part of DualPipeV's is half of them
SCHEDULES: dict[PipelineSchedule, Any] = {"1f1b": schedule.TrainSchedule, "dualpipev": schedule.DualPipeVSchedule}
STAGES, TIMES = (2, 4, 8, 16), (1, 2, 4)  # micro batches: so many times the fewest that DualPipeV takes
SENDS = (schedule.SendActivation, schedule.SendGrad)
RECEIVES = (schedule.RecvActivation, schedule.RecvGrad)

Message = tuple[int, int, str, int]  # from, to, what, which of these


class Rank:
    """One stage on its way through the schedule."""

    def __init__(self, kind: PipelineSchedule, micro_batches: int, stages: int, stage: int):
        self.now, self.worked, self.stage = 0.0, 0.0, stage
        self._kind, self._share = kind, stages / pipeline_parts(stages, kind)
        self._counts: defaultdict[tuple, int] = defaultdict(int)
        steps = SCHEDULES[kind](micro_batches=micro_batches, stages=stages, stage_id=stage)
        self._instructions = (one for step in steps for one in step)

    def waits(self) -> Iterator[list[Message]]:
        """Compute, and yield what both ends must have come to before this rank goes on."""
        queued: list[Message] = []
        for one in self._instructions:
            if isinstance(one, SENDS + RECEIVES):
                queued.append(self._message(one))
            if isinstance(one, schedule.ForwardPass | schedule.BackwardPass):
                seconds = self._share * (FORWARD if isinstance(one, schedule.ForwardPass) else BACKWARD)
                self.now, self.worked = self.now + seconds, self.worked + seconds
            elif queued and (self._kind == "1f1b" or isinstance(one, schedule.CommitP2P)):
                yield queued
                queued = []

    def _message(self, one: Any) -> Message:
        onward = isinstance(one, schedule.SendActivation | schedule.RecvGrad) == (getattr(one, "phase", 0) == 0)
        peer = self.stage + (1 if onward else -1)
        sends, what = isinstance(one, SENDS), type(one).__name__[4:] + str(getattr(one, "phase", 0))
        ends = (self.stage, peer) if sends else (peer, self.stage)
        number = self._counts[ends, what]
        self._counts[ends, what] += 1
        return (*ends, what, number)


def idle_share(kind: PipelineSchedule, stages: int, micro_batches: int) -> float:
    """Return the share of a step in which the ranks wait, on average."""
    ranks = [Rank(kind, micro_batches, stages, stage) for stage in range(stages)]
    ways = {rank.stage: rank.waits() for rank in ranks}
    waiting: dict[int, list[Message]] = {stage: next(way) for stage, way in ways.items()}
    arrived: defaultdict[Message, dict[int, float]] = defaultdict(dict)
    while waiting:
        for stage, messages in waiting.items():
            for message in messages:
                arrived[message][stage] = ranks[stage].now
        ready = [stage for stage, messages in waiting.items() if all(len(arrived[m]) == 2 for m in messages)]
        assert ready, f"{kind} on {stages} stages: every rank waits for another one"
        for stage in ready:
            ranks[stage].now = max(time for m in waiting.pop(stage) for time in arrived[m].values())
            messages = next(ways[stage], None)
            if messages is not None:
                waiting[stage] = messages
    whole = max(rank.now for rank in ranks)
    return 1 - sum(rank.worked for rank in ranks) / (stages * whole)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    output = parser.parse_args().output
    rows = []
    for stages in STAGES:
        for times in TIMES:
            micro_batches = times * pipeline_parts(stages, "dualpipev")
            idle = {kind: round(idle_share(kind, stages, micro_batches), 4) for kind in SCHEDULES}
            rows.append({"stages": stages, "micro_batches": micro_batches, "idle": idle})
            print(rows[-1])
    if output:
        result = {"date": date.today().isoformat(), "versions": versions(), "backward_over_forward": BACKWARD / FORWARD}
        output.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
