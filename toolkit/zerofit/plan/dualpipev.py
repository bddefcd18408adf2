"""Simulate DualPipeV as DeepSpeed runs it: the order and the times of each rank's actions.

The order is that of deepspeed/runtime/pipe/schedule.py, DualPipeVSchedule. Tests compare both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from zerofit.spec.mesh import parts_of_stage

EXCHANGE = "|"  # send and receive all that was queued since the last exchange (CommitP2P)
_FILLING = "<F0 | F0 F0> "
_TURNING = "| F0 <F0 <F1 | F1 F1> F0> "
_FIRST_BACK = "<B1 | B1 B1> <F1 | | F1 F1> "
_OUT, _BACK = "<F0 <B1 | F0 B1 F0> B1> ", "<F1 <B0 | F1 B0 F1> B0> "
_ENDING = "<B1 | B1 B1> "


@lru_cache(maxsize=1024)
def order(stages: int, stage: int, micro_batches: int) -> tuple[str, ...]:
    """Return the actions of a stage in a step, in order, as strings.

    "F0" is the forward of the next micro batch through the stage's first part. "B1" is the backward through the
    second part. "<F0" queues the receive of F0's input. "F0>" queues the send of F0's output. EXCHANGE runs
    everything that is queued.
    """
    after, last = stages - 1 - stage, stage == stages - 1
    turning = "<F0 " + _TURNING * (stage + 1)
    first = _OUT.removeprefix("<F0 ")
    if last:  # the output of its last F1 is sent together with the output of the next F0
        turning = "F0> ".join(turning.rsplit("F1> F0> ", 1))
        first = "| F0 F1> <B1 | B1 F0> B1> "
    words = (
        _FILLING * (2 * after)
        + turning
        + _FIRST_BACK * after
        + first
        + _BACK
        + (_OUT + _BACK) * (micro_batches - 2 * stages + stage)
        + (_ENDING + _BACK) * after
        + (_ENDING + "<B0 | B0 B0> ") * (stage + 1)
        + ("| <B0 | B0 B0> ") * after
        + "| " * (stage + 2)
    )
    # the first part receives nothing, the last part sends nothing, and the last stage sends to itself
    alone = {"<F0", "B0>", "F1>", "<B1"} if stage == 0 else set[str]()
    alone |= {"F0>", "<B0", "<F1", "B1>"} if last else set()
    return tuple(word for word in words.split() if word not in alone)


class PartSeconds(NamedTuple):
    """Seconds of a micro batch in one part of the layers."""

    forward_s: float
    backward_s: float


# DualPipeV (github.com/deepseek-ai/DualPipe) gives each of p ranks two parts of the model, cut into 2p: rank r has
# parts r and 2p - 1 - r. A micro batch goes down the ranks through the first parts, and back up through the second
# ones. Forwards of one part run at the same time as backwards of the other part, so the pipeline's bubble is smaller
# than with 1F1B:
#
#     rank 0      part 0                      part 2p - 1
#     rank 1         part 1                part 2p - 2
#     ...
#     rank p - 1        part p - 1    part p
#
# The order of each rank is fixed. The times follow from it: a pass starts when its rank is free and its
# input has arrived.
class TimedPass(NamedTuple):
    """One action of a stage in a step, in seconds from its start."""

    stage: int
    word: str  # of `order`; EXCHANGE if something is sent or received
    micro_batch: int  # -1 for an exchange
    start_s: float
    end_s: float


Message = tuple[str, int, int]  # "F" or "B", the part that receives it (of all parts), how many it has received before


def timed_passes(parts: Sequence[Sequence[PartSeconds]], micro_batches: int, send_s: float) -> list[TimedPass]:
    """Return all actions of all stages with their times.

    `parts`: the seconds of each stage's parts. `send_s`: the seconds to send one activation or gradient. An exchange
    begins when all stages that take part have reached it.
    """
    stages = len(parts)
    ranks = [_Rank(stage, stages, parts[stage], micro_batches) for stage in range(stages)]
    posted = defaultdict[Message, list[float]](list)
    waiting = {rank.stage: rank for rank in ranks if rank.work()}
    for rank in ranks:
        rank.arrive(posted)
    while waiting:
        ready = [rank for rank in waiting.values() if all(len(posted[message]) == 2 for message in rank.queued)]
        assert ready, f"DualPipeV on {stages} stages: every stage waits for another stage"
        for rank in ready:
            rank.exchange(posted, send_s)
            if not rank.work():
                del waiting[rank.stage]
        for rank in ready:
            rank.arrive(posted)
    return [done for rank in ranks for done in rank.done]


class _Rank:
    """The state of one stage during a step."""

    def __init__(self, stage: int, stages: int, parts: Sequence[PartSeconds], micro_batches: int):
        self.stage, self.now_s = stage, 0.0
        self.queued: list[Message] = []
        self.done: list[TimedPass] = []
        self._words: Iterator[str] = iter(order(stages, stage, micro_batches))
        self._seconds, self._counts = parts, Counter[str]()
        self._parts, self._sent = parts_of_stage(stage, stages, "dualpipev"), 0

    def work(self) -> bool:
        """Run up to the next exchange with another stage. Return False if there is none."""
        for word in self._words:
            number = self._counts[word]
            self._counts[word] += 1
            if word == EXCHANGE and self.queued:
                return True
            if len(word) == 2:
                start_s, seconds = self.now_s, self._seconds[int(word[1])]
                self.now_s += seconds.forward_s if word[0] == "F" else seconds.backward_s
                self.done.append(TimedPass(self.stage, word, number, start_s, self.now_s))
            elif word != EXCHANGE:
                self._queue(word, number)
        return False

    def arrive(self, posted: defaultdict[Message, list[float]]) -> None:
        for message in self.queued:
            posted[message].append(self.now_s)

    def exchange(self, posted: defaultdict[Message, list[float]], send_s: float) -> None:
        """Send and receive at the same time, one message after the other in each direction."""
        start_s = max(time for message in self.queued for time in posted[message])
        self.now_s = start_s + send_s * max(self._sent, len(self.queued) - self._sent)
        self.done.append(TimedPass(self.stage, EXCHANGE, -1, start_s, self.now_s))
        self.queued, self._sent = [], 0

    def _queue(self, word: str, number: int) -> None:
        sends = word.endswith(">")
        direction, part = word.strip("<>")
        # a message is named by the part that receives it: the next part for a forward, the part before for a backward
        onward = 0 if not sends else 1 if direction == "F" else -1
        self.queued.append((direction, self._parts[int(part)] + onward, number))
        self._sent += sends
