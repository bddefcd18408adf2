"""Old and second names of keys, resolved to the documented ones before any rule looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.check.catalog import Catalog, catalog, documented
from zerofit.check.edit import Assignment, Deletion, Edit, Move, Removal, Renaming
from zerofit.check.finding import Finding
from zerofit.check.subject import ZERO

OFFLOAD_FLAGS = ("cpu_offload", "cpu_offload_param")  # true or false in the place of a section


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """A configuration in documented names, and how the file writes each of them."""

    config: Mapping[str, Any]
    written: Mapping[str, str] = field(default_factory=dict)  # documented path -> path in the file

    def in_file(self, path: str) -> str:
        """Return the path in the file of a key that a rule speaks of."""
        head = next((p for p in _heads(path) if p in self.written), None)
        if head is None:
            return path
        flag = self.written[head].rpartition(".")[2] in OFFLOAD_FLAGS
        return self.written[head] if flag else self.written[head] + path[len(head) :]

    def finding_in_file(self, finding: Finding) -> Finding:
        """Return the same finding, and its edits, of the keys as the file writes them."""
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


def resolve(config: Mapping[str, Any], catalog: Catalog) -> Aliases:
    """Return the configuration in documented names. Where a key stands under both, the documented one decides."""
    written: dict[str, str] = {}
    return Aliases(config=_resolved(config, "", "", catalog, written), written=written)


def documented_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as DeepSpeed takes it, under documented names and with ZeRO's section written out.

    >>> documented_config({"bfloat16": {"enabled": True}, "zero_optimization": True})
    {'bf16': {'enabled': True}, 'zero_optimization': {'stage': 1}}
    """
    found = dict(resolve(config, catalog()).config)
    if isinstance(found.get(ZERO), bool):  # the form of 2020 (runtime/zero/config.py:60)
        found[ZERO] = {"stage": int(found[ZERO])}
    return found


def _resolved(
    config: Mapping[str, Any], prefix: str, told: str, catalog: Catalog, written: dict[str, str]
) -> dict[str, Any]:
    """Return a section in documented names; `prefix` is its path in the file, `told` the documented one."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        name = documented(prefix, key, catalog.deprecated)
        if name != key and name in config:
            continue
        if key in OFFLOAD_FLAGS and path in catalog.deprecated:
            if value is not True:
                continue
            value = {"device": "cpu"}
        if name != key:
            written[f"{told}{name}"] = path
        found[name] = (
            _resolved(value, f"{path}.", f"{told}{name}.", catalog, written) if isinstance(value, Mapping) else value
        )
    return found


def _heads(path: str) -> list[str]:
    """Return a dotted path and all that lead to it, the longest first."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
