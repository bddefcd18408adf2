"""Make the profiles of named models that ship with zerofit (models/profiles), or compare them with the code.

    python benchmarks/shipped_profiles.py                   # traces all that ship, writes those that differ: 15 minutes
    python benchmarks/shipped_profiles.py --check           # the same, but writes none; exit code 1: one differs
    python benchmarks/shipped_profiles.py --check --sample  # only one model of each architecture: 5 minutes
    python benchmarks/shipped_profiles.py NAME...           # these models, also if they do not ship yet

The profiles are for GPUs in bf16, at each model's default length. Where the code that traces has changed, all may be
outdated: `fingerprint` says so, and a test holds it. A run over all models or the sample writes the fingerprint anew if
the profiles are those that the code makes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.progress import track

from zerofit.models import shipped_profiles as shipped
from zerofit.models.presets import NAMED, PRESETS
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write
from zerofit.spec.profile import Profile

ROOT = Path(__file__).parents[1]
FINGERPRINT = shipped.FOLDER / "fingerprint.txt"
TRACER = "zerofit.simulate.costs.profile"
ROOMS = ("models", "simulate", "train")  # whose code a trace runs; `spec` has only types for it
SETTING = ("cuda", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="named models [all that ship]")
    parser.add_argument("--check", action="store_true", help="compare, and write no profile")
    parser.add_argument("--sample", action="store_true", help="only the first model of each architecture")
    arguments = parser.parse_args()
    names = arguments.names or shipped_models()
    if arguments.sample:
        names = list({_architecture(name): name for name in reversed(names)}.values())
    differing = []
    for name in track(names, description="tracing", disable=not sys.stderr.isatty()):
        if not same(name):
            differing.append(name)
            if not arguments.check:
                write(name)
    print(f"{len(names)} compared, {len(differing)} differ: {', '.join(differing)}")
    # --sample has not looked at the others of an architecture that differs
    if not arguments.names and not (differing and (arguments.check or arguments.sample)):
        FINGERPRINT.write_text(fingerprint() + "\n")
    sys.exit(bool(differing and arguments.check))


def shipped_models() -> list[str]:
    """Return the names of the models whose profiles ship, in the order of the table of models."""
    names = {name for file in shipped.FOLDER.glob("*.xz") for name in shipped.read_lines(file)}
    return [name for name in NAMED if name in names]


def same(model: str) -> bool:
    """Return whether the shipped profile is the one that a trace gives now."""
    return shipped.read_lines(file_of(model)).get(model) == (shipped.config_digest(model), traced(model))


@cache
def traced(model: str) -> str:
    """Return the profile as `zerofit plan MODEL` makes it, as JSON in one line."""
    from zerofit.app.planning.profiles import ProfileRequest, trace

    device, precision = SETTING
    return text_of(trace(ProfileRequest(model=model, device=device, precision=precision), Reporter()))


def file_of(model: str) -> Path:
    """Return the file that has the model."""
    return shipped.profile_file(NAMED[model].family, *SETTING)


def write(model: str) -> None:
    """Write a model's profile into its family's file, the same bytes for the same profiles."""
    file = file_of(model)
    lines = {**shipped.read_lines(file), model: (shipped.config_digest(model), traced(model))}
    rows = ["\t".join((name, *lines[name])) for name in sorted(lines)]
    with atomic_write(file) as out:
        out.write(lzma.compress(("\n".join(rows) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME))


def _architecture(model: str) -> str:
    config = PRESETS.get(model, {})
    return str(config.get("model_type") or config.get("_class_name") or model)


def text_of(profile: Profile) -> str:
    """Return a profile as JSON in one line, without what is a default: half as long, and it reads back the same."""
    return json.dumps(_lean(profile), separators=(",", ":"), sort_keys=True)


def _lean(value: Any) -> Any:
    if is_dataclass(value):
        # engines' own models are not shipped
        given = {one.name: (getattr(value, one.name), one.default) for one in fields(value) if one.name != "own_models"}
        return {name: _lean(now) for name, (now, default) in given.items() if now != default}
    if isinstance(value, dict):
        return {key: _lean(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_lean(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def fingerprint() -> str:
    """Return a digest of the code that traces, of all modules of ROOMS that the tracer imports.

    Comments, docstrings and texts of several words (messages) do not count.
    """
    digest = hashlib.sha256()
    for module in sorted(_modules()):
        tree = _Wordless().visit(ast.parse(_path(module).read_text(encoding="utf-8")))
        digest.update(f"{module} {_plain(tree)}\n".encode())
    return digest.hexdigest()[:16]


class _Wordless(ast.NodeTransformer):
    """What leaves a module as it is but for its words."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(value="") if isinstance(node.value, str) and len(node.value.split()) > 1 else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        texts = [one.value for one in node.values if isinstance(one, ast.Constant)]
        return ast.Constant(value="") if any(" " in str(text) for text in texts) else self.generic_visit(node)


def _plain(node: Any) -> Any:
    """Return a tree as lists, alike in all versions of Python: `ast.dump` writes more fields in some."""
    if isinstance(node, ast.AST):
        return [type(node).__name__, *([name, _plain(one)] for name, one in ast.iter_fields(node) if one or one == 0)]
    return [_plain(one) for one in node] if isinstance(node, list) else repr(node)


def _modules() -> set[str]:
    """Return the tracer and all that it imports, as far as it lies in ROOMS."""
    found, left = set[str](), [TRACER]
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            left += _imports(module)
    return found


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_path(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zerofit":
            for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)):
                if name.split(".")[1:2] and name.split(".")[1] in ROOMS and _path(name).is_file():
                    yield name


def _path(module: str) -> Path:
    return (ROOT / "toolkit" / Path(*module.split("."))).with_suffix(".py")


if __name__ == "__main__":
    main()
