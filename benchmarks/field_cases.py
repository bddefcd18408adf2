"""Published memory figures of real DeepSpeed runs beside what `zerofit simulate` and `plan` say of the same runs.

python benchmarks/field_cases.py [--cases FILE] [--case ID ...] [--output FILE.json]

What a source leaves out is assumed, and each assumption is printed. Nothing in zerofit is fitted to these figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meter.planned import planned

import zerofit as zf
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.spec.run import RunRequest

HERE = Path(__file__).parent
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=HERE / "field_cases.json")
    parser.add_argument("--case", nargs="*", help="ids of some cases only")
    parser.add_argument("--output", type=Path, help="write the comparison as JSON")
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())["cases"]
    rows: list[dict[str, Any]] = []
    peaks: list[dict[str, Any]] = []
    for case in cases:
        if not options.case or case["id"] in options.case:
            started = time.monotonic()
            result = simulate(case)
            rows += compare(case, result)
            if not isinstance(result, zf.UserError):
                peaks.append({"case": case["id"], "simulated_bytes": result.peak_bytes, "planned_bytes": plan(case)})
            print(f"{case['id']}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(table(rows))
    for peak in peaks:
        print(f"{peak['case']}: plan / simulate - 1 = {peak['planned_bytes'] / peak['simulated_bytes'] - 1:+.3%}")
    for case in cases:
        if any(row["case"] == case["id"] for row in rows):
            print(f"\n{case['id']} ({case['source']}). Assumed: {'; '.join(case['assumed'])}.")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows, "peaks": peaks}, indent=2) + "\n")


def asked(case: dict[str, Any]) -> tuple[zf.Run, zf.Cluster]:
    """The run of a case, and what it runs on."""
    names = ("model", "model_args", "ds_config", "micro_batch", "seq_len", "precision", "activation_checkpointing")
    run = zf.Run(**{name: case[name] for name in names if case[name] is not None}, **case.get("adapters", {}))
    return run, zf.Cluster(case["gpu"], gpus=case["gpus"])


def simulate(case: dict[str, Any]) -> zf.Simulation | zf.UserError:
    """Simulate a case, or return what stands in the way."""
    try:
        return zf.simulate(*asked(case))
    except zf.UserError as error:
        return error


def plan(case: dict[str, Any]) -> int:
    """The peak that plan forecasts, with the products' workspaces, which a simulation has."""
    run, cluster = asked(case)
    return planned(prepare_simulation(RunRequest.of(run), cluster).target(0)).peak_bytes


def _after_step(result: zf.Simulation) -> int:
    return [phase.end_bytes for phase in result.phases if phase.name == "step"][-1]


OURS: dict[str, Callable[[zf.Simulation], int]] = {
    "peak allocated": lambda result: result.peak_bytes,
    "peak reserved": lambda result: result.reserved_bytes,
    "allocated after the step": _after_step,
    "nvidia-smi": lambda result: result.smi_bytes,
}


def compare(case: dict[str, Any], result: zf.Simulation | zf.UserError) -> list[dict[str, Any]]:
    """A row for each measured quantity; `ours_bytes` is None, with the reason, where there is no simulation."""
    rows = []
    for measured in case["measured"]:
        row: dict[str, Any] = {
            "case": case["id"],
            "quantity": measured["quantity"],
            "measured_bytes": measured["bytes"],
        }
        row["at_least"] = measured.get("at_least", False)
        if isinstance(result, zf.UserError):
            row |= {"ours_bytes": None, "reason": result.problems[0].message}
        else:
            ours = OURS[measured["quantity"]](result)
            row |= {"ours_bytes": ours, "difference": ours / measured["bytes"] - 1}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    lines = [f"{'case':<21}{'quantity':<26}{'measured':>12}{'ours':>14}{'difference':>12}"]
    for row in rows:
        start = f"{row['case']:<21}{row['quantity']:<26}{row['measured_bytes'] / GIB:>8.2f} GiB"
        if row["ours_bytes"] is None:
            lines.append(f"{start}  not simulated: {row['reason']}")
        else:
            ours = f"{'≥ ' if row['at_least'] else ''}{row['ours_bytes'] / GIB:.2f} GiB"
            lines.append(f"{start}{ours:>14}{row['difference']:>+12.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
