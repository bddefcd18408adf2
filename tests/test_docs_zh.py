"""The Chinese pages say what the English ones say: commands, figures and links; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from zerofit.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "zh").glob("*.md"))
ENGLISH = {page.name: [ROOT / "docs" / page.name] for page in PAGES}  # what each page is a translation of
ENGLISH["README.md"] = [ROOT / "README.md"]
ENGLISH["fit.md"] += [ROOT / "docs" / f"{name}.md" for name in ("simulate", "plan", "how-to/will-it-fit", "how-exact")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATORS = set(";|&><")  # between the words of a command and what comes after it
CHECKED = click.types.IntParamType | click.types.FloatParamType | click.Choice  # values that need no file

pages = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and text of each code block."""
    yield from FENCE.findall(text)


def words(line: str) -> list[str]:
    """Return a shell line's words without its comment."""
    return shlex.split(line.removeprefix("$ "), comments=True)


def code(text: str) -> Iterator[str]:
    """Yield the lines of all code blocks without comments and the blanks before them."""
    for language, block in blocks(text):
        for line in block.splitlines():
            bare = line
            if language == "bash":
                bare = shlex.join(words(line))
            elif language in ("python", "yaml"):
                bare = re.sub(r"(^|\s+)# .*", "", line)
            if bare.strip():
                yield bare


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind `zerofit` of every command in a code block."""
    for language, block in blocks(text):
        shown = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        lines = {"bash": block, "console": "\n".join(shown)}.get(language, "").splitlines()
        while lines:
            found: list[str] = []
            for word in [*_command_words(lines), ";"]:
                if not set(word) <= SEPARATORS or not word:
                    found.append(word)
                    continue
                if found[:1] == ["zerofit"]:
                    yield found[1:]
                found = []


def _command_words(lines: list[str]) -> list[str]:
    """Take the first line, and those after it up to the end of its quotes, and return their words."""
    line = lines.pop(0)
    while True:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(SEPARATORS))
        lexer.whitespace_split = True
        try:
            return list(lexer)
        except ValueError:  # no closing quotation
            if not lines:
                raise
            line += "\n" + lines.pop(0)


def fault(line: list[str]) -> str | None:
    """Return what click has against a command, nothing of which is run or opened; None where it is right."""
    command: click.Command = main
    context = click.Context(main)
    rest = line[: line.index("--")] if "--" in line else line
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0]) if rest else None
        if found is None:
            return f"no such command: {' '.join(rest[:1])}"
        command, rest = found, rest[1:]
        context = click.Context(command, parent=context)
    try:
        values, left, _ = command.make_parser(context).parse_args(args=list(rest))
        for option in command.params:
            value = values.get(option.name)
            if isinstance(value, str) and isinstance(option.type, CHECKED):
                option.type_cast_value(context, value)
    except click.UsageError as error:
        return error.format_message()
    return f"too many arguments: {left}" if left else None


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def figures(text: str) -> set[str]:
    """Return the numbers outside of code and links."""
    prose = re.sub(r"\]\([^)]+\)", "]", FENCE.sub("", text))
    return set(re.findall(r"\d+(?:[.,]\d+)*", prose))


@pages
def test_commands_and_flags_exist(page: Path):
    found = list(commands(page.read_text()))
    assert len(found) >= 3
    assert [(" ".join(line), wrong) for line in found if (wrong := fault(line))] == []


@pages
def test_code_stands_in_the_english_pages(page: Path):
    english = {line for path in ENGLISH[page.name] for line in code(path.read_text())}
    assert [line for line in code(page.read_text()) if line not in english] == []


@pages
def test_names_in_the_text_stand_in_the_english_pages(page: Path):
    english = "\n".join(path.read_text() for path in ENGLISH[page.name])
    names = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))
    assert [name for name in names if name not in english] == []


@pages
def test_figures_stand_in_the_english_pages(page: Path):
    english = set.union(*(figures(path.read_text()) for path in ENGLISH[page.name]))
    assert figures(page.read_text()) - english == set()


@pages
def test_links_lead_somewhere(page: Path):
    assert list(broken_links(page, page.read_text())) == []


def test_the_english_readme_leads_to_the_chinese_one():
    assert "](docs/zh/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zerofit trian lenet", "no such command: trian"),
        ("zerofit ckpt lst runs/mine", "no such command: lst"),
        ("zerofit train lenet --no-such-flag 1", "--no-such-flag"),
        ("zerofit tune run.yaml && zerofit train run.yaml --stepz 3", "--stepz"),
        ("zerofit train lenet --steps", "requires an argument"),
        ("zerofit train lenet --steps many", "many"),
        ("zerofit train lenet --precision fp7", "fp7"),
        ("zerofit simulate --gpuz l4 -- python train.py --any-flag", "--gpuz"),
        ("zerofit train lenet mlp", "too many arguments"),
    ],
)
def test_a_wrong_command_is_found(line: str, message: str):
    wrong = [fault(found) for found in commands(f"```bash\n{line}  # comment\n```\n")]
    assert message in (wrong[-1] or "")


def test_a_broken_link_is_found():
    text = "[a](fit.md) [b](gone.md) [c](#nowhere) [d](../plan.md#the-margin) `[e](code)`"
    assert list(broken_links(PAGES[0], text)) == ["gone.md", "#nowhere"]


def test_a_comment_may_be_translated_and_a_command_not():
    english, same, other = (
        list(code(f"```bash\nzerofit train {line}\n```\n")) for line in ("lenet   # a", "lenet # b", "mlp  # a")
    )
    assert english == same != other
