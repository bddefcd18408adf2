"""The house's rules: imports run one way, packages are all installed, the code is clean."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
    "checkpoint": {"spec", "models", "data"},
    "train": {"spec", "check", "config", "models", "data", "checkpoint"},
    "simulate": {"spec", "check", "config", "models", "data", "train", "report"},
    "infer": {"spec", "models", "data", "checkpoint"},
    "compare": {"spec", "models", "data", "train"},
    "plan": {"spec"},
    "report": {"spec"},
    "tune": {"plan"},
    "watch": {"spec", "launch"},
    "worker": {"spec", "config", "launch", "models", "data", "train", "watch"},
}
MAY_IMPORT["app"] = {*MAY_IMPORT} - {"worker"}
MAY_IMPORT["cli"] = {*MAY_IMPORT} - {"worker"}


def place_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "models"):
        return "models"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Places of ours that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("zerofit.")}
    return found


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_imports_run_one_way(place):
    files = [p for top in (PACKAGE, ROOT / "models") for p in top.rglob("*.py") if p != PACKAGE / "__init__.py"]
    mine = [p for p in files if place_of(p) == place]
    assert mine
    wrong = {str(p): sorted(imports_of(p) - MAY_IMPORT[place] - {place}) for p in mine}
    assert not {p: names for p, names in wrong.items() if names}


def test_every_place_is_guarded():
    places = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert (places | {"worker"}) - {"ds_configs"} == set(MAY_IMPORT)


def test_every_package_is_installed():
    """setuptools finds folders that have an __init__.py, and follows the links to models/ and ds_configs/."""
    folders = {p.parent for top in (PACKAGE, ROOT / "models", ROOT / "ds_configs") for p in top.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert (PACKAGE / "models").samefile(ROOT / "models") and (PACKAGE / "ds_configs").samefile(ROOT / "ds_configs")


def test_ruff_finds_nothing():
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *check, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
