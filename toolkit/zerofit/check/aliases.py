"""Old names and aliases of keys, replaced by the documented names before the rules run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.check.catalog import Catalog, catalog, documented
from zerofit.check.dotted import drop, get, has, put, with_parents
from zerofit.check.edit import Assignment, Deletion, Edit, Move, Removal, Renaming
from zerofit.check.finding import Finding
from zerofit.features.zero import ZERO

OFFLOAD_FLAGS = ("cpu_offload", "cpu_offload_param")  # keys with true or false instead of a section


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """A configuration with documented names, and the file's names of its keys."""

    config: Mapping[str, object]
    written: Mapping[str, str] = field(default_factory=dict)  # documented path -> path in the file

    def in_file(self, path: str) -> str:
        """Return the path in the file for a documented path."""
        head = next((p for p in with_parents(path) if p in self.written), None)
        if head is None:
            return path
        # A flag like cpu_offload has no keys in it: it means a section with a device.
        flag = self.written[head].rpartition(".")[2] in OFFLOAD_FLAGS
        return self.written[head] if flag else self.written[head] + path[len(head) :]

    def documented(self, path: str) -> str:
        """Return the documented path for a path in the file."""
        names = {written: name for name, written in self.written.items()}
        head = next((p for p in with_parents(path) if p in names), None)
        return path if head is None else names[head] + path[len(head) :]

    def finding_in_file(self, finding: Finding) -> Finding:
        """Return the finding with the file's paths, also in its edits."""
        if not self.written:
            return finding
        edits = tuple(self._edit(edit) for edit in finding.edits)
        return replace(finding, path=self.in_file(finding.path), edits=edits)

    def _edit(self, edit: Edit) -> Edit:
        if isinstance(edit, Deletion | Move):
            return edit
        path = self.in_file(edit.path)
        if isinstance(edit, Renaming):
            return Renaming(path, edit.key)
        return Removal(path) if isinstance(edit, Removal) else Assignment(path, edit.value)


def resolve(config: Mapping[str, object], catalog: Catalog) -> Aliases:
    """Return the configuration with documented names."""
    written: dict[str, str] = {}
    return Aliases(config=_resolved(config, "", "", catalog, written), written=written)


def documented_config(config: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration with documented names, and `zero_optimization` as an object.

    >>> documented_config({"bfloat16": {"enabled": True}, "zero_optimization": True})
    {'bf16': {'enabled': True}, 'zero_optimization': {'stage': 1}}
    """
    renamed = dict(resolve(config, catalog()).config)
    zero = renamed.get(ZERO)
    if isinstance(zero, bool):  # DeepSpeed's form of 2020 (runtime/zero/config.py:60)
        renamed[ZERO] = {"stage": int(zero)}
    return renamed


def corrected(config: Mapping[str, object], findings: Iterable[Finding]) -> Aliases:
    """Return the configuration that the user most likely means, without errors in single keys."""
    # Without this, `"enabled": "true"`, `"stage": "3"` or a misspelled section would hide other faults from the rules.
    meant = deepcopy(dict(config))
    written: dict[str, str] = {}
    edits = [edit for finding in findings if finding.severity == "error" for edit in finding.edits]
    for edit in edits:
        if isinstance(edit, Assignment):
            put(meant, edit.path, edit.value)
        elif isinstance(edit, Removal):
            drop(meant, edit.path)
    # Inner keys come first, because their paths have the outer key's old name.
    moves = [edit for edit in edits if isinstance(edit, Renaming | Move)]
    for edit in sorted(moves, key=lambda move: move.path.count("."), reverse=True):
        if isinstance(edit, Move):
            target = edit.to
        else:
            parent = edit.path.rpartition(".")[0]
            target = f"{parent}.{edit.key}" if parent else edit.key
        if has(meant, edit.path) and not has(meant, target):
            put(meant, target, get(meant, edit.path))
            drop(meant, edit.path)
            written[target] = edit.path
    return Aliases(config=meant, written=written)


def _resolved(
    config: Mapping[str, object], prefix: str, documented_prefix: str, catalog: Catalog, written: dict[str, str]
) -> dict[str, object]:
    """Return a section with documented names.

    `prefix` is the section's path in the file, `documented_prefix` its documented path. Each renamed key is added
    to `written`.
    """
    section: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        name = documented(prefix, key, catalog.deprecated)
        # If a file has two names of the same key, the documented name counts.
        if name != key and name in config:
            continue
        if key in OFFLOAD_FLAGS and path in catalog.deprecated:
            if value is not True:
                continue
            value = {"device": "cpu"}
        if name != key:
            written[f"{documented_prefix}{name}"] = path
        if isinstance(value, Mapping):
            value = _resolved(value, f"{path}.", f"{documented_prefix}{name}.", catalog, written)
        section[name] = value
    return section
