"""docs/checks.md names the checks that there are; docs/deepspeed-conditions.md names lines of DeepSpeed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.check.test_corpus import codes
from zerofit.check.rule import rules

DOCS = Path(__file__).parents[2] / "docs"
OUTSIDE = {"json-syntax"}  # of the reader, before any check
CODE = re.compile(r"`([a-z0-9-]+)`")


def test_every_code_of_a_function_is_listed_and_no_other():
    _, _, checks = (DOCS / "checks.md").read_text().partition("## The checks\n")
    lines = [line.partition(": ")[0] for line in checks.splitlines() if line.startswith("- `")]
    listed = {code for line in lines for code in CODE.findall(line)}
    assert codes() - {rule.code for rule in rules()} <= listed - OUTSIDE <= codes()


def test_conditions_are_at_lines_of_the_installed_deepspeed():
    found = find_spec("deepspeed")
    assert found and found.origin
    text = (DOCS / "deepspeed-conditions.md").read_text()
    places = re.findall(r"`((?:\w+/)*\w+\.py):(\d+)`", text)
    assert len(places) == text.count(".py:") > 0
    files = {name: len(Path(found.origin).parent.joinpath(name).read_text().splitlines()) for name, _ in places}
    assert [(name, line) for name, line in places if int(line) > files[name]] == []
