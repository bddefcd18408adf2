"""Each broken configuration of the corpus: the fault is found in its line and nowhere else, and its fix mends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerofit.check
from tests.check.corpus import Case, cases
from zerofit.check.check import check
from zerofit.check.document import parse
from zerofit.check.edit import apply
from zerofit.check.rules.table import RULES

CASES = cases()
# findings that only the user can mend, and why
NO_EDITS = {
    "not-an-object": "which of the configurations in the list is meant?",
    "activations-host": "the call belongs into the user's code",
    "activations-partition": "the call belongs into the user's code",
}


def codes() -> set[str]:
    """Every code that the checker can emit: those of the rules, and those written out in its functions."""
    files = Path(zerofit.check.__file__).parent.rglob("*.py")
    written = {c for file in files for c in re.findall(r'\bcode(?:, why)? ?= ?"([a-z0-9-]+)"', file.read_text())}
    return written | {rule.code for rule in RULES}


def test_there_are_enough():
    assert len(CASES) >= 60


def test_every_code_has_a_case():
    assert codes() - {code for case in CASES for _, code in case.marks} == set()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_says_where_it_was_seen(case: Case):
    assert case.header("seen")
    assert case.header("deepspeed")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_in_its_line_and_nowhere_else(case: Case):
    found = check(case.document, case.setting)
    assert [(f.line, f.code) for f in found] == case.marks
    assert len(found) == 1
    assert found[0].severity in ("error", "warning")
    assert all((found[0].message, found[0].why, found[0].fix, found[0].column))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_fix_mends_it(case: Case):
    (finding,) = check(case.document, case.setting)
    if finding.code in NO_EDITS:
        assert not finding.edits
        return
    mended = apply(case.document, finding.edits)
    assert mended != case.text
    left = check(parse(mended), case.setting)
    assert [f for f in left if f.code == finding.code or f.severity == "error"] == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_fix_leaves_the_comments(case: Case):
    (finding,) = check(case.document, case.setting)
    mended = apply(case.document, finding.edits)
    assert mended.startswith(case.text.partition("{")[0].partition("[")[0])
