"""What messages say of DeepSpeed is what the installed one does, and it accepts what the fixes leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.check.corpus import Case, cases
from tests.check.deepspeed_says import Claim

CASES = cases()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case, what happened; DeepSpeed is imported once, in a process of its own."""
    folder = tmp_path_factory.mktemp("deepspeed-says")
    out = folder / "said.json"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.check.deepspeed_says", str(out)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_deepspeed_does_what_the_corpus_says(case: Case, said: dict[str, Any]):
    claim, what = Claim.of(case), said[case.name]
    if claim.verb == "cannot":
        pytest.skip(claim.text)
    if claim.verb == "raises":
        assert claim.text in (what["raised"] or "nothing was raised")
        return
    assert what["raised"] is None
    if claim.verb == "gives":
        assert what["value"] == claim.value
        assert type(what["value"]) is type(claim.value)  # 1 is not true
    else:
        lowest = {"warns": 30, "says": 10}[claim.verb]
        assert any(claim.text in line for level, line in what["log"] if level >= lowest), what["log"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_deepspeed_accepts_what_has_no_errors_left(case: Case, said: dict[str, Any]):
    assert said[case.name]["mended"] is None


def test_most_of_it_can_be_shown():
    assert sum(Claim.of(case).verb == "cannot" for case in CASES) <= 13
