"""How far `zerofit simulate -- COMMAND` is from what the same script allocates for real; see README.md.

python benchmarks/script_accuracy.py [--cases WORDS] [--out FOLDER]

Each script is run for two optimizer steps by two or four real ranks (gloo, CPUs) under an exact allocator meter, and
simulated for all of them. Exit code 1 where an error is above its target, or a script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meter.pool import Ranks
from meter.report import surroundings
from meter.script_cases import names, task, with_cases
from meter.script_task import ScriptTask

RESULTS = Path(__file__).parent / "results"
MEDIAN, MOST = 0.00001, 0.005  # of the peaks' errors; MOST also of every phase's from the first forward on


@dataclass(frozen=True, kw_only=True)
class PhaseError:
    """One phase of one rank: real and simulated."""

    rank: int
    name: str
    step: int
    real_bytes: int
    simulated_bytes: int  # what `zerofit simulate` answers
    with_kernels_bytes: int  # the same where each kernel takes the scratch measured on this machine

    @property
    def error(self) -> float:
        """Relative, with kernels' scratch."""
        return self.with_kernels_bytes / max(1, self.real_bytes) - 1


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """A script's phases side by side."""

    name: str
    phases: tuple[PhaseError, ...]

    def peak_errors(self, figure: str = "with_kernels_bytes") -> list[float]:
        """Of the highest phase from the first forward on, each rank's."""
        found = []
        for rank in {phase.rank for phase in self.phases}:
            mine = [phase for phase in self.trained() if phase.rank == rank]
            found.append(max(getattr(p, figure) for p in mine) / max(p.real_bytes for p in mine) - 1)
        return found

    def trained(self) -> list[PhaseError]:
        """Phases from the first forward on."""
        return [phase for phase in self.phases if phase.step >= 0]

    def line(self) -> str:
        """For the output."""
        peak = max(phase.real_bytes for phase in self.trained())
        columns = (self.peak_errors("simulated_bytes"), self.peak_errors(), [p.error for p in self.trained()])
        plain, highest, worst = (max(errors, key=abs) for errors in columns)
        figures = f"peak {plain:+.5%}, with kernels {highest:+.5%}, worst phase {worst:+.5%}"
        return f"{self.name:20} {peak:14,} bytes  {figures}"


def main() -> int:
    asked = parse()
    found: list[ScriptComparison] = []
    with tempfile.TemporaryDirectory() as name, Ranks(Path(name) / "ranks") as ranks:
        for case in asked.cases:
            started = time.monotonic()
            try:
                found.append(compare(case, task(case, Path(name) / case.replace(" ", "-")), ranks))
            except RuntimeError as error:
                print(f"{case}: {error}", flush=True)
                continue
            print(f"{found[-1].line()}  {time.monotonic() - started:.0f} s", flush=True)
            if asked.out:
                write(found, asked.out / "script-accuracy-cpu.json")
    return 0 if len(found) == len(asked.cases) and met(found) else 1


def compare(name: str, asked: ScriptTask, ranks: Ranks) -> ScriptComparison:
    """Run and simulate a script. Raises RuntimeError where a rank fails."""
    real, plain = ranks.script("script_metered", asked), simulated(asked, ranks)
    with_kernels = simulated(replace(asked, kernels=True), ranks)
    rows: list[PhaseError] = []
    for rank, answers in enumerate(zip(real, plain, with_kernels, strict=True)):
        order = [[(p["name"], p["step"]) for p in answer["phases"]] for answer in answers]
        if not order[0] == order[1] == order[2]:
            raise RuntimeError(f"phases differ: {order}")
        for a, b, c in zip(*(answer["phases"] for answer in answers), strict=True):
            figures = {"real_bytes": a["peak_bytes"], "simulated_bytes": b["peak_bytes"]}
            figures["with_kernels_bytes"] = c["peak_bytes"]
            rows.append(PhaseError(rank=rank, name=a["name"], step=a["step"], **figures))
    return ScriptComparison(name=name, phases=tuple(rows))


def simulated(asked: ScriptTask, ranks: Ranks) -> list[dict[str, Any]]:
    """Simulate all ranks; those of a pipeline's later stages one after the other, with what the one before sends."""
    answers = ranks.script("script_simulated", asked)
    sends = answers[0].get("sends")
    for rank, answer in enumerate(answers):
        if answer["phases"] is None:
            (answers[rank],) = ranks.script("script_simulated", replace(asked, received=sends), [rank])
            sends = answers[rank]["sends"] or sends
    return answers


def met(found: list[ScriptComparison]) -> bool:
    """Whether all errors are within their targets."""
    peaks = [abs(error) for one in found for error in one.peak_errors()]
    phases = [abs(phase.error) for one in found for phase in one.trained()]
    return statistics.median(peaks) <= MEDIAN and max(peaks) <= MOST and max(phases) <= MOST


def write(found: list[ScriptComparison], path: Path) -> None:
    """All phases, with when and on what they were measured; scripts that were not run now stay as they were."""
    before = json.loads(path.read_text())["scripts"] if path.exists() else []
    cases = {case["name"]: case for case in before}
    cases |= {one.name: {"name": one.name, "phases": [asdict(p) for p in one.phases]} for one in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**surroundings(), "scripts": [cases[name] for name in names() if name in cases]}, indent=1) + "\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help=f"write JSON into this folder (ours: {RESULTS.name}/)")
    return with_cases(parser)


if __name__ == "__main__":
    sys.exit(main())
