"""Checks of one DeepSpeed JSON: its text, its keys and types, and the rules about values.

```
 text ──► syntax ─────────────────────────────────────────► findings
   └────► effective_config: keys ──► findings                  ▲
              └─► correct, rename, fill "auto" ──► rules ──────┘  with the file's own names and lines
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from zerofit.check.catalog import catalog
from zerofit.check.document import Document
from zerofit.check.edit import Deletion, after_comma, apply
from zerofit.check.effective import effective_config
from zerofit.check.finding import EFFECTS, Finding
from zerofit.check.neox import unknown_arguments
from zerofit.check.reader import SPOKEN, STRICT_READERS
from zerofit.check.rule import rules
from zerofit.check.rules.batch import batch
from zerofit.check.rules.optimizer import optimizer, scheduler, scheduler_values
from zerofit.check.scan import ObjectMember, SyntaxFault, TextPosition
from zerofit.check.subject import CheckSubject, TargetHardware, UnclearValue

FUNCTIONS: tuple[Callable[[CheckSubject], Iterator[Finding]], ...] = (batch, optimizer, scheduler, scheduler_values)
MAX_DUPLICATES = 100  # duplicate keys with a finding each


def check(document: Document, setting: TargetHardware) -> list[Finding]:
    """Return all findings, the worst first.

    Errors come before warnings, and faults that stop a run before those that change it. This starts no rank and does
    not import torch.
    """
    findings = list(text_findings(document, setting.reader))
    if isinstance(document.config, dict):
        effective = effective_config(document.config, catalog(), setting)
        findings += effective.key_findings
        findings += unknown_arguments(document.config) if setting.reader == "neox" else ()
        # A rule that depends on a wrong value is skipped, since the user meant another value.
        for rule in (*rules(), *FUNCTIONS):
            with suppress(UnclearValue):
                findings += map(effective.in_file, rule(effective.subject))
        findings += map(effective.in_file, effective.findings)
    # Rules know only paths. Find their lines, and drop edits of texts that cannot be edited in place.
    for n, finding in enumerate(findings):
        if not finding.line:
            place = document.place(finding.path)
            edits = finding.edits if document.editable else ()
            findings[n] = replace(finding, line=place.line, column=place.column, edits=edits)
    # As a word, "error" comes before "warning".
    return sorted(findings, key=lambda f: (f.severity, EFFECTS.index(f.effect), f.line, f.column, f.code))


def mend(document: Document, setting: TargetHardware, rounds: int = 5) -> str:
    """Return the text after fixing every error that has only one possible fix.

    This is repeated up to `rounds` times, since a fix may uncover another error.
    """
    # The edits of a round are independent. Faults within a renamed section are found in the next round.
    for _ in range(rounds):
        edits = [edit for f in check(document, setting) if f.severity == "error" for edit in f.edits]
        text = apply(document, edits)
        if text == document.text:
            break
        document = document.reread(text)
    return document.text


def text_findings(document: Document, reader: str) -> Iterator[Finding]:
    """Yield findings about the text: no strict JSON, duplicate keys, no object."""
    yield from _strict_json(document, reader)
    for path, first, last in islice(document.duplicates(), MAX_DUPLICATES):
        yield _duplicate(document, path, first, last)
    if not isinstance(document.config, Mapping):
        why = "DeepSpeed stops: it needs an object with keys"
        yield _of_text("the file is not a JSON object", why, "write {...}", document.root.place, code="not-an-object")


def _strict_json(document: Document, reader: str) -> Iterator[Finding]:
    # DeepSpeed itself reads HJSON: comments, trailing commas and words without quotes. Other readers stop there.
    stops, name, start = reader in STRICT_READERS, SPOKEN[reader], TextPosition(line=1, column=1, start=0, end=0)
    strict = f"{name} supports only strict JSON and stops with an error"
    others = "Hugging Face's Trainer, Accelerate and Lightning"
    # zerofit decodes the file itself, and gives DeepSpeed a JSON in UTF-8.
    if document.encoding == "utf-8-sig" and reader != "zerofit":
        why = f"{name} supports only UTF-8 without a byte order mark and stops with an error"
        why = why if stops else f"DeepSpeed accepts it; {others} do not"
        message, fix = "the file begins with a byte order mark", "save it as UTF-8 without a byte order mark"
        yield _of_text(message, why, fix, start, code="encoding", stops=stops)
    elif document.encoding != "utf-8" and reader != "zerofit":
        why, fix = f"{name} supports only UTF-8 and stops with an error", "save it as UTF-8 without a byte order mark"
        yield _of_text(f"the file is in {document.encoding}", why, fix, start, code="encoding")
    if document.yaml and reader != "neox":
        why = f"{name} supports only JSON and stops with an error"
        yield _of_text("the file is YAML", why, "convert it to JSON", start, code="yaml")
    if document.hjson:
        accepts = "DeepSpeed's own reader accepts it: a word without quotes is a string up to the end of the line"
        message, why = f"HJSON, not JSON, from here on: {document.hjson.message}", strict if stops else accepts
        yield _of_text(message, why, "convert it to JSON", document.hjson, code="hjson", stops=stops)
    for comma in document.commas:
        why = strict if stops else f"DeepSpeed accepts it; {others} need strict JSON"
        message, fix = "trailing comma after the last member", "remove it"
        found = _of_text(message, why, fix, comma, code="trailing-comma", stops=stops)
        yield replace(found, edits=(Deletion(comma.start, comma.end),))
    if stops and document.comment:
        yield _of_text("comment in a JSON", strict, "remove all comments", document.comment, code="json-comment")


def _of_text(
    message: str, why: str, fix: str, place: TextPosition | SyntaxFault, *, code: str, stops: bool = True
) -> Finding:
    """Return a finding about the notation of the file. `stops`: whether its reader stops with an error."""
    return Finding(
        code=code,
        severity="error" if stops else "warning",
        effect="stops" if stops else "changes",
        path="",
        message=message,
        why=why,
        fix=fix,
        line=place.line,
        column=place.column,
    )


def _duplicate(document: Document, path: str, first: ObjectMember, last: ObjectMember) -> Finding:
    """Return the finding about an earlier member with the key of the last one."""
    start = first.place.start
    # A later member follows, so there is a comma, and the blanks after it belong to the removed member.
    end = after_comma(document.text, first.value.place.end)
    while document.text[end : end + 1].isspace():
        end += 1
    return Finding(
        code="duplicate-key",
        path=path,
        message=f"duplicate key {path}: here and on line {last.place.line}",
        why='DeepSpeed stops: "Duplicate keys in DeepSpeed config"; other readers use the last value',
        fix="remove one of them",
        edits=(Deletion(start, end),) if first.value.data == last.value.data else (),
        line=first.place.line,
        column=first.place.column,
    )
