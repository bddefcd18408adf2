"""Values that were given beside the JSON (the command's flags) against those in it."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.finding import Finding
from zerofit.check.rules.sizes import MICRO, STEPS, TOTAL
from zerofit.check.subject import CheckSubject


def against_flags(c: CheckSubject) -> Iterator[Finding]:
    """Find values of the file that differ from those asked for; "auto" and what is not given differ from none."""
    for path, (flag, asked) in c.setting.asked.items():
        value = c.number(path)
        if value is not None and value != asked:
            yield _differs(c, path, value, f"{flag} {asked}")
    micro, steps = (c.setting.asked.get(path, ("", None))[1] for path in (MICRO, STEPS))
    total = c.number(TOTAL)
    if micro and steps and c.ranks and total:
        parallel = c.pipeline * c.sequence_parallel * c.tensor_parallel
        product = micro * steps * max(1, c.ranks // parallel)
        if total != product:
            yield _differs(c, TOTAL, total, f"the flags make {micro} x {steps} x {c.ranks // parallel} = {product}")
    asked = c.setting.precision
    on = [name for name in ("fp16", "bf16") if c.get(f"{name}.enabled") is True]
    off = [name for name in ("fp16", "bf16") if c.off(f"{name}.enabled")]
    if asked and ((on and asked not in on) or asked in off):
        path = f"{on[0] if on else asked}.enabled"
        yield _differs(c, path, c.get(path), f"--precision {asked}")


def _differs(c: CheckSubject, path: str, value: object, asked: str) -> Finding:
    stops = c.setting.reader in ("trainer", "zerofit")
    return Finding(
        code="flag-differs",
        path=path,
        message=f"{path} is {str(value).lower() if isinstance(value, bool) else value} in the file, but {asked}",
        why="the run stops: the Trainer and zerofit refuse values that differ from their own"
        if stops
        else "the file's value is in force, whatever the program's own argument says",
        fix='make them the same, or write "auto" where the program fills it in',
    )
