"""The key under which profiles are kept: it changes with any code that a trace runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from zerofit.app.planning.profiles import ROOT, code_digest, import_closure

TRACER = "zerofit.app.planning.profiles"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    code_digest.cache_clear()
    shutil.copytree(ROOT, tmp_path / "zerofit", ignore=lambda folder, names: [n for n in names if n == "__pycache__"])
    return tmp_path / "zerofit"


@pytest.mark.parametrize(
    "module", ["simulate/profile", "simulate/op_costs", "models/layers", "train/loss", "spec/profile"]
)
def test_a_change_anywhere_in_the_closure_gives_another_digest(copy, module):
    before = code_digest(TRACER, copy)
    assert before == code_digest(TRACER, ROOT)
    with (copy / f"{module}.py").open("a") as file:
        file.write("\n# changed\n")
    code_digest.cache_clear()
    assert code_digest(TRACER, copy) != before


def test_other_code_does_not_count(copy):
    before = code_digest(TRACER, copy)
    (copy / "cli" / "main.py").write_text("")
    code_digest.cache_clear()
    assert code_digest(TRACER, copy) == before


def test_a_module_that_is_gone_is_an_error(copy):
    (copy / "simulate" / "op_costs.py").unlink()
    with pytest.raises(ModuleNotFoundError, match=r"zerofit\.simulate\.op_costs"):
        code_digest(TRACER, copy)
    with pytest.raises(ModuleNotFoundError, match=r"zerofit\.simulate\.nowhere"):
        code_digest("zerofit.simulate.nowhere")


def test_imports_in_every_kind_of_statement_are_found(tmp_path):
    package = tmp_path / "zerofit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in "abcdef":
        (package / f"{name}.py").write_text("")
    (package / "start.py").write_text(
        "import os, zerofit.a\nfrom zerofit import b\n"
        "def work():\n    if os:\n        pass\n    else:\n        from zerofit.c import x\n"
        "try:\n    pass\nexcept OSError:\n    import zerofit.d\n"
        "match os:\n    case None:\n        import zerofit.e as e\n"
    )
    names = {f"zerofit.{name}" for name in (*"abcde", "start")}
    assert set(import_closure("zerofit.start", package)) == {"zerofit", *names}
