"""What data says to a terminal is shown and not obeyed, by whatever way it is printed; our own styles stay."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import click
import pytest
from rich.table import Table
from rich.text import Text

import zerofit.cli
from tests.cli.test_console import events
from zerofit.cli import console as consoles
from zerofit.cli.answer import fail
from zerofit.cli.console import EventConsole, err, out
from zerofit.cli.main import main
from zerofit.cli.terminal import safe_output, style, write_data
from zerofit.spec.errors import Problem

ORDERS = {  # what would be obeyed -> how it is shown
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[2J\x1b[1;1H": r"\x1b[2J\x1b[1;1H",
    "\x1b[8;31mred\x1b[0m": r"\x1b[8;31mred\x1b[0m",
    "\x9b31m\x90q\x9c": r"\x9b31m\x90q\x9c",
    "a\rb\x08\x7f": r"a\rb\x08\u007f",
    "\u202egnp.exe\u2066": r"\u202egnp.exe\u2066",
    "caf\udce9": r"caf\udce9",
}
OBEYED = re.compile(
    r"\x1b\]|\x1b\[2J|\x1b\[8;|[\x00-\x08\x0b\x0c\x0e-\x1a\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Terminal(io.StringIO):
    """A screen that keeps what is written."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal for `at`."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal()


@contextmanager
def at(terminal: Terminal) -> Iterator[None]:
    """Have both streams there, and safe."""
    with redirect_stdout(terminal), redirect_stderr(terminal), safe_output():
        yield


def by_traceback(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        traceback.print_exc()


def by_log(text: str) -> None:
    handler = logging.StreamHandler()
    handler.emit(logging.LogRecord("a", logging.WARNING, "a.py", 1, text, (), None))


def by_table(text: str) -> None:
    table = Table(text, "other")
    table.add_row(Text(text, style="bold"), text)
    out().print(table)


WAYS = {
    "print": print,
    "print to stderr": lambda text: print(text, file=sys.stderr),
    "write": lambda text: sys.stdout.write(text),
    "lines": lambda text: sys.stdout.writelines(["a", text]),
    "click": click.echo,
    "click to stderr": lambda text: click.echo(text, err=True),
    "style": lambda text: click.echo(style(text, fg="green")),
    "rich": lambda text: out().print(text, soft_wrap=True),
    "rich to stderr": lambda text: err().print(Text(text, style="red"), soft_wrap=True),
    "table": by_table,
    "warning": lambda text: warnings.warn(text, stacklevel=1),
    "log": by_log,
    "traceback": by_traceback,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("default")
def test_orders_are_shown(screen, way, order, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: sys.stderr.write(f"{message}\n"))
    with at(screen):
        WAYS[way](order)
    written = screen.getvalue()
    assert not OBEYED.search(written), repr(written)
    if way in ("rich", "rich to stderr", "table") and "\r" in order:  # rich leaves \r and \b out
        return
    assert ORDERS[order].replace(r"\x07", "") in written.replace(r"\x07", ""), repr(written)


@pytest.mark.parametrize("order", ORDERS)
def test_events_at_a_terminal(screen, order, monkeypatch):
    """While a live line is drawn, rich takes the codes of what others print for styles of its own."""
    monkeypatch.setattr("tests.cli.test_console.HOSTILE", order)
    with at(screen), EventConsole(log_every=1) as show:
        assert show.live
        for event in events():
            show(event)
        print(order)
        sys.stderr.write(f"{order}\n")
    written = screen.getvalue()
    assert "\x1b[?25l" in written  # the line itself is rich's, and moves
    assert not OBEYED.search(written), repr(written)
    assert "\x1b[31mred" not in written


def test_our_own_styles_stay(screen):
    with at(screen), pytest.raises(SystemExit):
        click.echo(style("damaged", fg="red"))
        out().print(Text("bold", style="bold"))
        fail([Problem(kind="a", message="\x1b[32mfine", hint="", where="")], 2, False)
    written = screen.getvalue()
    assert "\x1b[31mdamaged\x1b[0m\n" in written and "\x1b[1mbold\x1b[0m" in written
    assert "\x1b[31m\x1b[1merror\x1b[0m: \\x1b[32mfine\n" in written


def test_no_codes_where_there_is_no_terminal(capsys):
    with safe_output():  # pytest's own stream
        click.echo(style("damaged", fg="red"))
        print("a\x1b[31m")
    assert capsys.readouterr().out == "damaged\na\\x1b[31m\n"


def test_a_stream_without_unicode_is_safe_too(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, ascii_only)
    with safe_output(), pytest.raises(SystemExit):
        out().print("été")
        fail([Problem(kind="a", message="\x07é", hint="", where="")], 2, False)
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b"\\xe9t\\xe9\nerror: \\x07\\xe9\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [["check", "zero3", "--json"], ["--help"], ["--version"], ["models"], []])
def test_output_that_cannot_be_written_is_no_bug(monkeypatch, capsys, words):
    """Standard output is a full disk, then a closed pipe. Without words, the shell asks for its completion."""
    if not words:
        monkeypatch.setenv("_ZEROFIT_COMPLETE", "bash_source")
    reader, closed = os.pipe()
    os.close(reader)
    for target, code, said in (("/dev/full", 2, "cannot write the answer: No space left on device"), (closed, 1, "")):
        with open(target, "wb", buffering=0) as raw, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
            with pytest.raises(SystemExit) as stopped:
                main.main(words, prog_name="zerofit")
        assert stopped.value.code == code and bool(said) == bool(err := capsys.readouterr().err) and said in err


@pytest.mark.parametrize("order", [one for one in ORDERS if "\udce9" not in one])
def test_a_models_text_is_data_but_to_a_terminal(screen, capsys, order):
    with at(screen):
        write_data(order)
    with safe_output():  # pytest's own stream
        write_data(order)
    assert screen.getvalue() == ORDERS[order]
    assert capsys.readouterr().out == order


def test_json_keeps_its_meaning(screen):
    value = {order: [order] for order in ORDERS} | {"del": "\x7f", "c1": "\x9b", "text": "日本 é 🙂"}
    with at(screen):
        print(json.dumps(value))
    assert not OBEYED.search(screen.getvalue())
    assert json.loads(screen.getvalue()) == value


@pytest.mark.parametrize("order", [one for one in ORDERS if "/" not in one])
def test_whole_commands(screen, tmp_path, order):
    """A folder's name, a manifest's content, a run file's keys and values, and arguments."""
    folder = tmp_path / order / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": order}))
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": order, order: order, "lr": order}))
    for words in (
        ["ckpt", "ls", str(tmp_path / order)],
        ["ckpt", "verify", str(folder)],
        ["train", str(file), "--data", order],
        ["simulate", order],
        ["check", str(tmp_path / order)],
        ["train", f"--{order}"],
    ):
        with redirect_stdout(screen), redirect_stderr(screen), pytest.raises(SystemExit):
            main.main(words)
    written = screen.getvalue()
    assert not OBEYED.search(written), repr(written)


def test_all_consoles_are_safe():
    """No module of the command line makes a console or a style of its own."""
    for file in Path(zerofit.cli.__file__).parent.glob("*.py"):
        if file.name in ("terminal.py", "console.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("Console", "click.style", "click.secho"), f"{file.name}:{node.lineno}"
    assert consoles.out().__class__.__name__ == "SafeConsole"
