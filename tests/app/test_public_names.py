"""`import zerofit`: quick, without torch, and its functions keep their names beside packages that are called so too."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

import zerofit


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_heavy_is_imported():
    code = "import zerofit as zf, sys; zf.Run(model='gpt2'); zf.Cluster('t4')"
    assert said(f"{code}; print(sorted({{'torch', 'deepspeed', 'transformers'}} & set(sys.modules)))") == "[]"


def test_a_package_does_not_hide_a_function_of_its_name():
    code = "import zerofit.check.check, zerofit.simulate, zerofit.plan.search, zerofit as zf"
    names = said(f"{code}; print([n for n in dir(zf) if type(getattr(zf, n)).__name__ == 'module'])")
    assert names == "[]"


@pytest.mark.parametrize("name", [name for name in zerofit.__all__ if name.islower() or name == "Cluster"])
def test_the_example_of_each_runs(name):
    found = doctest.DocTestFinder().find(getattr(zerofit, name), name)
    examples = [one for one in found if one.examples]
    assert examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for one in examples:
        runner.run(one)
    assert runner.summarize(verbose=False).failed == 0
