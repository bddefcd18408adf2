"""Each broken configuration of the corpus: the fault is found in its line and nowhere else, and its fix mends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.check.corpus import Case, cases
from zerofit.check import catalog
from zerofit.check.check import RULES, check, mend
from zerofit.check.document import parse
from zerofit.check.edit import apply

CASES = cases()
# findings that only the user can mend, and why
NO_EDITS = {
    "nvme-path": "the folder may be there on the machine that trains",
    "nvme-disk": "only the user knows where an NVMe disk is",
    "bf16-optimizer": "another stage is another run",
    "not-an-object": "which of the configurations in the list is meant?",
    "activations-host": "the call belongs into the user's code",
    "activations-partition": "the call belongs into the user's code",
}


def codes() -> set[str]:
    """Every code that the checker can emit: those of the rules, and those written out in its functions."""
    files = Path(catalog.__file__).parent.rglob("*.py")
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
    assert sorted((f.line, f.code) for f in found) == case.marks
    assert len(found) == 1 or case.header("also")
    for finding in found:
        assert finding.severity in ("error", "warning")
        assert all((finding.message, finding.why, finding.fix, finding.column))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_fix_mends_it(case: Case):
    found = check(case.document, case.setting)
    if found[0].code in NO_EDITS:
        assert not found[0].edits
        return
    # two that speak of one fault may mend it in opposite ways: a second round settles it
    mended = mend(case.document, case.setting) if case.header("also") else apply(case.document, found[0].edits)
    assert mended != case.text
    left = check(parse(mended), case.setting)
    marked = {code for _, code in case.marks}
    assert [f for f in left if f.code in marked or f.severity == "error"] == []
    assert mended.startswith(case.text[: case.document.root.place.start])  # the comments are still there
