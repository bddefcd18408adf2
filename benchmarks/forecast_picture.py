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

from zerofit.report.memory_plot import MeasuredPhase, PlotPhase, draw

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
    phases: list[PlotPhase] = []
    for point in simulated["timeline"]:
        if phases and phases[-1]["name"] == point["phase"]:
            phases[-1]["end"] = point["t"]
        else:
            phases.append({"name": point["phase"], "start": point["t"], "end": point["t"]})
    if [one["name"] for one in real] != [one["name"] for one in phases]:
        raise SystemExit(f"the run's phases are not the simulation's: {real}, {phases}")
    measured: list[MeasuredPhase] = [
        {"start": phase["start"], "end": phase["end"], "peak_bytes": one["peak_bytes"]}
        for phase, one in zip(phases, real, strict=True)
    ]
    title = "rank 0 of 2, a small Llama, ZeRO 3, bf16: forecast (areas) and real run (lines)"
    draw({"points": simulated["timeline"], "phases": phases, "measured": measured, "title": title}, out)
    apart = max(
        abs(there["peak_bytes"] / one["peak_bytes"] - 1) for there, one in zip(simulated["phases"], real, strict=True)
    )
    print(f"{out}: the peaks of {len(real)} phases differ by {apart:.4%} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
