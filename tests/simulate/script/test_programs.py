"""Programs that pip installs, and that start ranks by a launcher themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.simulate.script.scripts import facts, refused, simulated
from tests.simulate.script.test_scripts import LOOP

PROGRAM = f"""\
#!{sys.executable}
import os, subprocess, sys

subprocess.run([sys.executable, "-c", ""], check=True)
subprocess.run("cat <<'END'\\nit's not for shlex\\nEND", shell=True, check=True, stdout=subprocess.DEVNULL)
if sys.argv[1] == "run":
    env = {{**os.environ, "KNOB": "1"}}
    subprocess.run("torchrun --nproc_per_node 2 inner.py --lr 1".split(), check=True, env=env)
elif sys.argv[1] == "exec":
    os.environ["KNOB"] = "1"
    os.execvpe("accelerate", ["accelerate", "launch", "-m", "inner", "--lr", "1"], os.environ)
raise AssertionError("ranks were not started")
"""


@pytest.fixture
def words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = folder / "bin" / "trainer-cli"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    check = "assert sys.argv[1:] == ['--lr', '1'] and os.environ['KNOB'] == '1' and os.environ['WORLD_SIZE'] == '2'\n"
    (folder / "inner.py").write_text(LOOP.replace("for i in", check + "for i in"))
    return "trainer-cli"


@pytest.mark.parametrize(("how", "started"), [("run", "torchrun --nproc_per_node 2 inner.py"), ("exec", "accelerate")])
def test_one_of_the_ranks_that_a_program_starts_is_simulated(words, how, started):
    seen = facts(simulated("", f"{words} {how}")).facts
    assert seen.ended == "stopped after 2 optimizer steps" and seen.parameters
    assert any(note.text.startswith(f"trainer-cli starts ranks itself: {started}") for note in seen.notes)


def test_other_ranks_than_are_simulated(words):
    problem = refused("", f"{words} run", gpus=4)
    assert problem.message == "the command starts 2 ranks, but --gpus is 4" and problem.where == "--gpus"
