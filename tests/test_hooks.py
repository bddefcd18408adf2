"""What `pre-commit run --all-files` does, without pre-commit: no hook of .pre-commit-config.yaml finds anything."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
STRUCTURE = "structure"  # a hook that only runs other tests of this suite
SHEBANG = re.compile(rb"#!.*\b(ba)?sh\b")


def is_shell(path: Path) -> bool:
    """Return whether pre-commit counts a file as a shell script: by its ending, or an executable by its first line."""
    with path.open("rb") as file:
        return path.suffix == ".sh" or (os.access(path, os.X_OK) and SHEBANG.match(file.readline()) is not None)


def files(hook: dict) -> list[str]:
    """Return the tracked files that pre-commit would give to a hook."""
    if not hook.get("pass_filenames", True):
        return []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = [path for path in map(ROOT.joinpath, tracked.splitlines()) if path.is_file() and not path.is_symlink()]
    fits = is_shell if hook.get("types") == ["shell"] else lambda path: path.suffix in (".py", ".pyi")
    return [str(path.relative_to(ROOT)) for path in there if fits(path)]


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook["id"] != STRUCTURE], ids=lambda hook: hook["id"])
def test_a_hook_finds_nothing(hook):
    words = shlex.split(hook["entry"])
    if not shutil.which(words[0], path=ENVIRONMENT["PATH"]):
        pytest.skip(f"needs {words[0]}")
    done = subprocess.run([*words, *files(hook)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_without_an_ending_are_shell_scripts():
    found = files({"types": ["shell"]})
    assert {"launch.sh", ".ci/run", "examples/two-hosts-one-machine/try.sh"} <= set(found)
    assert ".ci/release" not in found  # Python


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_makefile_has_what_a_developer_does():
    named = re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert named == ["install", "test", "one", "lint", "docs"]
    for target in named:
        subprocess.run(["make", "--dry-run", target, "FILE=x"], cwd=ROOT, check=True, capture_output=True)
