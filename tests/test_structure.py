"""The house's rules: imports run one way and in no circles, names are unique, functions take few arguments.

tests/test_hooks.py runs ruff, shellcheck and pyright.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import zerofit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "toolkit" / "zerofit"
MAY_IMPORT = {
    "models": {"spec"},
    "spec": set(),
    "data": {"spec", "models"},
    "check": {"spec"},
    "config": {"spec", "check"},
    "launch": {"spec", "config"},
    "doctor": {"spec", "launch"},
    "explain": {"spec"},
    "checkpoint": {"spec", "models", "data"},
    "train": {"spec", "check", "config", "models", "data", "checkpoint"},
    "simulate": {"spec", "check", "config", "models", "data", "train", "report", "rollout"},
    "infer": {"spec", "models", "data", "checkpoint"},
    "compare": {"spec", "models", "data", "train"},
    "plan": {"spec", "report"},
    "report": {"spec", "explain"},
    "rollout": {"spec", "models", "plan"},
    "tune": {"spec", "plan", "report"},
    "watch": {"spec", "launch"},
    "worker": {"spec", "config", "launch", "models", "data", "train", "watch"},
}
MAY_IMPORT = {room: rooms | {"features"} for room, rooms in MAY_IMPORT.items()} | {"features": set()}
MAY_IMPORT["app"] = {*MAY_IMPORT} - {"worker"}
MAY_IMPORT["cli"] = {*MAY_IMPORT} - {"worker"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["hf"] = {"app", "check", "config", "features", "models", "simulate", "spec"}
MOST_ARGUMENTS = 7
# longer lists of arguments: those of a library's function that is replaced, and some that wait for their owner
MORE_ARGUMENTS = {
    "zerofit.models.state_space": {"inner", "selective_scan"},  # mamba_ssm's
    "zerofit.simulate.fakes.kernels": {"_fused_attention"},  # torch's
    "zerofit.infer.evaluate": {"evaluate"},
    "zerofit.simulate.costs.traced_model": {"make_subject"},
}
# modules that import each other for types only
TYPE_CIRCLES = {
    *("zerofit.train.averaging", "zerofit.train.shard_index", "zerofit.train.trainer"),
}
COMMENTS = 0.04  # of all lines
# what these programs print is read by the process that starts them, or is a rank's log
PROTOCOLS = {"zerofit.worker", "zerofit.doctor.serve", "zerofit.watch.rank_guard", "zerofit.check.derive"}
PROTOCOLS |= {"zerofit.launch.local_ranks"}


@cache
def modules() -> dict[str, Path]:
    """All modules of the package by dotted name; models/ and ds_configs/ by the files that are linked."""
    tops = {"zerofit": PACKAGE, "zerofit.models": ROOT / "models", "zerofit.ds_configs": ROOT / "ds_configs"}
    found = {}
    for top, folder in tops.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((top, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from running(child)


@cache
def imports_of(module: str, *, types: bool = False) -> frozenset[str]:
    """Modules of ours that a module imports, inside functions too; `from zerofit.x import y` may be module x.y.

    `types`: also the imports that only a type checker sees.
    """
    found = set()
    for node in ast.walk(tree(modules()[module])) if types else running(tree(modules()[module])):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name in modules())


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room):
    mine = [name for name in modules() if room_of(name) == room]
    assert mine
    wrong = {name: [i for i in imports_of(name) if room_of(i) not in MAY_IMPORT[room] | {room, ""}] for name in mine}
    assert not {name: imported for name, imported in wrong.items() if imported}


def in_circles(imports: dict[str, set[str]]) -> dict[str, list[str]]:
    """Modules that import themselves through others, each with what it imports of them."""
    left = imports
    while leaves := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in leaves}
    while ends := set(left) - set().union(*left.values()):  # those that only lead to circles
        left = {name: imported for name, imported in left.items() if name not in ends}
    return {name: sorted(imported & left.keys()) for name, imported in left.items()}


@pytest.mark.parametrize("types", [False, True])
def test_imports_run_in_no_circles(types):
    names = [name for name in modules() if name != "zerofit"]  # it offers names of all rooms
    circles = in_circles({name: set(imports_of(name, types=types)) - {name} for name in names})
    assert circles.keys() <= (TYPE_CIRCLES if types else set()), circles


def test_every_room_is_guarded():
    assert {room_of(name) for name in modules()} - {"", "ds_configs"} == set(MAY_IMPORT)


def test_no_two_classes_have_one_name():
    classes = Counter(
        n.name for path in modules().values() for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)
    )
    assert not [name for name, times in classes.items() if times > 1]


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of a function's arguments, without self and cls."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def entries(module: ast.Module) -> set[int]:
    """The lines of functions that users call: those that `import zerofit` offers, and click's commands."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name in zerofit.__all__:
            found |= {inner.lineno for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            command = any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)
            if node.name in zerofit.__all__ or command:
                found.add(node.lineno)
    return found


def test_functions_take_few_arguments():
    """Users' entries take what users can set; other functions take a dataclass instead of many arguments."""
    long = []
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or arguments(node) <= MOST_ARGUMENTS:
                continue
            if node.lineno not in entries(tree(path)) and node.name not in MORE_ARGUMENTS.get(name, ()):
                long.append(f"{path}:{node.lineno} {node.name} has {arguments(node)}")
    assert not long


def test_comments_say_why():
    """A share of the lines is comments; it only grows."""
    lines = [line.strip() for path in modules().values() for line in path.read_text().splitlines()]
    assert sum(line.startswith("#") for line in lines) >= COMMENTS * len(lines)


def test_only_the_command_line_knows_the_terminal():
    """click, rich and print belong to cli/."""
    wrong = []
    for name, path in modules().items():
        if room_of(name) == "cli":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                wrong += [f"{path}:{node.lineno}" for n in names if n.partition(".")[0] in ("click", "rich")]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and name not in PROTOCOLS:
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong


def test_the_longest_tests_are_there():
    """tests/conftest.py starts them first."""
    names = (ROOT / "tests" / "longest.txt").read_text().split()
    assert names and not [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()]


def test_every_package_is_installed():
    """setuptools finds folders that have an __init__.py, and follows the links to models/ and ds_configs/."""
    folders = {path.parent for path in modules().values()}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert (PACKAGE / "models").samefile(ROOT / "models") and (PACKAGE / "ds_configs").samefile(ROOT / "ds_configs")
