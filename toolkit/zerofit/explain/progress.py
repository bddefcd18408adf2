"""Read a run's progress, and DeepSpeed's lines about memory use, from its log."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from zerofit.explain.data import any_of, read_data
from zerofit.explain.log import LogLine
from zerofit.explain.tracebacks import ERROR_LINE, frames_before

GIB = 1 << 30
GROWING = 4  # number of readings at one place that must each grow to count as a leak

_BAR = re.compile(r"^(?P<about>[^|%]*?):?\s*\d+%\|.*?\|\s*(?P<done>\d+)/(?P<total>\d+) \[")
_NO_TRAINING = re.compile(
    r"load|shard|map|token|generat|download|fetch|eval|valid|predict|filter|proces|pack|split|saving|sanity|test", re.I
)
_STEP = re.compile(
    r"(?:\b(?:global_)?step(?:s|_?num|_count)?|\biter(?:ation)?s?|\bIter)\b(?:/max_steps)?['\"]?\s*[=: \[]\s*['\"]?"
    r"(?P<step>\d+)",
    re.I,
)
_LOSS = re.compile(r"['\"]?\b(?:train_|train/)?loss['\"]?\s*[:=]\s*['\"]?\d", re.I)
_MEMORY = re.compile(r"\bMA ([\d.]+) GB\s+Max_MA")
_HOST = re.compile(r"CPU Virtual Memory: *used = ([\d.]+) GB, percent = ([\d.]+)%")
_LABEL = re.compile(r"see_memory_usage\] *(?P<text>.*)")


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """The figures that DeepSpeed's see_memory_usage printed at one place of a run."""

    label: str
    allocated_bytes: int
    host_bytes: int = 0
    host_share: float = 0.0  # share of the host's memory that is used


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run before its error."""

    steps: int = 0  # number of steps or losses in the log; also 0 if the run prints none
    last_step: int = 0  # the last line but one of a new step or loss
    last_bar: int = 0  # the same for progress bars, which are written without a buffer
    activity: str = ""  # the last phase before training that the log names
    readings: tuple[MemoryReading, ...] = ()

    @property
    def leak(self) -> tuple[str, int, int] | None:
        """A label whose readings grow every time, with its first and last reading in bytes."""
        for label in {reading.label for reading in self.readings}:
            sizes = [r.allocated_bytes for r in self.readings if r.label == label][-10:]
            later = sizes[1:]  # the first step allocates the optimizer's state
            rising = all(a < b for a, b in pairwise(later))
            if len(later) >= GROWING and rising and later[-1] > 1.05 * later[0]:
                return label, later[0], later[-1]
        return None


def went_on_after(lines: Sequence[LogLine], error: int, progress: Progress) -> bool:
    """Return whether the run continued after the message on line number `error`.

    `progress`: the progress of all `lines`.
    """
    # One step proves nothing: another rank may end its step after the error. So `last_step` is the last step but one.
    # Progress bars have no buffer, so they prove that the run continued.
    if progress.last_bar > error or progress.last_step <= error:
        return progress.last_bar > error
    # An uncaught exception ends the process. Steps may come after it, from the buffer of standard output (`python -m`)
    # or from the log of another rank.
    line = lines[bisect_left(lines, error, key=lambda line: line.number)].text
    if _LOSS.search(line) and not ERROR_LINE.match(line):
        return True  # a step of the program, not the message of a traceback before it
    frames = frames_before(lines, error)
    return not frames or (frames[0].name != "<module>" and "runpy" not in frames[0].file)


@cache
def _activities() -> list[tuple[re.Pattern[str], str]]:
    return [(any_of(patterns), name) for name, patterns in read_data("phases.yaml")["log"].items()]


def progress_before(lines: Sequence[LogLine], error: int) -> Progress:
    """Return the progress of the run at a line of its log."""
    # programs show steps in three ways: progress bars, losses with a step's number, and losses alone
    steps, losses, activity, label = 0, 0, "", ""
    numbers: set[int] = set()
    latest: int | None = None  # number of the last step
    bars, printed = deque([0, 0], 2), deque([0, 0], 2)  # lines of the last two new steps, in bars and with a loss
    highest: dict[str, int] = {}  # total of a bar -> steps done in its epoch
    readings: list[MemoryReading] = []
    activities = _activities()
    for line in lines:
        text = line.text
        if line.number >= error:
            break
        # the words are cheap tests before the slow patterns
        if "%|" in text and (bar := _BAR.match(text.strip())) and not _NO_TRAINING.search(bar["about"]):
            done = int(bar["done"])
            # Bars of an epoch and of the whole run have different totals. A bar that restarts at 0 begins a new epoch.
            if done > highest.get(bar["total"], 0):  # the bar is also drawn between two steps
                steps, activity = max(steps, done), ""
                bars.append(line.number)
            highest[bar["total"]] = max(done, highest.get(bar["total"], 0)) if done else 0
        elif "loss" in text.lower() and _LOSS.search(text) and "train_runtime" not in text:
            losses, activity = losses + 1, ""
            step = _STEP.search(text)
            if step is None or int(step["step"]) != latest:
                printed.append(line.number)
            if step:
                latest = int(step["step"])
                numbers.add(latest)
        activity = next((name for pattern, name in activities if pattern.search(text)), activity)
        if "Max_MA" in text and (memory := _MEMORY.search(text)):
            readings.append(MemoryReading(label=label, allocated_bytes=int(float(memory[1]) * GIB)))
        elif (host := _HOST.search(text)) and readings:
            used, share = int(float(host[1]) * GIB), float(host[2]) / 100
            readings[-1] = replace(readings[-1], host_bytes=used, host_share=share)
        elif named := _LABEL.search(text):
            label = named["text"]
    # several ranks may print each step, so numbers are better than lines; the first number is 0 or 1
    steps = max(steps, len(numbers) or losses, *numbers)
    return Progress(
        steps=steps,
        last_step=max(bars[0], printed[0]),
        last_bar=bars[0],
        activity=activity,
        readings=tuple(readings),
    )
