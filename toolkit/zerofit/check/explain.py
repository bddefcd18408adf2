"""The effect of each key of a DeepSpeed JSON, and the defaults that apply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zerofit.check.catalog import catalog, documented
from zerofit.check.document import Document
from zerofit.check.dotted import get, leaves, with_parents
from zerofit.check.effective import EffectiveConfig, effective_config
from zerofit.check.finding import Finding
from zerofit.check.rule import defaults, rules
from zerofit.check.subject import TargetHardware

# DeepSpeed tests whether `comms_logger` exists (comm/config.py:22). Nothing reads `data_efficiency.enabled`: the
# sections in it have switches of their own (runtime/data_pipeline/config.py).
READ_WHEN_OFF = ("comms_logger", "data_efficiency")  # sections that `enabled: false` does not switch off
IGNORED_KEYS = ("unknown-key", "own-key")  # key-check findings about ignored keys; rules use `ignored: true`


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """One key: its value and its effect."""

    path: str
    value: object
    status: Literal["takes effect", "ignored", "wrong", "auto", "default"]
    text: str


def explain(document: Document, findings: Sequence[Finding], setting: TargetHardware) -> list[KeyRow]:
    """Return a row for each key, in the JSON's order, and then for each default that matters."""
    effective = effective_config(document.config, catalog(), setting)
    subject = effective.subject
    by_path = {f.path: f for f in reversed(findings)}  # the worst finding of each path
    rows = [_row(path, value, by_path, document.config, effective) for path, value in leaves(document.config)]
    for note in defaults():
        # The file may have this key under a wrong name, which DeepSpeed does not read.
        unread = effective.meant.in_file(note.key) != note.key
        if note.matters(subject) and (unread or not subject.has(note.key)):
            value, text = subject.default(note.key), note.shown(subject)
            rows.append(KeyRow(path=note.key, value=value, status="default", text=text))
    return rows


def _row(
    path: str, value: object, findings: Mapping[str, Finding], config: Mapping[str, object], effective: EffectiveConfig
) -> KeyRow:
    # A finding about a section as ignored is about its keys, too. Other findings are about one key.
    sections = with_parents(path)
    ignored = {*IGNORED_KEYS, *(rule.code for rule in rules() if rule.ignored)}
    related = [findings[p] for p in sections if p in findings]
    finding = next((f for f in related if f.path == path or f.code in ignored), None)
    if finding is not None and finding.code in ignored:
        return KeyRow(path=path, value=value, status="ignored", text=finding.why)
    if finding is not None and finding.severity == "error":
        return KeyRow(path=path, value=value, status="wrong", text=finding.message)
    reason = next((text for section in reversed(sections) if (text := _unread(section, path, config))), None)
    if reason:
        return KeyRow(path=path, value=value, status="ignored", text=reason)
    if value == "auto":
        source = effective.filled.get(path)
        text = f"{json.dumps(source.value)}: {source.by}" if source else "filled in by zerofit or Hugging Face"
        return KeyRow(path=path, value=value, status="auto", text=text)
    node = catalog().node(path) or {}
    return KeyRow(path=path, value=value, status="takes effect", text=node.get("description", ""))


def _unread(section: str, path: str, config: Mapping[str, object]) -> str | None:
    """Return why DeepSpeed ignores a key because of one of its sections; None if it does not."""
    known = catalog()
    parent, _, key = section.rpartition(".")
    prefix = f"{parent}." if parent else ""
    # The file may also have a newer name of the section.
    name = documented(prefix, key, known.deprecated)
    if name != key and get(config, f"{prefix}{name}", None) is not None:
        return f"DeepSpeed uses {prefix}{name} instead, which is also set"
    # Or the section is off.
    switch = f"{section}.enabled"
    if section == path or path == switch or known.node(switch) is None or section in READ_WHEN_OFF:
        return None
    on = get(config, switch, known.default(switch))
    return None if on in (True, "auto") else f"{section} is not enabled"


def shown(value: object) -> str:
    """Return a value as text of at most 24 characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
