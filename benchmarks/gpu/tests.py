"""The project's tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .part import Measure

ROOT = Path(__file__).parents[2]


def cases(rehearse: bool) -> list[str]:
    """The files of such tests; rehearsed, one of them says of each test that it needs a GPU."""
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in paths]
    return names[:1] if rehearse else names


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Run pytest on a file."""
    yield lambda case: _run(case, folder / "tests.xml")


def _run(file: str, report: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--junitxml", str(report)]
    done = subprocess.run([*argv, file], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not report.exists():
        raise RuntimeError(done.stdout[-3000:])
    outcomes: dict[str, str] = {}
    for test in ElementTree.parse(report).getroot().iter("testcase"):
        bad = [one for one in test if one.tag in ("failure", "error", "skipped")]
        text = f"{bad[0].tag}: {(bad[0].get('message') or '')[:500]}" if bad else "passed"
        outcomes[f"{test.get('classname')}::{test.get('name')}"] = text
    report.unlink()
    return {"outcomes": outcomes, "summary": done.stdout.strip().splitlines()[-1]}
