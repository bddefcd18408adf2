"""At their end commands write nothing of Triton's to standard error: its bindings report objects that are left."""

import json
import subprocess
import sys

import pytest

JOB = ("simplecnn", "--data", "digits")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ("train", *JOB, "--ranks", "1", "--steps", "2", "--save-every", "0", "--eval-samples", "16"),
            marks=pytest.mark.versions(of="deepspeed"),
            id="train",
        ),
        pytest.param(
            ("simulate", *JOB, "--gpus", "2", "--gpu", "l4", "--no-knobs"), marks=pytest.mark.versions, id="simulate"
        ),
    ],
)
def test_no_leaks_are_reported(arguments, tmp_path):
    command = [sys.executable, "-m", "zerofit.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])
    assert "nanobind" not in done.stderr and "leaked" not in done.stderr
