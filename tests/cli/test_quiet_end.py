"""At its end a simulation writes nothing of Triton's to standard error: its bindings report objects that are left.

tests/cli/test_train.py looks at that of a training.
"""

import json
import subprocess
import sys

import pytest


@pytest.mark.versions
def test_no_leaks_are_reported(tmp_path):
    words = ["simulate", "simplecnn", "--data", "digits", "--gpus", "2", "--gpu", "l4", "--no-knobs", "--json"]
    command = [sys.executable, "-m", "zerofit.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])
    assert "nanobind" not in done.stderr and "leaked" not in done.stderr
