"""Published memory figures of real DeepSpeed runs beside what `zerofit simulate` says of the same runs.

python benchmarks/field_cases.py [--cases FILE] [--case ID ...] [--output FILE.json]

What a source leaves out is assumed, and each assumption is printed. Nothing in zerofit is fitted to these figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "ds_configs"
TIMEOUT_S = 1800
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=HERE / "field_cases.json")
    parser.add_argument("--case", nargs="*", help="ids of some cases only")
    parser.add_argument("--output", type=Path, help="write the comparison as JSON")
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())["cases"]
    rows: list[dict[str, Any]] = []
    for case in cases:
        if not options.case or case["id"] in options.case:
            started = time.monotonic()
            rows += compare(case, simulate(case))
            print(f"{case['id']}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(table(rows))
    for case in cases:
        if any(row["case"] == case["id"] for row in rows):
            print(f"\n{case['id']} ({case['source']}). Assumed: {'; '.join(case['assumed'])}.")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def simulate(case: dict[str, Any]) -> dict[str, Any]:
    """The JSON of `zerofit simulate` for a case; {"error": ...} where it gave none."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(case, Path(folder)), capture_output=True, text=True, timeout=TIMEOUT_S)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": {"message": done.stderr.strip()[-400:]}}
    return answer


def command(case: dict[str, Any], folder: Path) -> list[str]:
    """The command line of a case; a DeepSpeed JSON of its own is written into the folder."""
    config = CONFIGS / f"{case['ds_config']}.json" if isinstance(case["ds_config"], str) else folder / "ds_config.json"
    if not isinstance(case["ds_config"], str):
        config.write_text(json.dumps(case["ds_config"]))
    argv = [sys.executable, "-m", "zerofit.cli", "simulate", case["model"]]
    argv += ["--json", "--no-knobs", "--ds-config", str(config)]
    for key in ("gpus", "gpu", "micro_batch", "seq_len", "precision"):
        if case[key] is not None:
            argv += [f"--{key.replace('_', '-')}", str(case[key])]
    argv.append("--activation-checkpointing" if case["activation_checkpointing"] else "--no-activation-checkpointing")
    if case["model_args"]:
        argv += ["--model-args", json.dumps(case["model_args"])]
    return argv


def _after_step(answer: dict[str, Any]) -> int:
    return [phase["end_bytes"] for phase in answer["phases"] if phase["name"] == "step"][-1]


OURS: dict[str, Callable[[dict[str, Any]], int]] = {
    "peak allocated": lambda answer: answer["peak_bytes"],
    "peak reserved": lambda answer: answer["reserved_bytes"],
    "allocated after the step": _after_step,
    "nvidia-smi": lambda answer: answer["smi_bytes"],
}


def compare(case: dict[str, Any], answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each measured quantity; `ours_bytes` is None, with the reason, where there is no simulation."""
    rows = []
    for measured in case["measured"]:
        row: dict[str, Any] = {
            "case": case["id"],
            "quantity": measured["quantity"],
            "measured_bytes": measured["bytes"],
        }
        row["at_least"] = measured.get("at_least", False)
        if "error" in answer:
            row |= {"ours_bytes": None, "reason": answer["error"]["message"]}
        else:
            ours = OURS[measured["quantity"]](answer)
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
