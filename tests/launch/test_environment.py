"""The environment of ranks: what is set stays, but for what DeepSpeed cannot read."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from zerofit.launch.host import ARCH_LIST, environment


@pytest.mark.parametrize("asked", ["9.0", "8.0;9.0+PTX", "8.0 8.6", " 9.0 ", ""])
def test_architectures_that_deepspeed_reads_stay(asked):
    assert environment("cuda", 8, 1, {ARCH_LIST: asked})[ARCH_LIST] == asked
    assert ARCH_LIST not in environment("cuda", 8, 1, {})


@pytest.mark.parametrize("asked", ["9.0a", "8.0;9.0a+PTX", "Hopper", "10.0f"])
def test_others_are_left_to_the_devices(asked):
    """DeepSpeed's op builder takes what follows the point for an integer."""
    with pytest.raises(ValueError, match="invalid literal"):
        sorted(asked.split(";"), key=lambda one: tuple(int(part.split("+")[0]) for part in one.split(".")))
    assert environment("cuda", 8, 1, {ARCH_LIST: asked})[ARCH_LIST] == ""


def test_one_ninja_compiles_and_checks_the_ops():
    """Another version of ninja would start its log over, and compile all ops again."""
    for given in ({"PATH": "/usr/bin:/bin"}, {}):
        env = environment("cpu", 2, 1, given)
        assert shutil.which("ninja", path=env["PATH"]) == str(Path(sys.executable).with_name("ninja"))
    assert environment("cpu", 2, 1, env)["PATH"] == env["PATH"]
