"""Checks of hosts as one table: the same finding on many hosts takes one line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerofit.doctor.check import FAIL, OK, WARN, Check

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
NAMED = 4  # hosts in one line


def show_checks(checks: Sequence[Check], hosts: int, console: Console) -> None:
    """Print what was found and how to mend it; `hosts` is how many were asked."""
    if not console.is_terminal:
        console.width = 160
    table = Table("check", "host", "found", "how to mend it", show_lines=False)
    table.columns[0].no_wrap = True
    for same in _grouped(checks):
        first = same[0]
        where = _hosts([one.host for one in same], hosts)
        wanted = f" (expected: {first.expected})" if first.expected and first.status != OK else ""
        status = Text.assemble((f"{first.status:4}", STYLES[first.status]), f" {first.name}")
        table.add_row(status, Text(where), Text(first.value + wanted), Text(first.hint))
    console.print(table)


def _grouped(checks: Sequence[Check]) -> list[list[Check]]:
    """Group checks that say the same, worst first, else in the order they came in."""
    groups: dict[tuple[str, ...], list[Check]] = {}
    for one in checks:
        groups.setdefault((one.status, one.name, one.value, one.hint), []).append(one)
    worst = (FAIL, WARN, OK)
    return sorted(groups.values(), key=lambda same: worst.index(same[0].status))


def _hosts(names: list[str], asked: int) -> str:
    if len(names) == asked > 1:
        return f"all {asked}"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
