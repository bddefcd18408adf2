"""Build the documentation site into build/site: the pages of this repository, and a reference made from the code.

    python docs/site.py            # needs the packages of the extra `docs`, and no network

Pages are copied to build/pages, which mkdocs.yml names. Links out of docs/ then lead to the copied page, to a copied
picture, or to the file in the repository. The reference is written there too, so it cannot differ from the code.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
REPOSITORY = "https://github.com/zerofit/zerofit/blob/main/"
PICTURES = {".png", ".svg", ".html"}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
GAP = "…"  # what a message has in place of a name or number


def sources() -> dict[Path, Path]:
    """Return each page of the repository and its place on the site."""
    places = {page: page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    named = {"README.md": "overview.md"}  # README.md would be the start page, which is docs/index.md
    named |= {
        f"{name}.md": f"project/{name.lower()}.md" for name in ("AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")
    }
    others = [ROOT / "ds_configs" / "README.md", *(ROOT / "benchmarks").rglob("README.md")]
    others += (ROOT / "examples").rglob("README.md")
    places |= {ROOT / name: Path(place) for name, place in named.items()}
    return places | {page: page.relative_to(ROOT) for page in others}


def copy_pages() -> None:
    """Write all pages with their links, and the pictures that they show, below build/pages."""
    places = sources()
    for page, place in places.items():

        def relinked(match: re.Match[str], page: Path = page, place: Path = place) -> str:
            return match[1] + _target(match[2], page, place, places) + match[3]

        _write(place, LINK.sub(relinked, page.read_text(encoding="utf-8")))


def _target(link: str, page: Path, place: Path, places: dict[Path, Path]) -> str:
    """Return where a link of a page leads on the site."""
    target = (page.parent / link).resolve()
    if ":" in link or not target.exists():
        return link
    own = target.relative_to(ROOT)
    if target not in places and target.suffix not in PICTURES:
        return REPOSITORY + own.as_posix()
    if target not in places:
        copy = PAGES / own
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copy)
    return os.path.relpath(places.get(target, own), place.parent)


def _write(place: str | Path, text: str) -> None:
    path = PAGES / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def commands_page() -> str:
    """Return the page of all commands and options, which mkdocs-click fills in."""
    directive = "::: mkdocs-click\n    :module: zerofit.cli.main\n    :command: main\n    :prog_name: zerofit\n"
    return f"# Commands\n\n{directive}    :depth: 1\n    :list_subcommands: true\n"


def python_page() -> str:
    """Return the page of what `import zerofit` offers, which mkdocstrings fills in."""
    import zerofit

    places = {name: module for module, names in zerofit._MODULES.items() for name in names}
    parts = ["# Python API\n", "Recipes: [From Python](../python.md).\n"]
    for name in zerofit.__all__:
        own = places[name] if places[name] == f"zerofit.{name}" else f"{places[name]}.{name}"
        parts.append(f"## zerofit.{name}\n\n::: {own}\n    options:\n      heading_level: 3\n")
    return "\n".join(parts)


def run_page() -> str:
    """Return the table of run.yaml's keys."""
    from zerofit.spec.run import Run, plain_type

    rows = []
    for key, field in Run.model_fields.items():
        kind = plain_type(field.annotation)
        values = [f"`{value}`" for value in get_args(kind)] if get_origin(kind) is Literal else []
        default = "" if field.default is None else f"`{field.default}`"
        shown = ", ".join(values) or getattr(kind, "__name__", "value")
        rows.append((f"`{key}`", shown, default, field.description or ""))
    text = "Each key is an option of `zerofit train` too: `ds_config` is `--ds-config`.\n\n"
    return "# Keys of run.yaml\n\n" + text + _table(("key", "type", "default", ""), *rows)


def optimizers_page() -> str:
    """Return the table of the optimizers of `zerofit train`, from their entries."""
    from zerofit.features.optimizers import ENTRIES

    rows = []
    for entry in ENTRIES:
        rates = [f"{rate:g}" for rate in (entry.rates.scratch, entry.rates.pretrained, entry.rates.adapters)]
        usual = [f"weight decay {entry.weight_decay:g}"]
        usual += [f"momentum {entry.momentum:g}"] if entry.momentum else []
        usual += [f"{key} {value}" for key, value in entry.params.items()]
        rows.append((f"`{entry.name}`", f"`{entry.json_type}`", entry.docs, *rates, ", ".join(usual)))
    text = "Rates are for a batch of 16 and 1.2 million parameters; [how they change](../defaults.md).\n\n"
    names = ("`--optimizer`", "DeepSpeed's type", "states, ZeRO", "from scratch", "fine-tuning", "adapters", "usual")
    return "# Optimizers\n\n" + text + _table(names, *rows)


def features_page() -> str:
    """Return the table of ZeRO's features and what they do not go with, from their entries."""
    from zerofit.features.zero import ZERO_FEATURES

    rows = []
    for feature in ZERO_FEATURES:
        refused = {
            "tensor, pipeline, sequence or expert parallelism that zerofit lays out": not feature.tested_combined,
            "adapters, frozen weights": not feature.tested_frozen,
            "`--ema`": not feature.keeps_masters,
            "`tune`": not feature.tuned,
            "`simulate`": feature.not_simulated,
            "`plan`": feature.not_planned,
            "resume": feature.unsaved,
        }
        below = f"below stage 3, {feature.ignored_below_3}" if feature.ignored_below_3 else ""
        rows.append((f"`{feature.path}`", feature.docs, below, ", ".join(name for name, no in refused.items() if no)))
    return "# Features of ZeRO\n\n" + _table(("key", "what it does", "stages", "refused with"), *rows)


def keys_page() -> str:
    """Return the table of DeepSpeed's configuration keys, as `zerofit schema` prints them."""
    from zerofit.check.reader import schema

    found = schema()
    rows = [
        (f"`{path}`", _kind(node), f"`{node['default']}`" if "default" in node else "", node.get("description", ""))
        for path, node in _leaves(found)
    ]
    text = "`zerofit schema` prints this as a JSON Schema for editors.\n\n"
    return f"# {found['title']}\n\n{text}" + _table(("key", "type", "default", ""), *rows)


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, child in node.get("properties", {}).items():
        if child.get("properties"):
            yield from _leaves(child, f"{prefix}{key}.")
        else:
            yield prefix + key, child


def _kind(node: dict[str, Any]) -> str:
    kinds = [node, *node.get("anyOf", ())]
    types = [kind.get("type") or kind.get("const") or "" for kind in kinds]
    found = [word for one in types for word in (one if isinstance(one, list) else [str(one)])]
    values = [f"`{value}`" for kind in kinds for value in kind.get("enum", ())]
    return ", ".join(dict.fromkeys(values or [word for word in found if word]))


def checks_page() -> str:
    """Return the table of the findings of `zerofit check`."""
    from zerofit.check.rule import PLACE, rules

    texts = _calls("check", "code", ("Finding",))
    for rule in rules():
        shown = {name: PLACE.sub(GAP, getattr(rule, name)) for name in ("message", "fix")}
        texts.setdefault(rule.code, []).append(shown)
    listed = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")  # has all codes that no rule has literally
    for codes, meaning in re.findall(r"^- ((?:`[a-z0-9-]+`(?:, )?)+): (.+)$", listed, re.MULTILINE):
        for code in re.findall("`(.+?)`", codes):
            if not _unique(texts.get(code, []), "message"):
                texts[code] = [{"message": meaning}, *texts.get(code, [])]
    rows = [
        (f"`{code}`", "<br>".join(_unique(found, "message")), "<br>".join(_unique(found, "fix")))
        for code, found in sorted(texts.items())
    ]
    text = f"`{GAP}` stands for names and numbers. [How files are read and judged](../checks.md).\n\n"
    return "# Findings of `zerofit check`\n\n" + text + _table(("code", "what it reports", "fix"), *rows)


def errors_page() -> str:
    """Return the table of errors by their stable kind."""
    rows = [
        (f"`{kind}`", "<br>".join(_unique(found, "message")), "<br>".join(_unique(found, "hint")))
        for kind, found in sorted(_calls(".", "kind", ("Problem", "add", "_verdict", "ModelError")).items())
    ]
    text = f"`--json` prints the kind. `{GAP}` stands for names and numbers. [What to do](../troubleshooting.md).\n\n"
    return "# Errors by kind\n\n" + text + _table(("kind", "message", "hint"), *rows)


def _unique(found: list[dict[str, str]], name: str) -> list[str]:
    texts = [one[name].replace("<", "&lt;") for one in found if re.search(r"\w", one.get(name, ""))]
    return list(dict.fromkeys(texts))


def _calls(folders: str, slug: str, names: tuple[str, ...]) -> dict[str, list[dict[str, str]]]:
    """Return what the calls of these names are given, as texts, by the slug that is one of their arguments."""
    found = defaultdict[str, list[dict[str, str]]](list)
    for path in chain.from_iterable(map(_sources_of, folders.split())):
        assigned: list[tuple[str, ast.expr]] = []
        for node in _in_order(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign):
                assigned += _assigned(node)
            if isinstance(node, ast.Call) and _name(node) in names:
                arguments = dict(zip((slug, "message", "hint"), node.args, strict=False))
                arguments |= {word.arg: word.value for word in node.keywords if word.arg}
                texts = {name: _text(value, dict(assigned)) for name, value in arguments.items()}
                if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", texts.get(slug, "")) and "message" in texts:
                    found[texts[slug]].append(texts)
            if isinstance(node, ast.FunctionDef):
                assigned.clear()
    return found


def _sources_of(folder: str) -> list[Path]:
    linked = (ROOT / "models").rglob("*.py") if folder == "." else ()  # rglob follows no links
    return sorted([*(ROOT / "toolkit" / "zerofit" / folder).rglob("*.py"), *linked])


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _assigned(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    return [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]


def _text(node: ast.expr, given: dict[str, ast.expr], depth: int = 3) -> str:
    """Return a message as far as the code has it literally."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, given, depth) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, given, depth) + _text(node.right, given, depth)
    if isinstance(node, ast.Name) and node.id in given and depth:
        return _text(given[node.id], given, depth - 1)
    return GAP


def glossary_page() -> str:
    """Return the glossary of docs/architecture.md as a page of its own."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return "# Glossary\n" + text.partition("\n## Glossary\n")[2].partition("\n## ")[0]


GENERATED = {
    "reference/commands.md": commands_page,
    "reference/python-api.md": python_page,
    "reference/run-keys.md": run_page,
    "reference/optimizers.md": optimizers_page,
    "reference/zero-features.md": features_page,
    "reference/deepspeed-keys.md": keys_page,
    "reference/check-findings.md": checks_page,
    "reference/errors.md": errors_page,
    "reference/glossary.md": glossary_page,
}


def write_pages() -> None:
    """Write every page of the site below build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    copy_pages()
    for place, page in GENERATED.items():
        _write(place, page())


if __name__ == "__main__":
    write_pages()
    zensical = Path(sys.executable).with_name("zensical")  # an environment need not be activated
    sys.exit(subprocess.run([zensical, "build", "--strict", *sys.argv[1:]], cwd=ROOT).returncode)
