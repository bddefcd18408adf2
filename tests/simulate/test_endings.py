"""Why a simulation's process left no answer, and searches that may fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.simulate.endings import broken_environment, last_lines, optional, out_of_memory, why_ended
from zerofit.spec import local_machine
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Event, Reporter


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        ({"status": signal.SIGKILL, "ran_short": True, "peak_bytes": 3 << 30}, "out-of-memory"),
        ({"status": signal.SIGKILL}, "killed"),  # nothing says that memory was short
        ({"status": None, "ran_short": True}, "out-of-memory"),
        ({"status": None}, "killed"),
        ({"status": signal.SIGSEGV, "ran_short": True}, "crashed"),
        ({"status": signal.SIGABRT, "output": "terminate called\n  what():  std::bad_alloc\n"}, "out-of-memory"),
        ({"status": signal.SIGABRT, "output": "torch.OutOfMemoryError: as a script prints it\n"}, "crashed"),
        ({"status": 3 << 8, "output": "bye\n"}, "exit"),
    ],
)
def test_memory_is_named_where_it_was_short(ending, kind):
    problem = why_ended(**ending)
    assert problem.kind == kind
    assert ("too little memory" in problem.message) == (kind == "out-of-memory")


@pytest.mark.parametrize(
    ("line", "named"), [("from json import nothing", "'nothing' from 'json'"), ("import no_such", "no_such")]
)
def test_packages_that_python_cannot_import(line, named):
    """A server that cannot import its libraries is the environment's fault, not zerofit's."""
    python = subprocess.run([sys.executable, "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    problem = broken_environment(f"a warning: ImportError\n{python.stderr}")
    assert problem and named in problem.message and "-m pip check" in problem.hint
    assert broken_environment("Traceback:\nKeyError: 'ImportError: a'") is None


def test_kills_are_counted_in_both_versions_of_control_groups(tmp_path: Path, monkeypatch):
    """As cgroup-v2.rst and cgroup-v1/memory.rst have it; zeros where a kernel counts nothing."""
    for name, text in (("memory.events", "oom 4\noom_kill 2\n"), ("memory.oom_control", "under_oom 0\noom_kill 1\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(local_machine, "control_groups", lambda controller: [])
    elsewhere = local_machine.oom_kills()  # on the host
    monkeypatch.setattr(local_machine, "control_groups", lambda controller: [tmp_path, tmp_path / "none"])
    assert local_machine.oom_kills() - elsewhere == 3


def test_output_is_shown_as_it_stood_on_the_terminal():
    assert last_lines("a\n\n 10%\r 20%\r 30%\nb  \n", 2) == [" 30%", "b"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), out_of_memory().message),
        (OSError(12, "Cannot allocate memory"), out_of_memory().message),
        (UserError(Problem(kind="x", message="no such model")), "no such model"),
        (KeyError("b"), "zerofit failed (KeyError: 'b')"),
    ],
)
def test_a_search_that_fails_is_a_note(error, said):
    heard: list[Event] = []

    def fails() -> int:
        raise error

    assert optional(fails, 3, "knobs", Reporter(heard.append)) == 3
    assert [(event.kind, event.text) for event in heard] == [("note", f"knobs: left out, because {said}")]
    assert optional(lambda: 4, 3, "knobs", Reporter(heard.append)) == 4 and len(heard) == 1
