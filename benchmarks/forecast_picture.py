"""Draw the README's picture: the simulated memory of one rank over its run, and the peaks of the real run over it.

python benchmarks/forecast_picture.py [--out FILE.png]

Two ranks train a small Llama for real with ZeRO 3 under the exact allocator meter; rank 0 is simulated. The simulation
includes the scratch memory of this processor's kernels, which the meter counts too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from meter.configurations import target
from meter.pool import Ranks

from zerofit.report.memory_plot import MemoryTimeline, draw

RESULT = Path(__file__).parent / "results" / "forecast-and-run.png"
CONFIGURATION = "llama zero3 bf16 mb8 x2"


def main() -> int:
    """Run, simulate and draw; print the largest difference of a phase's peak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    job = target(CONFIGURATION)
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(Path(folder), lambda text: print(text, file=sys.stderr)) as ranks,
    ):
        (simulated,) = ranks.simulated(job, [job.rank])
        real = ranks.real(job)[job.rank]["phases"]
    title = "rank 0 of 2, a small Llama, ZeRO 3, bf16: forecast (areas) and real run (lines)"
    measured = [one["peak_bytes"] for one in real]
    timeline = MemoryTimeline(points=simulated["timeline"], measured=measured, title=title)
    if [one["name"] for one in real] != [name for name, _, _ in timeline.phases]:
        raise SystemExit(f"the run's phases are not the simulation's: {real}, {timeline.phases}")
    draw(timeline, out)
    apart = max(
        abs(there["peak_bytes"] / one["peak_bytes"] - 1) for there, one in zip(simulated["phases"], real, strict=True)
    )
    print(f"{out}: the peaks of {len(real)} phases differ by {apart:.4%} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
