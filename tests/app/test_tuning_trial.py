"""What a trial's command has said becomes its status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zerofit.app.tuning.tune import _why
from zerofit.launch import parent_death

IN_BACKGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts with &
from zerofit.launch import parent_death
parent_death.run_and_exit = lambda run: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
sys.argv = ["", str(os.getppid()), sys.argv[1], "train"]
parent_death.main()
"""


@pytest.mark.parametrize(
    ("error", "late", "status"),
    [
        ({"kind": "does-not-fit", "message": "gpt2 needs 9 GiB"}, False, "does-not-fit"),
        ({"kind": "out-of-memory", "message": "rank 0"}, False, "oom"),
        ({"kind": "hang", "message": "rank 1"}, False, "hang"),
        ({}, False, "crash"),
        ({"kind": "does-not-fit", "message": "gpt2 needs 9 GiB"}, True, "stopped"),
    ],
)
def test_how_a_trial_ended(error, late, status):
    found, reason = _why(1, error, late)
    assert found == status
    assert late or reason == error.get("message", "exited with code 1")


@pytest.mark.parametrize(("module", "heeded"), [(parent_death.COMMAND, True), ("deepspeed.launcher.runner", False)])
def test_a_tuner_in_the_background_stops_its_trials(module, heeded):
    """They are stopped by SIGINT; other processes leave it to their shell."""
    said = subprocess.run([sys.executable, "-c", IN_BACKGROUND, module], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(heeded)
