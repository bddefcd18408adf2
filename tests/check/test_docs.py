"""docs/checks.md and docs/deepspeed-conditions.md name the checks that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.check.test_corpus import codes

DOCS = Path(__file__).parents[2] / "docs"
OUTSIDE = {"json-syntax"}  # of the reader, before any check


def test_every_code_is_in_the_table_and_no_other():
    table = (DOCS / "checks.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9-]+)`", table, re.MULTILINE)) == codes() | OUTSIDE


def test_conditions_name_codes_that_exist():
    named = set()
    for line in (DOCS / "deepspeed-conditions.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) >= 5 and not cells[-1].startswith("not yet"):
            named |= set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", cells[-1]))
    assert len(named) > 60
    assert named <= codes() | OUTSIDE
