"""Make the profiles of named models that ship with zerofit (models/profiles), or hold them against the code.

    python benchmarks/shipped_profiles.py [WORD...]         # makes what is missing or stale: 3 s a model and setting
    python benchmarks/shipped_profiles.py --check [WORD...] # traces all again and compares; exit code 1: one differs
    python benchmarks/shipped_profiles.py --check --every 40    # a sample, for a change that should change nothing

WORDs are those of `zerofit models`. A profile is stale where its model's config has changed. All are stale where the
code that traces has: `fingerprint` says so, and a test holds it. A check that finds no difference writes the
fingerprint anew. Each model is written at once, so that a run can be stopped and goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zerofit.models import shipped_profiles as shipped
from zerofit.models.names import model_table
from zerofit.models.presets import NAMED
from zerofit.spec.events import Reporter
from zerofit.spec.files import atomic_write
from zerofit.spec.profile import Profile

ROOT = Path(__file__).parents[1]
FINGERPRINT = shipped.FOLDER / "fingerprint.txt"
TRACER = "zerofit.simulate.costs.profile"
ROOMS = ("models", "simulate", "train")  # whose code a trace runs; `spec` has only types for it
# device, precision, length; the usual ones first
SETTINGS = (("cuda", "bf16", None), ("cpu", "fp32", None), ("cuda", "fp16", None), ("cuda", "bf16", 4096))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--check", action="store_true", help="compare, and make nothing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare only every Nth")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings, the usual first")
    arguments = parser.parse_args()
    rows = model_table(tuple(arguments.words))
    wanted: list[tuple[str, str, str, int | None]] = [
        (str(row["name"]), device, precision, seq_len)
        for device, precision, seq_len in SETTINGS[: arguments.settings]
        for row in rows
        if ships(str(row["name"]), seq_len)
    ]
    if arguments.check:
        there = [one for one in wanted if one[0] in shipped.read_lines(file_of(*one))][:: arguments.every]
        differing = [one for one in there if not same(*one)]
        print(f"{len(there)} compared, {len(differing)} differ: {differing}")
        if there and not differing:
            FINGERPRINT.write_text(fingerprint() + "\n")
        sys.exit(bool(differing))
    make(wanted)


def ships(model: str, seq_len: int | None) -> bool:
    """Return whether this length of a model is made: other ones than its own of language models alone."""
    return NAMED[model].kind != "gan" and (seq_len is None or NAMED[model].kind == "causal-lm")


def make(wanted: list[tuple[str, str, str, int | None]]) -> None:
    """Trace what is missing or stale, and write it at once."""
    if not FINGERPRINT.is_file() or FINGERPRINT.read_text().strip() != fingerprint():
        for file in shipped.FOLDER.glob("*.xz"):
            file.unlink()  # made by other code
        shipped.FOLDER.mkdir(exist_ok=True)
        FINGERPRINT.write_text(fingerprint() + "\n")
    for model, device, precision, seq_len in wanted:
        file, start = file_of(model, device, precision, seq_len), time.perf_counter()
        lines = shipped.read_lines(file)
        if lines.get(model, ("",))[0] == shipped.config_digest(model):
            continue
        try:
            profile = traced(model, device, precision, seq_len)
        except Exception as error:  # a model that is not longer than so many tokens, or has no such form
            print(f"{model} {device} {precision} {seq_len or ''}: left out, {error}", flush=True)
            continue
        write_lines(file, {**lines, model: (shipped.config_digest(model), text_of(profile))})
        print(f"{model} {device} {precision} {seq_len or ''}: {time.perf_counter() - start:.1f} s", flush=True)


def same(model: str, device: str, precision: str, seq_len: int | None) -> bool:
    """Return whether the shipped profile is the one that a trace gives now."""
    digest, text = shipped.read_lines(file_of(model, device, precision, seq_len))[model]
    return digest == shipped.config_digest(model) and text == text_of(traced(model, device, precision, seq_len))


def traced(model: str, device: str, precision: str, seq_len: int | None) -> Profile:
    """Return the profile as `zerofit plan MODEL` makes it."""
    from zerofit.app.planning.profiles import ProfileRequest, trace

    return trace(ProfileRequest(model=model, device=device, precision=precision, seq_len=seq_len), Reporter())


def file_of(model: str, device: str, precision: str, seq_len: int | None) -> Path:
    """Return the file that has the model in this setting."""
    return shipped.profile_file(NAMED[model].family, device, precision, seq_len)


def write_lines(file: Path, lines: dict[str, tuple[str, str]]) -> None:
    """Write a family's profiles, the same bytes for the same profiles."""
    rows = ["\t".join((name, *lines[name])) for name in sorted(lines)]
    with atomic_write(file) as out:
        out.write(lzma.compress(("\n".join(rows) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME))


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
