"""A JSON compared with the values of flags, arguments and programs for its keys, and with "auto" filled in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.check.aliases import Aliases, corrected, resolve
from zerofit.check.asked import unasked
from zerofit.check.catalog import Catalog
from zerofit.check.dotted import get, put
from zerofit.check.finding import Finding
from zerofit.check.keys import WRONG_VALUE, keys
from zerofit.check.neox import handed_on
from zerofit.check.reader import HUGGING_FACE
from zerofit.check.subject import MICRO, STEPS, TOTAL, Asked, CheckSubject, TargetHardware

FILLING = ("trainer", "accelerate", "zerofit")  # programs that replace "auto" by their own value
# DeepSpeed's default if a key is missing that a program sets, and the key without which it is not read
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "gradient_clipping": (1.0, ""),
    "optimizer.params.lr": (1e-3, "optimizer.type"),
    "optimizer.params.weight_decay": (0.0, "optimizer.type"),
    "optimizer.params.betas": ([0.9, 0.999], "optimizer.type"),
    "optimizer.params.eps": (1e-8, "optimizer.type"),
    "scheduler.params.warmup_max_lr": (1e-3, "scheduler.params.warmup_num_steps"),
}


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A JSON with documented names as DeepSpeed gets it, and how it was filled."""

    given: Aliases  # DeepSpeed's keys of the file
    meant: Aliases  # `given` without the faults that have one clear correction
    aliases: Aliases  # of `meant`
    subject: CheckSubject
    filled: Mapping[str, Asked] = field(default_factory=dict)  # key -> the value that replaced its "auto"
    key_findings: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    def in_file(self, finding: Finding) -> Finding:
        """Return a finding with the file's names; for an "auto", with the source of its value."""
        written = self.aliases.finding_in_file(finding)
        if self.meant.in_file(written.path) != written.path:  # edits are for the key's correct name
            written = replace(self.meant.finding_in_file(written), edits=())
        written = self.given.finding_in_file(written)
        by = self.filled.get(finding.path)
        if by is None or finding.beside or '"auto"' in finding.message:
            return written
        message = f'{finding.message} ("auto" in the file: {by.by})'
        return replace(written, message=message, beside=by.place, edits=())


def settle(config: Mapping[str, Any], catalog: Catalog, setting: TargetHardware) -> Settled:
    """Compare each value of a flag, argument or program with the JSON's, and fill it in for "auto"."""
    given = handed_on(config) if setting.reader == "neox" else Aliases(config=config)
    key_findings = tuple(keys(given.config, catalog, setting))
    meant = corrected(given.config, key_findings)
    aliases = resolve(meant.config, catalog)
    settled = deepcopy(dict(aliases.config))
    filled: dict[str, Asked] = {}
    findings: list[Finding] = []
    for asked in (*setting.asked, *_of_parts(settled, setting), *unasked(setting.reader, setting.facts)):
        value = get(settled, asked.path) if asked.path else None
        if asked.refused:
            findings.append(_refused(asked, value))
        elif value is not None and value != "auto" and asked.compared and not _same(value, asked.value):
            findings.append(_differs(asked, value, setting))
        elif value is None and asked.compared and (asked.place or setting.reader in HUGGING_FACE):
            findings += _left_out(settled, asked)
        if value == "auto" and setting.reader in FILLING and not isinstance(asked.value, tuple):
            put(settled, asked.path, asked.value)
            filled[asked.path] = asked
    if setting.reader in HUGGING_FACE and not settled.get(STEPS):
        settled[STEPS] = 1  # accelerate 1.15 utils/dataclasses.py:1326
    wrong = (finding.path for finding in key_findings if finding.code in WRONG_VALUE and not finding.edits)
    subject = CheckSubject(
        config=settled,
        catalog=catalog,
        setting=setting,
        filled=frozenset(filled),
        unclear=frozenset(aliases.documented(meant.documented(path)) for path in wrong),
    )
    return Settled(
        given=given,
        meant=meant,
        aliases=aliases,
        subject=subject,
        filled=filled,
        key_findings=tuple(map(given.finding_in_file, key_findings)),
        findings=tuple(findings),
    )


def _same(value: Any, asked: Any) -> bool:
    """Return whether a JSON value equals the requested one. A string never differs from a number."""
    if isinstance(asked, tuple):
        return str(value).lower() in asked
    if isinstance(value, str) or isinstance(asked, str):
        return value == asked or not (isinstance(value, str) and isinstance(asked, str))
    return value == asked


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differs(asked: Asked, value: Any, setting: TargetHardware) -> Finding:
    stops = setting.reader in ("trainer", "zerofit")
    goes_on = "the file's value is used and the program's argument is ignored"
    refuses = "the run stops: the Trainer and zerofit refuse values that differ from their arguments"
    return Finding(
        code="flag-differs",
        severity=asked.severity,
        path=asked.path,
        message=f"{asked.path} is {_shown(value)} in the file, but {asked.by}",
        why=asked.overruled or (refuses if stops else goes_on),
        fix="remove one of the two"
        if asked.overruled
        else 'make them equal, or write "auto" if the program fills it in',
        beside=asked.place,
    )


def _refused(asked: Asked, value: Any) -> Finding:
    has = f", which has {'none' if value is None else _shown(value)} for {asked.path}" if asked.path else ""
    return Finding(
        code="accelerate-beside-json",
        severity=asked.severity,
        path=asked.path,
        message=f"{asked.by} together with a DeepSpeed JSON{has}",
        why=asked.refused,
        fix="remove it from Accelerate's file; set it in the JSON" if asked.path else "set it to DEEPSPEED",
        beside=asked.place,
    )


def _left_out(settled: Mapping[str, Any], asked: Asked) -> Iterator[Finding]:
    """Yield a finding about an argument that does not reach DeepSpeed, since the JSON has no key for it."""
    default, needed = LEFT_OUT.get(asked.path, (None, ""))
    if default is None or _same(default, asked.value) or (needed and get(settled, needed) is None):
        return
    yield Finding(
        code="flag-unread",
        path=asked.path,
        message=f"{asked.by} is given, but the JSON has no {asked.path}",
        why=f"DeepSpeed uses {default}: nothing passes the argument on",
        fix=f'add "{asked.path.rpartition(".")[2]}": "auto"',
        beside=asked.place,
    )


def _of_parts(settled: Mapping[str, Any], setting: TargetHardware) -> Iterator[Asked]:
    """Yield the total batch size that follows from the flags for micro batch and accumulation."""
    asked = {value.path: value.value for value in setting.asked}
    if TOTAL in asked or not (asked.get(MICRO) and asked.get(STEPS) and setting.ranks):
        return
    degrees = (setting.pipeline, get(settled, "sequence_parallel_size"), get(settled, "tensor_parallel.autotp_size"))
    parallel = math.prod(n for n in degrees if isinstance(n, int) and n > 1)
    each = asked[MICRO] * asked[STEPS]
    data = max(1, setting.ranks // parallel)
    yield Asked(path=TOTAL, value=each * data, said=f"{each} a rank x {data} = {each * data}")
