"""launch.sh on a machine without zerofit: it installs once, then runs the command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# a Python without zerofit; the `python` of an environment that it makes has zerofit once pip has run
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in *"-c "*) test -e "$here/installed"; exit;; esac
echo "$*" >>"$LOG"
case "$*" in
"-m venv "*) for folder in "$@"; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python";;
"-m pip install "*) touch "$here/installed";;
esac
"""


@pytest.mark.parametrize(
    ("words", "extra", "command"),
    [
        (["test", "-k", "lion"], "dev", "-m pytest -k lion"),
        (["plan", "gpt2"], "train", "-P -m zerofit.cli plan gpt2"),
        (["--hostfile", "hosts"], "train", "-P -m zerofit.cli launch --hostfile hosts"),
        ([], "train", "-P -m zerofit.cli train"),
    ],
)
def test_it_installs_once_with_the_known_versions(tmp_path, words, extra, command):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    script = shutil.copy(ROOT / "launch.sh", tmp_path)
    log = tmp_path / "log"
    environment = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "LOG": str(log)}
    for _ in range(2):
        subprocess.run([script, *words], env=environment, check=True, capture_output=True)
    assert log.read_text().splitlines() == [
        f"-m venv --upgrade-deps {tmp_path}/.venv",
        f"-m pip install --constraint {tmp_path}/.ci/constraints.txt --editable {tmp_path}[{extra}]",
        command,
        command,
    ]
