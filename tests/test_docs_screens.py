"""docs/screens.md has every command, and its lines fit 80 columns."""

from __future__ import annotations

import re

from benchmarks.screens import SCREENS, WIDTH
from tests.test_docs_zh import ROOT
from zerofit.cli.main import COMMANDS


def test_every_command_has_a_screen_of_80_columns():
    page = (ROOT / "docs" / "screens.md").read_text()
    blocks = re.findall(r"```console\n\$ zerofit (.*)\n((?:.*\n)*?)```", page)
    assert [words for words, _ in blocks] == list(SCREENS)
    assert {words.split()[0] for words, _ in blocks} == set(COMMANDS) - {"mcp"}  # which a program talks to
    lines = [line for _, text in blocks for line in text.splitlines()]
    assert not [line for line in lines if "…" in line or (len(line) > WIDTH and " " in line.strip())]
