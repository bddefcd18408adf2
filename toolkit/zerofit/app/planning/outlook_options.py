"""Read and check the options for a run's length and price, and for how often machines fail."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from zerofit.plan.goodput import Reliability
from zerofit.plan.outlook import Work
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.units import parse_bytes

_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmbgt]?)\s*", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MTBF = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:h?\s*/\s*)?(gpu|node)?\s*")
FIRST_PHASE = "reading the data"  # first phase of each start in events.jsonl


class WorkOptions(TypedDict, total=False):
    """The length of a run, its price, and how often machines fail: numbers, or texts like "15T"."""

    epochs: float | None  # passes over `samples` or `tokens`
    tokens: float | str | None
    samples: float | str | None
    price: float | str | Mapping[str, float] | None  # US dollars per GPU hour; or "h100-80gb=2.5,l4=0.8"
    mtbf: float | str | None  # hours between failures of one GPU, or "5000/node"
    storage: str | int | None  # bytes per second of writing checkpoints, all ranks together
    timed_by: str | Path | None  # a run folder whose saves and starts take as long as in the planned run


def read_work(options: Mapping[str, object]) -> Work | None:
    """Return the length, price and failure rate that the options set; None without options.

    Raises UserError with all problems.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    problems, values = Problems(), dict[str, Any]()
    readers: dict[str, Callable[[object], object]] = {
        "epochs": lambda value: _count(value, "--epochs"),
        "tokens": lambda value: _count(value, "--tokens"),
        "samples": lambda value: _count(value, "--samples"),
        "price": _prices,
        "mtbf": _mtbf,
        "storage": lambda value: parse_bytes(str(value), "--storage"),
        "timed_by": lambda value: measured_times(Path(str(value))),
    }
    # Each reader raises its own problem, so that a user sees all of them at once.
    for name, value in given.items():
        values[name] = problems.attempt(lambda name=name, value=value: readers[name](value))
    if "tokens" in given and "samples" in given:
        problems.add("usage", "--tokens and --samples cannot be combined", "use one of them", "--tokens, --samples")
    if "epochs" in given and not {"tokens", "samples"} & given.keys():
        hint = "add --samples or --tokens, counted over one pass"
        problems.add("usage", "--epochs needs the size of the data", hint, "--epochs")
    problems.raise_if_any()
    mtbf_h, of_node = values.get("mtbf", (None, False))
    save_s, restart_s = values.get("timed_by", (None, None))
    return Work(
        samples=values.get("samples"),
        tokens=values.get("tokens"),
        epochs=values.get("epochs", 1.0),
        prices=values.get("price", {}),
        reliability=Reliability(
            mtbf_h=mtbf_h, of_node=of_node, storage=values.get("storage"), save_s=save_s, restart_s=restart_s
        ),
    )


def _count(value: object, where: str) -> float:
    match = _COUNT.fullmatch(str(value))
    number = float(match[1]) * _POWERS[match[2].lower()] if match else 0.0
    if not 0 < number < 1e30:
        hint = "write it like 52000, 1.5e9, 300B or 15T"
        raise UserError(Problem(kind="bad-value", message=f"{where}: got {value!r}", hint=hint, where=where))
    return number


def _prices(value: object) -> dict[str, float]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [tuple(word.rpartition("=")[::2]) for word in str(value).split(",")]  # a lone price has the kind ""
    try:
        prices = {str(kind).strip(): float(price) for kind, price in pairs}
    except ValueError:
        prices = {}
    if not prices or not all(0 < price < 1e6 for price in prices.values()):
        hint = "write US dollars per GPU hour: 2.5, or h100-80gb=2.5,a100-80gb=1.4"
        raise UserError(Problem(kind="bad-value", message=f"--price: got {value!r}", hint=hint, where="--price"))
    return prices


def _mtbf(value: object) -> tuple[float, bool]:
    match = _MTBF.fullmatch(str(value))
    if not match or not float(match[1]):
        hint = "write the hours between failures of one GPU, like 50000, or of a node, like 6000/node"
        raise UserError(Problem(kind="bad-value", message=f"--mtbf: got {value!r}", hint=hint, where="--mtbf"))
    return float(match[1]), match[2] == "node"


def measured_times(folder: Path) -> tuple[float, float]:
    """Return the median seconds of a save and of a start in an earlier run. Raises UserError."""
    file = RunFolder(folder).events
    # A start takes from its first phase to the first event of the training; a save stalls the training.
    stalls, starts, began = [], [], None
    try:
        events = read_jsonl(file)
    except OSError as error:
        message = f"cannot read the events of {folder}: {error}"
        raise UserError(Problem(kind="unreadable", message=message, where="--timed-by")) from None
    for event in events:
        kind, at, stalled = event.get("event"), number_in(event, "time_s"), number_in(event, "stalled_s")
        if kind == "phase" and event.get("text") == FIRST_PHASE:
            began = at
        elif kind == "training" and "done" in event and began is not None and at is not None:
            starts.append(at - began)
        elif kind == "saved" and stalled is not None:
            stalls.append(stalled)
    if not stalls or not starts:
        message, hint = f"{folder} has no saved checkpoints", "use a run folder with checkpoints, or remove --timed-by"
        raise UserError(Problem(kind="no-saves", message=message, hint=hint, where="--timed-by"))
    return statistics.median(stalls), statistics.median(starts)
