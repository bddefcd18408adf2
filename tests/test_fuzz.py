"""Some of the random inputs of benchmarks/fuzz.py, whose long run is committed among the results."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_random_input_is_answered_or_refused():
    counts = ["--commands", "40", "--runs", "12", "--configs", "3", "--data", "15", "--seed", "7"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", *counts],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
