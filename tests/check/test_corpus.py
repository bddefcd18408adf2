"""Each broken configuration of the corpus: the fault is found in its line and nowhere else, and its fix mends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.check.corpus import Case, cases
from zerofit.check import catalog
from zerofit.check.check import check, mend
from zerofit.check.document import parse
from zerofit.check.rule import rules

CASES = cases()
# what depends on the program that reads the file, or on flags; tests/check/test_reader.py shows them
ELSEWHERE = {
    *("yaml", "batch-ranks", "clipping-default", "flag-differs", "gather-weights", "hjson", "json-comment"),
    *("lightning-accumulation", "offload-own-optimizer", "zero-missing", "accelerate-beside-json", "flag-unread"),
    *("neox-argument", "encoding", "batch-auto", "lightning-contiguous", "activations-host"),
    # tests/check/test_script_faults.py
    *("aio-size", "expert-leaves", "host-memory", "padding", "pinned-memory", "second-copy", "unused-search"),
}
# a fix of these moves, renames or corrects a type
MENDED = {
    *("clipping-in-optimizer", "duplicate-key", "not-allowed", "number-as-string", "optimizer-param"),
    *("optimizer-unknown", "removed-key", "scheduler-no-params", "scheduler-param", "scheduler-unknown"),
    *("scheduler-warmup", "tensor-parallel-type", "unknown-key", "wrong-type", "deprecated-and-new"),
}


def codes() -> set[str]:
    """Every code that the checker can emit: those of the rules, and those written out in its functions."""
    files = Path(catalog.__file__).parent.rglob("*.py")
    written = {c for file in files for c in re.findall(r'\bcode(?:, why)? ?= ?"([a-z0-9-]+)"', file.read_text())}
    return written | {rule.code for rule in rules()}


def test_there_are_enough():
    assert len(CASES) >= 60


def test_every_code_has_a_case():
    assert codes() - {code for case in CASES for _, code in case.marks} == ELSEWHERE


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_says_where_it_was_seen(case: Case):
    assert case.header("seen")
    assert case.header("deepspeed")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_in_its_line_and_nowhere_else(case: Case):
    found = check(case.document, case.setting)
    assert sorted((f.line, f.code) for f in found) == case.marks
    assert len(found) == 1 or case.header("also")
    for finding in found:
        assert finding.severity in ("error", "warning")
        assert all((finding.message, finding.why, finding.fix, finding.column))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_fix_leaves_what_needs_a_decision(case: Case):
    found = check(case.document, case.setting)
    mended = mend(case.document, case.setting)
    errors = [f for f in found if f.severity == "error"]
    if mended == case.text:
        assert all(not f.edits for f in errors)
        return
    assert {f.code for f in errors if f.edits} <= MENDED
    left = check(parse(mended), case.setting)
    assert len([f for f in left if f.severity == "error"]) < len(errors)
    assert mend(parse(mended), case.setting) == mended
    assert mended.startswith(case.text[: case.document.root.place.start])  # the comments are still there


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_raises_is_said_to_stop(case: Case):
    found = check(case.document, case.setting)
    if " raises " in case.header("deepspeed"):
        assert "stops" in {f.effect for f in found}
