"""A digest of a module's code and of all modules of ours that it imports, directly or not."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "zerofit"
ROOT = Path(__file__).parents[2]


@cache
def code_digest(module: str, root: Path = ROOT) -> str:
    """Return the same text for the same code; `root` is the folder of the package.

    Raises ModuleNotFoundError where a module of ours that is imported has no file.
    """
    digest = hashlib.sha256()
    for _, source in sorted(import_closure(module, root).items()):
        digest.update(source)
    return digest.hexdigest()[:12]


def import_closure(module: str, root: Path = ROOT) -> dict[str, bytes]:
    """Return the sources, by name, of a module and all of ours that it imports, inside functions too."""
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _file(name, root)
        if path is None:
            raise ModuleNotFoundError(f"no file for {name} below {root}", name=name)
        found[name] = path.read_bytes()
        waiting += _imports(ast.parse(found[name]), root)
        waiting += [name.rpartition(".")[0]] if "." in name else []  # a package's own code runs first
    return found


def _file(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split(".")[1:])
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def _imports(tree: ast.Module, root: Path) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            yield str(node.module)
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in submodules if _file(name, root))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node; not the expressions, which are most of a tree and import nothing."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from _statements(child)
