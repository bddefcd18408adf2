"""Migrate an old DeepSpeed JSON to the installed version, with the same behavior."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.check.aliases import resolve
from zerofit.check.catalog import catalog, names
from zerofit.check.check import check, mend
from zerofit.check.document import Document
from zerofit.check.dotted import get
from zerofit.check.edit import Assignment, Edit, Removal, apply
from zerofit.check.rule import defaults
from zerofit.check.subject import CheckSubject, TargetHardware
from zerofit.features.zero import ZERO

CARRIED = ("removed-key", "deprecated-key", "deprecated-and-new", "zero-flag", "clipping-in-optimizer")

OPTIMIZER, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
PINNED = f"{ZERO}.cpu_offload_use_pin_memory"


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """The text for the installed DeepSpeed, and what changed."""

    text: str
    lost: tuple[str, ...]  # settings that the installed DeepSpeed does not have
    kept: tuple[str, ...]  # settings that are written out to keep the old behavior


def migrate(document: Document, setting: TargetHardware) -> Migrated:
    """Rename old keys, remove dropped keys, and write out the old value of each changed default."""
    lost: list[str] = []
    document = _without_removed_optimizer(document, lost)
    for _ in range(3):  # a renamed key may uncover another old key
        findings = [f for f in check(document, setting) if f.code in CARRIED]
        if not findings:
            break
        edits: list[Edit] = []
        for finding in findings:
            # The check removes a removed key only if it is off, since the user has to know what is lost.
            if finding.code == "removed-key":
                lost.append(f"{finding.path} {_value_text(document, finding.path)}: {finding.fix}")
                edits.append(Removal(finding.path))
            else:
                edits += finding.edits
        document = document.reread(apply(document, edits))
    kept: list[str] = []
    # Before the defaults: the default of pin_memory has changed, and the file's own value is more important.
    document = _with_pinned_memory(document, kept)
    # A default that has changed since then is written out with its old value.
    for note in defaults():
        aliases = resolve(document.config, catalog())
        subject = CheckSubject(config=aliases.config, catalog=catalog(), setting=setting)
        if note.mattered(subject) and not subject.has(note.key):
            document = document.reread(apply(document, [Assignment(note.key, note.old)]))
            kept.append(f"{note.key} {note.old}: {note.change}")
    return Migrated(text=mend(document, setting), lost=tuple(lost), kept=tuple(kept))


def _with_pinned_memory(document: Document, kept: list[str]) -> Document:
    """Move the old flag `cpu_offload_use_pin_memory` into the offload sections."""
    pinned = get(document.config, PINNED)
    if not isinstance(pinned, bool):
        return document
    edits: list[Edit] = [Removal(PINNED)]
    for section in (OPTIMIZER, PARAM):
        given = get(document.config, section)
        if isinstance(given, dict) and "pin_memory" not in given:
            edits.append(Assignment(f"{section}.pin_memory", pinned))
            kept.append(f"{section}.pin_memory {pinned}: from {PINNED}")
    return document.reread(apply(document, edits))


def _without_removed_optimizer(document: Document, lost: list[str]) -> Document:
    """Replace an optimizer that DeepSpeed removed by its successor."""
    subject = CheckSubject(config=document.config, catalog=catalog(), setting=TargetHardware())
    name = subject.word("optimizer.type") or ""
    successor = names("removed_optimizers").get(name.lower())
    if successor is None:
        return document
    new = successor.capitalize()
    # max_grad_norm stays: a rule of its own (rules/gradients.yaml) moves its value to gradient_clipping.
    known = {p for parameters in catalog().optimizers[new.lower()].values() for p in parameters}
    extra = [key for key in subject.section("optimizer.params") if key not in (*known, "max_grad_norm")]
    lost.append(f"optimizer {name}: replaced by {new}, without compressed communication")
    lost.extend(f"optimizer.params.{key}: {new} has no such parameter" for key in extra)
    edits = [Assignment("optimizer.type", new), *(Removal(f"optimizer.params.{key}") for key in extra)]
    return document.reread(apply(document, edits))


def _value_text(document: Document, path: str) -> str:
    """Return a value as the file has it, in one line of at most 60 characters."""
    member = document.member(path)
    text = document.text[member.value.place.start : member.value.place.end] if member else ""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
