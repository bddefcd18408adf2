"""The pace of unequal ranks: which of them are slow, and which steps straggle."""

from __future__ import annotations

from zerofit.compare.job import CompareJob
from zerofit.data.hashing import sample_hashes

PACE_S = 0.05  # of a step of an even rank: so long that what cores this machine has does not matter
STRAGGLER = 5.0  # times as long as others takes a step that straggles


def pause_s(job: CompareJob, rank: int, step: int) -> float:
    """Return the seconds that a rank waits before a step; 0 where all ranks are to run as fast as they can.

    Which steps straggle follows from seed, rank and step.
    """
    if not job.slow and not job.straggle:
        return 0.0
    drawn = float(sample_hashes([step], (job.seed << 20) + rank)[0]) / 2.0**64
    return PACE_S * job.slow.get(str(rank), 1.0) * (STRAGGLER if drawn < job.straggle else 1.0)
