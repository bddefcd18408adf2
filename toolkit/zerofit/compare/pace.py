"""Decide which ranks and which steps are slowed down, and for how long."""

from __future__ import annotations

from zerofit.compare.job import CompareJob
from zerofit.data.hashing import sample_hashes

PACE_S = 0.05  # step of an even rank: long enough that this machine's cores do not matter
STRAGGLER = 5.0  # factor on the time of a step that straggles


def pause_s(job: CompareJob, rank: int, step: int) -> float:
    """Return the seconds that a rank waits before a step; 0 if no rank is slowed."""
    if not job.slow and not job.straggle:
        return 0.0
    # Only seed, rank and step decide which steps are slow, so every strategy has the same slow steps.
    drawn = float(sample_hashes([step], (job.seed << 20) + rank)[0]) / 2.0**64
    return PACE_S * job.slow.get(str(rank), 1.0) * (STRAGGLER if drawn < job.straggle else 1.0)
