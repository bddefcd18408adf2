from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from zerofit.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_is_there(name):
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, click.Command)
    assert command.name == name


def test_help_imports_no_command():
    code = "import sys; from zerofit.cli.main import main; main(['--help'], standalone_mode=False)"
    code += "; print(sorted({'pydantic', 'yaml', 'rich', 'torch'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["ckpt", "compare"])
def test_help_of_a_group_cuts_no_sentence(name):
    shown = CliRunner().invoke(main, [name, "--help"], terminal_width=80).output
    rows = shown.partition("Commands:")[2]
    group = main.get_command(click.Context(main), name)
    assert isinstance(group, click.Group) and "..." not in rows.replace("1, 2, 4, ...", "")
    for command in group.commands.values():
        assert " ".join(str(command.help).partition("\n\n")[0].split()) in " ".join(rows.split())
