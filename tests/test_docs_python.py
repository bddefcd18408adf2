"""docs/python.md and docs/formulas.md are run line by line, each in one process.

What stands behind `# =>` must be the value of its line; a block that begins with `# name.py` becomes that file.
"""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
FORMULAS = PAGE.with_name("formulas.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
VALUE = re.compile(r"  # => (.+)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(page: str, names: dict[str, Any]) -> int:
    """Run all blocks of a page; return how many values were compared."""
    compared = 0
    for block in BLOCK.finditer(page):
        file = FILE.match(block[1])
        if file:
            Path(file[1]).write_text(block[1])
            continue
        first = page[: block.start(1)].count("\n")
        source = "\n" * first + block[1]  # so that errors name the line of the page
        lines = source.splitlines()
        for node in ast.parse(source, str(PAGE)).body:
            expected = VALUE.search(lines[(node.end_lineno or 1) - 1])
            if expected is None:
                exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
                continue
            assert isinstance(node, ast.Expr), f"line {node.lineno} has no value"
            value = repr(eval(compile(ast.Expression(node.value), str(PAGE), "eval"), names))
            same = doctest.OutputChecker().check_output(expected[1] + "\n", value + "\n", FLAGS)
            assert same, f"line {node.lineno}: the page says {expected[1]}, it is {value}"
            compared += 1
    return compared


@pytest.mark.usefixtures("short_trials")
@pytest.mark.slow
def test_every_line_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(PAGE.read_text(encoding="utf-8"), {"__name__": "page"}) >= 10


def test_every_number_of_the_formulas():
    assert run(FORMULAS.read_text(encoding="utf-8"), {"__name__": "page"}) >= 15


def test_a_wrong_value_is_found():
    with pytest.raises(AssertionError, match="line 4: the page says 3, it is 2"):
        run("text\n\n```python\n1 + 1  # => 3\n```\n", {})
    with pytest.raises(AssertionError, match="line 2 has no value"):
        run("```python\nx = 1  # => 1\n```\n", {})
