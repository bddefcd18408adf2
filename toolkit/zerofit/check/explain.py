"""The effects of a DeepSpeed JSON: which keys are used, which are ignored and why, and which defaults apply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zerofit.check.catalog import catalog, documented
from zerofit.check.document import Document
from zerofit.check.dotted import get, leaves, with_parents
from zerofit.check.effective import EffectiveConfig, effective_config
from zerofit.check.finding import Finding
from zerofit.check.rule import defaults, rules
from zerofit.check.subject import TargetHardware

READ_WHEN_OFF = (
    "comms_logger",
    "data_efficiency",
)  # sections that `enabled: false` does not switch off

IGNORED_KEYS = ("unknown-key", "own-key")  # key-check findings about ignored keys; rules use `ignored: true`


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """One key: its value and its effect."""

    path: str
    value: Any
    status: Literal["takes effect", "ignored", "wrong", "auto", "default"]
    text: str

    def as_dict(self) -> dict[str, object]:
        """Return the object that `--json` prints."""
        return asdict(self)


def explain(document: Document, findings: Sequence[Finding], setting: TargetHardware) -> list[KeyRow]:
    """Return a row for each key of the JSON, in the JSON's order, then for the defaults that matter."""
    known = catalog()
    effective = effective_config(document.config, known, setting)
    subject = effective.subject
    verdicts = {f.path: f for f in reversed(findings)}
    rows = [_row(path, value, verdicts, document.config, effective) for path, value in leaves(document.config)]
    for note in defaults():
        unread = effective.meant.in_file(note.key) != note.key  # the file has this key under a wrong name
        if note.matters(subject) and (unread or not subject.has(note.key)):
            rows.append(
                KeyRow(path=note.key, value=known.default(note.key), status="default", text=note.shown(subject))
            )
    return rows


def _row(
    path: str, value: object, verdicts: Mapping[str, Finding], config: Mapping[str, object], effective: EffectiveConfig
) -> KeyRow:
    above = with_parents(path)
    ignored = {*IGNORED_KEYS, *(rule.code for rule in rules() if rule.ignored)}
    finding = next((verdicts[p] for p in above if p in verdicts and (p == path or verdicts[p].code in ignored)), None)
    if finding is not None and finding.code in ignored:
        return KeyRow(path=path, value=value, status="ignored", text=finding.why)
    if finding is not None and finding.severity == "error":
        return KeyRow(path=path, value=value, status="wrong", text=finding.message)
    unread = next((text for p in reversed(above) if (text := _unread(p, path, config))), None)
    if unread:
        return KeyRow(path=path, value=value, status="ignored", text=unread)
    if value == "auto":
        by = effective.filled.get(path)
        text = f"{json.dumps(by.value)}: {by.by}" if by else "filled in by zerofit or Hugging Face"
        return KeyRow(path=path, value=value, status="auto", text=text)
    node = catalog().node(path) or {}
    return KeyRow(path=path, value=value, status="takes effect", text=node.get("description", ""))


def _unread(section: str, path: str, config: Mapping[str, object]) -> str | None:
    """Return why DeepSpeed ignores a key: its section is off, or the file also has a newer name of the section."""
    known = catalog()
    parent, _, key = section.rpartition(".")
    prefix = f"{parent}." if parent else ""
    name = documented(prefix, key, known.deprecated)
    if name != key and get(config, f"{prefix}{name}", None) is not None:
        return f"DeepSpeed uses {prefix}{name} instead, which is also set"
    switch = f"{section}.enabled"
    if section == path or path == switch or known.node(switch) is None or section in READ_WHEN_OFF:
        return None
    on = get(config, switch, known.default(switch))
    return None if on in (True, "auto") else f"{section} is not enabled"


def shown(value: object) -> str:
    """Return a value as text of at most 24 characters."""
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
