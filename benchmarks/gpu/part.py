"""One part of the measurements: its cases one after the other, each answer written down at once.

`python -m benchmarks.gpu.part NAME FOLDER SECONDS [--rehearse]`, started by `run`. FOLDER/NAME.json is
{"date", "hardware", "versions", "cases": {case: answer}}; a case that failed has {"error": its traceback's end}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from zerofit.spec.files import write_json

Measure = Callable[[str], dict[str, Any]]


class Cases(Protocol):
    """What the module of a part offers."""

    def cases(self, rehearse: bool) -> list[str]:
        """Return the names of the cases, the most important first."""
        ...

    def measuring(self, cases: list[str], folder: Path, rehearse: bool) -> AbstractContextManager[Measure]:
        """Return a context in which each of the cases can be measured; `folder` is for what they leave."""
        ...


PARTS = {  # the longest that one call may spend on each module of this package, seconds
    "environment": 150,
    "correctness": 180,
    "tests": 240,
    "training": 420,
    "kernels": 150,
    "edges": 240,
    "scripts": 180,
    "speed": 500,
}


def find(name: str) -> Cases:
    """Return the module of a part."""
    return importlib.import_module(f"{__package__}.{name}")  # type: ignore[return-value]


def is_done(name: str, folder: Path, rehearse: bool) -> bool:
    """Return whether all cases of a part have an answer without an error."""
    answers = read(folder / f"{name}.json").get("cases", {})
    return not remaining(find(name).cases(rehearse), answers)


def remaining(cases: list[str], answers: dict[str, dict[str, Any]]) -> list[str]:
    """Return the cases without an answer, then those that failed."""
    return [*(case for case in cases if case not in answers), *(c for c in cases if "error" in answers.get(c, {}))]


def read(path: Path) -> dict[str, Any]:
    """Return what a part has written; empty where it has not begun."""
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Measure what is missing, then what failed before, as long as there is time."""
    asked = parse()
    end, path = time.monotonic() + asked.seconds, asked.folder / f"{asked.name}.json"
    module, known = find(asked.name), read(path)
    answers: dict[str, Any] = known.get("cases", {})
    missing = remaining(module.cases(asked.rehearse), answers)
    if not missing:
        return
    from .environment import surroundings

    with module.measuring(missing, asked.folder, asked.rehearse) as measure:
        for number, case in enumerate(missing, start=1):
            began = time.monotonic()
            if began > end:
                return
            try:
                answer: dict[str, Any] = measure(case)
            except Exception:
                answer = {"error": traceback.format_exc()[-3000:]}
            answer["seconds"] = round(time.monotonic() - began, 1)
            answers[case] = answer
            write_json(path, {**surroundings(), "cases": answers})
            said = answer["error"].strip().splitlines()[-1][:150] if "error" in answer else "done"
            print(f"  {number} of {len(missing)}: {case}: {said} ({answer['seconds']} s)", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
