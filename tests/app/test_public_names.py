"""`import zerofit`: quick, without torch, typed, and every name in it with an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import zerofit

SOURCE = ast.parse(Path(zerofit.__file__).read_text())


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import zerofit; print(sorted(set(sys.modules) - before))"
    assert not {"pydantic", "yaml", "numpy", "torch"} & set(ast.literal_eval(said(code)))
    assert {name for name in ast.literal_eval(said(code)) if name.startswith("zerofit")} == {"zerofit"}


def test_nothing_heavy_is_imported():
    code = "import zerofit as zf, sys; zf.Run(model='gpt2'); zf.Cluster('t4')"
    assert said(f"{code}; print(sorted({{'torch', 'deepspeed', 'transformers'}} & set(sys.modules)))") == "[]"


def test_a_package_does_not_hide_a_function_of_its_name():
    code = "import zerofit.check.check, zerofit.simulate, zerofit.plan.search, zerofit as zf, importlib.util as u"
    shared = "(n for n in dir(zf) if u.find_spec('zerofit.' + n))"  # other names take seconds to import
    names = said(f"{code}; print({{n: type(getattr(zf, n)).__name__ for n in {shared}}})")
    functions = dict.fromkeys(("check", "explain", "plan", "simulate", "train", "tune"), "function")
    assert ast.literal_eval(names) == functions | {"hf": "module"}


def test_type_checkers_read_the_names_that_there_are():
    """`__all__` is a literal list, and each name in it is imported where type checkers look."""
    by_checkers = next(node for node in SOURCE.body if isinstance(node, ast.If))
    imported = {alias.name for node in by_checkers.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {ast.unparse(node.targets[0]): node.value for node in SOURCE.body if isinstance(node, ast.Assign)}
    listed = ast.literal_eval(assigned["__all__"])
    assert listed == sorted(listed) == dir(zerofit)
    assert imported == set(listed) == set(zerofit._MODULE_OF)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        zerofit.trian  # type: ignore  # noqa: B018


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all examples: a run that several of them train is trained once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("name", zerofit.__all__)
def test_the_example_of_each_runs(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    value = getattr(zerofit, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value) and hasattr(value, "to_dict"):
        return  # a result: what returns it has the example
    found = [one for one in doctest.DocTestFinder().find(value, name) if one.examples]
    assert found
    if name == "Session":  # joins a process group, and leaves a launcher's variables in the environment
        module = "zerofit.app.training.session"
        assert (
            said(f"import doctest, {module} as m; print('failed', doctest.testmod(m))")
            .splitlines()[-1]
            .startswith("failed TestResults(failed=0")
        )
        return
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for one in found:
        runner.run(one)
    assert runner.summarize(verbose=False).failed == 0
