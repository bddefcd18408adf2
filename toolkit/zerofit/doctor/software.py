"""Versions and hashes of the software on this host, without importing it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from zerofit.spec.extras import installed_version

PACKAGES = ("zerofit", "deepspeed", "transformers", "accelerate", "torchvision", "numpy", "triton", "psutil")
CODE = {".py", ".json", ".yaml", ".yml"}
AT_MOST = 10_000  # maximum number of files to hash; a folder with more files is not a package


def versions() -> dict[str, str | None]:
    """Return the versions of Python, packages, CUDA, ROCm and NCCL; None if missing."""
    installed = {name: installed_version(name) for name in PACKAGES}
    found = {"python": platform.python_version(), **installed, **_torch()}
    cuda = found.get("cuda")
    found["nccl"] = installed_version(f"nvidia-nccl-cu{cuda.split('.')[0]}") if cuda else None
    return found


def _torch() -> dict[str, str | None]:
    names = {"torch": "__version__", "cuda": "cuda", "hip": "hip", "torch_git": "git_version"}
    # The package's metadata has torch's version, but not its CUDA, ROCm or commit.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return dict.fromkeys(names)
    constants: dict[str, str | None] = {}
    # the assignments in torch/version.py, read as text, since importing torch needs seconds
    for node in ast.parse((Path(spec.origin).parent / "version.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant):
            constants[targets[0].id] = value.value if isinstance(value.value, str) else None
    return {name: constants.get(key) for name, key in names.items()}


def own_code() -> str:
    """Return the hash of this host's zerofit source."""
    top = Path(__file__).parents[1]
    return _hashed((str(p.relative_to(top)), p) for p in _files(top, CODE))


def model_code(model: str) -> Path | None:
    """Return the file or top folder of a model `package.module:callable`, if there is one."""
    module, colon, _ = model.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        return None
    top = module.split(".")[0]
    # The order is that of an import in a rank: the current folder first, and a package before a module of the same
    # name.
    candidates = [Path(folder or ".") / name for folder in ("", *sys.path) for name in (top, f"{top}.py")]
    found = [path for path in candidates if path.exists()]
    # like Python's import: a folder without __init__.py counts only if there is no module of this name
    modules = (path for path in found if path.suffix or (path / "__init__.py").exists())
    return next(modules, found[0] if found else None)


def code_hash(path: Path) -> str | None:
    """Return the hash of a module's file or a package's Python files; None if it does not exist."""
    if path.is_file():
        return _hashed([(path.name, path)])
    return _hashed((str(p.relative_to(path)), p) for p in _files(path, {".py"})) if path.is_dir() else None


def file_hash(path: Path) -> str | None:
    """Return the hash of one file's bytes; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _files(top: Path, kinds: set[str]) -> list[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(top, followlinks=True):
        venvs = {name for name in inner if Path(folder, name, "pyvenv.cfg").exists()}
        # os.walk enters the folders that are left, in this order; a hash needs a fixed order
        inner[:] = sorted(name for name in inner if name[0] != "." and name not in {"__pycache__", *venvs})
        found += [Path(folder, name) for name in sorted(names) if Path(name).suffix in kinds]
        if len(found) >= AT_MOST:
            break
    return found[:AT_MOST]


def _hashed(files: Iterable[tuple[str, Path]]) -> str:
    total = hashlib.sha256()
    for name, path in files:
        total.update(f"{name}\0{file_hash(path)}\0".encode())
    return total.hexdigest()
