"""A JSON held against the values that flags, arguments and programs have for its keys; every "auto" that they fill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.check.aliases import Aliases, resolve
from zerofit.check.asked import unasked
from zerofit.check.catalog import Catalog
from zerofit.check.dotted import get, put
from zerofit.check.finding import Finding
from zerofit.check.neox import handed_on
from zerofit.check.reader import HUGGING_FACE
from zerofit.check.subject import MICRO, STEPS, TOTAL, Asked, CheckSubject, TargetHardware

FILLING = ("trainer", "accelerate", "zerofit")  # programs that put their own value in the place of "auto"
# what is in force where a key is missing that a program asks for, and the key that has to be there for it to be read
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
    """A JSON in documented names as DeepSpeed gets it, and what that took."""

    given: Aliases  # what of the file is DeepSpeed's
    aliases: Aliases  # of what is given
    subject: CheckSubject
    filled: Mapping[str, Asked] = field(default_factory=dict)  # key -> who filled its "auto"
    findings: tuple[Finding, ...] = ()

    def in_file(self, finding: Finding) -> Finding:
        """Return a finding in the names that the file writes; of an "auto", with who has filled it."""
        written = self.given.finding_in_file(self.aliases.finding_in_file(finding))
        by = self.filled.get(finding.path)
        if by is None or finding.beside or '"auto"' in finding.message:
            return written
        message = f'{finding.message} ("auto" in the file: {by.by})'
        return replace(written, message=message, beside=by.place, edits=())


def settle(config: Mapping[str, Any], catalog: Catalog, setting: TargetHardware) -> Settled:
    """Put in what programs fill, one after the other, and compare each of their values with what stands there."""
    given = handed_on(config) if setting.reader == "neox" else Aliases(config=config)
    aliases = resolve(given.config, catalog)
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
    subject = CheckSubject(config=settled, catalog=catalog, setting=setting, filled=frozenset(filled))
    return Settled(given=given, aliases=aliases, subject=subject, filled=filled, findings=tuple(findings))


def _same(value: Any, asked: Any) -> bool:
    """Return whether a value of the JSON is the one that is asked for; words of another type differ from none."""
    if isinstance(asked, tuple):
        return str(value).lower() in asked
    if isinstance(value, str) or isinstance(asked, str):
        return value == asked or not (isinstance(value, str) and isinstance(asked, str))
    return value == asked


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differs(asked: Asked, value: Any, setting: TargetHardware) -> Finding:
    stops = setting.reader in ("trainer", "zerofit")
    goes_on = "the file's value is in force, whatever the program's own argument says"
    refuses = "the run stops: the Trainer and zerofit refuse values that differ from their own"
    return Finding(
        code="flag-differs",
        severity=asked.severity,
        path=asked.path,
        message=f"{asked.path} is {_shown(value)} in the file; asked for: {asked.by}",
        why=asked.overruled or (refuses if stops else goes_on),
        fix="take one of the two out"
        if asked.overruled
        else 'make them the same, or write "auto" where the program fills it in',
        beside=asked.place,
    )


def _refused(asked: Asked, value: Any) -> Finding:
    has = f", which has {'none' if value is None else _shown(value)} for {asked.path}" if asked.path else ""
    return Finding(
        code="accelerate-beside-json",
        severity=asked.severity,
        path=asked.path,
        message=f"{asked.by} stands beside a DeepSpeed JSON{has}",
        why=asked.refused,
        fix="take it out of Accelerate's file; the JSON says it" if asked.path else "write DEEPSPEED",
        beside=asked.place,
    )


def _left_out(settled: Mapping[str, Any], asked: Asked) -> Iterator[Finding]:
    """Yield what an argument asks for where the JSON has no key that takes it to DeepSpeed."""
    default, needed = LEFT_OUT.get(asked.path, (None, ""))
    if default is None or _same(default, asked.value) or (needed and get(settled, needed) is None):
        return
    yield Finding(
        code="flag-unread",
        path=asked.path,
        message=f"{asked.by} is asked for, but there is no {asked.path}",
        why=f"DeepSpeed takes {default}: nothing hands the argument on",
        fix=f'write "{asked.path.rpartition(".")[2]}": "auto"',
        beside=asked.place,
    )


def _of_parts(settled: Mapping[str, Any], setting: TargetHardware) -> Iterator[Asked]:
    """Yield the whole batch that flags ask for by its parts."""
    asked = {one.path: one.value for one in setting.asked}
    if TOTAL in asked or not (asked.get(MICRO) and asked.get(STEPS) and setting.ranks):
        return
    degrees = (setting.pipeline, get(settled, "sequence_parallel_size"), get(settled, "tensor_parallel.autotp_size"))
    parallel = math.prod(n for n in degrees if isinstance(n, int) and n > 1)
    each = asked[MICRO] * asked[STEPS]
    data = max(1, setting.ranks // parallel)
    yield Asked(path=TOTAL, value=each * data, said=f"{each} a rank x {data} = {each * data}")
