from __future__ import annotations

import subprocess
import sys
import time

from rich.progress import Task, TaskID

from zerofit.cli.console import EventConsole, _Amount
from zerofit.spec.events import Reporter


def test_plain_lines_without_a_terminal(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Reporter(EventConsole()).task("reading", 3_000_000, "bytes") as task:
        now = 1.0
        task.advance(1_000_000)
        now = 6.0
        task.advance(1_000_000)
        now = 7.0
    assert capsys.readouterr().err.splitlines() == [
        "reading (3.0 MB) ...",
        "reading: 2.0 MB of 3.0 MB, 6 s",
        "reading: done, 2.0 MB in 7.0 s",
    ]


def test_the_amount_of_a_live_line():
    def shown(unit: str, done: int, total: int | None) -> str:
        task = Task(TaskID(0), "", total, done, lambda: 0.0, fields={"unit": unit})
        return str(_Amount().render(task))

    assert shown("steps", 7, 90) == "7 of 90 steps" and shown("steps", 7, None) == "7 steps"
    assert shown("bytes", 1_200_000, 4_000_000) == "1.2 MB of 4.0 MB" and shown("", 0, None) == ""


def test_waiting_is_said_once_it_happens(tmp_path, capsys):
    from filelock import FileLock

    from zerofit.data.cache import waiting_lock

    script = "import sys, time, filelock\nwith filelock.FileLock(sys.argv[1]):\n print(flush=True)\n time.sleep(0.5)"
    holder = subprocess.Popen([sys.executable, "-c", script, tmp_path / "a.lock"], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with waiting_lock(tmp_path / "a.lock", "another process works", Reporter(EventConsole())):
        pass
    holder.communicate()
    assert "waiting: another process works" in capsys.readouterr().err
    with FileLock(tmp_path / "a.lock", timeout=0):
        pass


def test_importing_the_package_imports_no_torch():
    code = "import sys, zerofit.data; sys.exit(bool({'torch', 'datasets', 'transformers', 'sklearn'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
