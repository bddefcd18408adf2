"""Compare a simulation with an earlier simulation's `--json`. Imports no torch.

The difference shows how much memory a code change adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.spec.errors import Problems
from zerofit.spec.foreign import Unreadable, parse_json, refused
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from zerofit.simulate.forecast.result import Simulation

HINT = "write one with: zerofit simulate ... --json > base.json"
SAME = ("device", "world_size", "rank")  # must be equal for a comparison


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """The difference between the peaks of a simulation and an earlier one."""

    baseline: str  # the file
    base_bytes: int
    added_bytes: int  # negative: saved
    allowed: float  # relative to base_bytes
    no_longer_fits: bool
    exceeded: bool  # whether the change adds more than allowed, or the run no longer fits
    because: str

    @property
    def added(self) -> float:
        """The added bytes, relative to the baseline."""
        return self.added_bytes / self.base_bytes


def read_baseline(path: Path) -> dict[str, object]:
    """Read the output of an earlier `zerofit simulate --json`.

    It is the last line of the file. Raises UserError.
    """
    with refused(path, kind="baseline", hint=HINT, where="--baseline"):
        lines = path.read_bytes().strip().splitlines() or [b""]
        found = parse_json(lines[-1])
        if not isinstance(found, dict) or not {*SAME, "peak_bytes", "fits"} <= found.keys():
            raise Unreadable("it contains no simulation")
        if not isinstance(found["peak_bytes"], int) or found["peak_bytes"] <= 0:
            raise Unreadable(f"peak_bytes must be a positive number of bytes, not {found['peak_bytes']!r:.40}")
        return found


def compare_with(base: dict[str, object], now: Simulation, path: Path, allowed: float) -> BaselineComparison:
    """Compare a simulation with an earlier one.

    Raises UserError if rank, world size or device differ.
    """
    problems = Problems()
    for name in SAME:
        if base[name] != getattr(now, name):
            message = f"{path} has {name.replace('_', ' ')} {base[name]}, but this simulation has {getattr(now, name)}"
            problems.add("baseline", message, "simulate both with the same setting", "--baseline")
    problems.raise_if_any()
    base_bytes = base["peak_bytes"]
    assert isinstance(base_bytes, int)  # `read_baseline` refuses others
    added, lost = now.peak_bytes - base_bytes, bool(base["fits"]) and not now.fits
    return BaselineComparison(
        baseline=str(path),
        base_bytes=base_bytes,
        added_bytes=added,
        allowed=allowed,
        no_longer_fits=lost,
        exceeded=lost or added > allowed * base_bytes,
        because=_sentence(now, added, base_bytes, lost),
    )


def _sentence(now: Simulation, added: int, before: int, lost: bool) -> str:
    if added == 0 and not lost:
        return f"the peak is unchanged, {shown_bytes(before)}"
    change = f"{'adds' if added >= 0 else 'saves'} {shown_bytes(abs(added))} ({added / before:+.2%})"
    where = f" at {now.peak_at.own or now.peak_at.line} in {now.peak_phase}" if added > 0 else ""
    end = f", and no longer fits on {now.device}" if lost else ""
    return f"this change {change}{where}{end}: the peak was {shown_bytes(before)}, now {shown_bytes(now.peak_bytes)}"
