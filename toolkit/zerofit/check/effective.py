"""The configuration that DeepSpeed gets from a file, a program and its arguments.

Rules check this configuration:

1. GPT-NeoX passes on only a part of its file (`passed`).
2. Faults with one clear correction are corrected (`meant`), so one error does not hide another error.
3. Old names and aliases become the documented names (`aliases`).
4. Each "auto" gets the value from the program that reads the file: from its arguments or its defaults (`filled`).
   Arguments that differ from the file are findings.

Findings use the names in the file again: `in_file` translates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from zerofit.check.aliases import Aliases, corrected, resolve
from zerofit.check.arguments import default_values
from zerofit.check.catalog import Catalog
from zerofit.check.dotted import get, put
from zerofit.check.finding import Finding
from zerofit.check.keys import WRONG_VALUE, keys
from zerofit.check.neox import handed_on
from zerofit.check.reader import HUGGING_FACE
from zerofit.check.subject import MICRO, STEPS, TOTAL, CheckSubject, RequestedValue, TargetHardware

FILLING = ("trainer", "accelerate", "zerofit")  # programs that replace "auto" by their own value
# DeepSpeed's default for a missing key that a program sets; and the key without which DeepSpeed does not read it
LEFT_OUT: dict[str, tuple[object, str]] = {
    "gradient_clipping": (1.0, ""),
    "optimizer.params.lr": (1e-3, "optimizer.type"),
    "optimizer.params.weight_decay": (0.0, "optimizer.type"),
    "optimizer.params.betas": ([0.9, 0.999], "optimizer.type"),
    "optimizer.params.eps": (1e-8, "optimizer.type"),
    "scheduler.params.warmup_max_lr": (1e-3, "scheduler.params.warmup_num_steps"),
}


@dataclass(frozen=True, kw_only=True)
class EffectiveConfig:
    """The configuration as DeepSpeed gets it, and the steps from the file to it."""

    passed: Aliases  # DeepSpeed's keys of the file
    meant: Aliases  # `passed` without the faults that have one clear correction
    aliases: Aliases  # `meant` with documented names
    subject: CheckSubject
    filled: Mapping[str, RequestedValue] = field(default_factory=dict)  # key -> the value that replaced its "auto"
    key_findings: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    def in_file(self, finding: Finding) -> Finding:
        """Return a finding with the file's names, and with the source of an "auto"'s value."""
        written = self.aliases.finding_in_file(finding)
        # Edits would use the key's correct name, which the file does not have yet.
        if self.meant.in_file(written.path) != written.path:
            written = replace(self.meant.finding_in_file(written), edits=())
        written = self.passed.finding_in_file(written)
        by = self.filled.get(finding.path)
        if by is None or finding.other_place or '"auto"' in finding.message:
            return written
        message = f'{finding.message} ("auto" in the file: {by.by})'
        return replace(written, message=message, other_place=by.place, edits=())


def effective_config(config: Mapping[str, object], catalog: Catalog, setting: TargetHardware) -> EffectiveConfig:
    """Fill in each "auto", and compare the JSON with values from flags, arguments and programs."""
    # The JSON takes four forms, one after the other: what a program passes on, without misspelled keys, without
    # aliases, and with "auto" filled in. Each form keeps a mapping back, so a finding names the key in the user's file.
    passed = handed_on(config) if setting.reader == "neox" else Aliases(config=config)
    key_findings = tuple(keys(passed.config, catalog, setting))
    meant = corrected(passed.config, key_findings)
    aliases = resolve(meant.config, catalog)
    effective = deepcopy(dict(aliases.config))
    filled: dict[str, RequestedValue] = {}
    findings = tuple(_fill(effective, filled, setting))
    wrong = (finding.path for finding in key_findings if finding.code in WRONG_VALUE and not finding.edits)
    unclear = frozenset(aliases.documented(meant.documented(path)) for path in wrong)
    return EffectiveConfig(
        passed=passed,
        meant=meant,
        aliases=aliases,
        subject=CheckSubject(config=effective, catalog=catalog, setting=setting, unclear=unclear),
        filled=filled,
        key_findings=tuple(map(passed.finding_in_file, key_findings)),
        findings=findings,
    )


def _fill(config: dict[str, object], filled: dict[str, RequestedValue], setting: TargetHardware) -> Iterator[Finding]:
    """Fill each "auto" of `config`, record it in `filled`, and yield findings about differences."""
    for requested in (
        *setting.requested,
        *_total_batch(config, setting),
        *default_values(setting.reader, setting.facts),
    ):
        value = get(config, requested.path) if requested.path else None
        # An argument that Accelerate refuses is an error even if both values are equal, so this comes first.
        if requested.refused:
            yield _refused(requested, value)
        elif value is not None and value != "auto" and requested.compared and not _same(value, requested.value):
            yield _differs(requested, value, setting)
        elif value is None and requested.compared and (requested.place or setting.reader in HUGGING_FACE):
            yield from _left_out(config, requested)
        # A tuple is a choice of equivalent words, so it gives no value.
        if value == "auto" and setting.reader in FILLING and not isinstance(requested.value, tuple):
            put(config, requested.path, requested.value)
            filled[requested.path] = requested
    # Accelerate fills in a missing number of steps, too (1.15 utils/dataclasses.py:1326).
    if setting.reader in HUGGING_FACE and not config.get(STEPS):
        config[STEPS] = 1


def _same(value: object, requested: object) -> bool:
    """Return whether a JSON value equals a requested value."""
    if isinstance(requested, tuple):
        return str(value).lower() in requested
    # A string beside a number is a wrong type, which the key check reports.
    return value == requested or isinstance(value, str) != isinstance(requested, str)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differs(requested: RequestedValue, value: object, setting: TargetHardware) -> Finding:
    """Return the finding about a value of the JSON that differs from an argument's."""
    effect, why = "changes", "the file's value is used and the program's argument is ignored"
    if requested.overruled:
        effect, why = "ignored", requested.overruled
    elif setting.reader in ("trainer", "zerofit"):
        effect, why = "stops", "the run stops: the Trainer and zerofit refuse values that differ from their arguments"
    return Finding(
        code="flag-differs",
        severity=requested.severity,
        path=requested.path,
        message=f"{requested.path} is {_shown(value)} in the file, but {requested.by}",
        effect=effect,
        why=why,
        fix="remove one of the two"
        if requested.overruled
        else 'make them equal, or write "auto" if the program fills it in',
        other_place=requested.place,
    )


def _refused(requested: RequestedValue, value: object) -> Finding:
    """Return the finding about a value that must not be in Accelerate's file too."""
    has = f", which has {'none' if value is None else _shown(value)} for {requested.path}" if requested.path else ""
    return Finding(
        code="accelerate-beside-json",
        severity=requested.severity,
        path=requested.path,
        message=f"{requested.by} together with a DeepSpeed JSON{has}",
        effect="stops" if requested.severity == "error" else "ignored",
        why=requested.refused,
        fix="remove it from Accelerate's file; set it in the JSON" if requested.path else "set it to DEEPSPEED",
        other_place=requested.place,
    )


def _left_out(config: Mapping[str, object], requested: RequestedValue) -> Iterator[Finding]:
    """Check that the JSON has the key of an argument, if DeepSpeed's default is another value."""
    default, needed = LEFT_OUT.get(requested.path, (None, ""))
    if default is None or _same(default, requested.value) or (needed and get(config, needed) is None):
        return
    yield Finding(
        code="flag-unread",
        effect="changes",
        path=requested.path,
        message=f"{requested.by} is given, but the JSON has no {requested.path}",
        why=f"no program passes the argument to DeepSpeed, which uses its default, {default}",
        fix=f'add "{requested.path.rpartition(".")[2]}": "auto"',
        other_place=requested.place,
    )


def _total_batch(config: Mapping[str, object], setting: TargetHardware) -> Iterator[RequestedValue]:
    """Yield the total batch size if flags set the two other sizes and the number of ranks."""
    requested = {value.path: value.value for value in setting.requested}
    if TOTAL in requested or not (requested.get(MICRO) and requested.get(STEPS) and setting.ranks):
        return
    # DeepSpeed's data parallel ranks are those that no other degree uses. The total counts only them.
    degrees = (
        setting.pipeline,
        get(config, "sequence_parallel_size"),
        get(config, "tensor_parallel.autotp_size"),
    )
    parallel = math.prod(n for n in degrees if isinstance(n, int) and n > 1)
    per_rank = requested[MICRO] * requested[STEPS]
    data = max(1, setting.ranks // parallel)
    total = per_rank * data
    yield RequestedValue(path=TOTAL, value=total, source=f"{per_rank} a rank x {data} = {total}")
