"""Read the traceback before an error message: the user's line, and the training phase."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from zerofit.explain.data import any_of, read_data
from zerofit.explain.log import TRACEBACK, LogLine

LOOKED_BACK = 400  # lines; a traceback through a large model and DeepSpeed has some 120

LOADING, INIT, FORWARD, LOSS, BACKWARD, STEP = "loading", "init", "forward", "loss", "backward", "step"
EVALUATION, KEPT_LOGITS, GENERATION, SAVING, DATA = "evaluation", "kept logits", "generation", "saving", "data"

CODE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception)\b")
_NOTEBOOK = re.compile(
    r"^\s*(?:File )?(?P<file>(?:~|/|\w:|<ipython|Cell )[^:(]*?)(?::(?P<line>\d+))?,? in (?P<name>.+)$"
)
_CELL = re.compile(r"^(?P<file>Cell In ?\[\d+\]), line (?P<line>\d+)(?:, in (?P<name>.+))?$")
# rich wraps at its width: the function's name, or the end of the path, may be on the next line
_RICH = re.compile(r"^[│|]\s*(?P<file>\S+\.py):(?P<line>\d+) in\b *(?P<name>[^\s│|]*)")
_RICH_PATH = re.compile(r"^[│|]\s*(?P<file>(?:/|\w:)\S*)\s*[│|]$")
_ARROW = re.compile(r"^\s*(?:-+>|[│|]?\s*❱)\s*(?P<line>\d+)?\s*(?P<code>.*)")
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib/python3|<frozen |^<(?!ipython|stdin)|torch_extensions/|/tmp/torchinductor|zerofit/"
)
# a launcher's own traceback says nothing about the program
_LAUNCHER = re.compile(r"torch/distributed/(?:run|launcher|elastic)\b|accelerate/commands/|deepspeed/launcher/")


@dataclass(frozen=True, slots=True)
class CodeFrame:
    """One call of a traceback."""

    file: str
    line: int
    name: str  # of the function
    code: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the call is in the user's code, not in a library."""
        return not _LIBRARY.search(self.file.replace("\\", "/"))

    @property
    def place(self) -> str:
        """File and line, like `train.py:44`. Paths of libraries start below site-packages."""
        path = re.sub(r"^.*(?:(?:site|dist)-packages|toolkit)/", "", self.file.replace("\\", "/"))
        return f"{path}:{self.line}" if self.line else path


def frames_before(lines: Sequence[LogLine], error: int) -> list[CodeFrame]:
    """Return the calls of the traceback that ends at line number `error`, outermost first.

    [] if there is none, or only a launcher's.
    """
    at = bisect_left(lines, error, key=lambda line: line.number)
    rank = lines[at].rank if at < len(lines) else ""
    found: list[CodeFrame] = []
    # read backwards, the code of a call comes before its place; notebooks and rich mark one of several lines
    code = arrow = ""
    number = 0
    for line in reversed(lines[max(0, at - LOOKED_BACK) : at]):
        if line.rank != rank:
            continue
        if TRACEBACK in line.text:
            break
        # _NOTEBOOK comes last: its loose pattern also matches lines of the other forms.
        match = CODE_LINE.match(line.text) or _RICH.match(line.text) or _CELL.match(line.text)
        match = match or _NOTEBOOK.match(line.text)
        if match:
            file, called = match["file"].strip(), (match["name"] or "").strip()
            called = called or (code if match.re is _RICH else "")
            found.append(CodeFrame(file, int(match["line"] or number), called, arrow or code))
            code, arrow, number = "", "", 0
        elif found and not code + arrow and (start := _RICH_PATH.match(line.text)):
            found[-1] = replace(found[-1], file=start["file"] + found[-1].file)
        elif (marked := _ARROW.match(line.text)) and not arrow:
            arrow, number = marked["code"], int(marked["line"] or 0)
        elif line.text.strip(" ^~│|"):
            code = line.text.strip(" │|")
    return [] if found and _LAUNCHER.match(found[0].place) else found[::-1]


def own_frame(frames: Sequence[CodeFrame]) -> CodeFrame | None:
    """Return the innermost call in the user's code; None without user code."""
    return next((frame for frame in reversed(frames) if frame.is_own), None)


def caller_of_torch(frames: Sequence[CodeFrame]) -> CodeFrame | None:
    """Return the innermost call outside of torch and DeepSpeed, or else the innermost call."""
    outside = [frame for frame in frames if not frame.place.startswith(("torch/", "deepspeed/"))]
    return (outside or list(frames) or [None])[-1]


@cache
def _calls() -> dict[str, re.Pattern[str]]:
    return {phase: any_of(patterns) for phase, patterns in read_data("phases.yaml")["calls"].items()}


def phase_of(frames: Sequence[CodeFrame]) -> str:
    """Return the phase of training in which a traceback ended; "" if unknown."""
    phase, lasting = "", read_data("phases.yaml")["lasting"]
    for frame in frames:
        text = f"{frame.file}:{frame.name.split('(')[0]}:{frame.code}".replace("\\", "/")
        for mark, pattern in _calls().items():
            if pattern.search(text):
                # A loss calls forwards of torch's modules, which must not end the phase.
                within_loss = phase == LOSS and mark == FORWARD and "/torch/" in text  # the forward of lm_head
                if not within_loss and (phase not in lasting or mark in lasting[phase]):
                    phase = mark
                break
    return phase


def fills_bucket(frames: Sequence[CodeFrame]) -> bool:
    """Return whether ZeRO was allocating a buffer that collects gradients for a reduction."""
    return any("reduce_bucket_size" in frame.code for frame in frames[-3:])


def pins(frames: Sequence[CodeFrame]) -> bool:
    """Return whether page-locked host memory was requested."""
    # The traceback of a call of several lines shows the first only, without `pin_memory=True`. DeepSpeed's stage 3
    # pins in `_create_param_groups_fp16_flat_cpu_memory` in this way.
    return any(re.search(r"pin_memory|_flat_cpu_memory", f"{frame.name}{frame.code}") for frame in frames)


def gathers(frames: Sequence[CodeFrame]) -> bool:
    """Return whether ZeRO-3 or FSDP was gathering parameters."""
    marks = re.compile(r"partition(?:ed)?_param\w+\.py:|:_?all_?gather|:fetch_sub_module:|GatheredParameters|_unshard")
    return any(marks.search(f"{frame.file}:{frame.name}:{frame.code}") for frame in frames[-8:])
