"""What `zerofit plan` says of published runs that ran out of memory, and of their twins that ran.

python benchmarks/out_of_memory.py [--cases ID ...] [--output FILE.json]

The runs of out_of_memory.json are options of `zerofit plan`. The exit code is 1 if a run that ran out of memory "fits",
or if one that ran "does not fit". "excepted" cases do not count: their settings are unknown, or no option says them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIB = 2**30
LINE = "{id:31} {outcome:13} {verdict:18} {peak_gib:6} + {margin_gib:5} of {device_gib} GiB"
VERDICTS = ("fits", "close to the limit", "does not fit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="ID", help="only these")
    parser.add_argument("--output", type=Path, help="write the verdicts as JSON")
    options = parser.parse_args()
    cases = json.loads((HERE / "out_of_memory.json").read_text())["cases"]
    rows = []
    for case in cases:
        if not options.cases or case["id"] in options.cases:
            rows.append(judge(case))
            print(
                "{id:31} {outcome:13} {verdict:18} {peak_gib:6} + {margin_gib:5} of {device_gib} GiB".format(**rows[-1])
            )
    for outcome in ("out of memory", "ran"):
        print(f"{outcome}: {dict(Counter(row['verdict'] for row in rows if row['outcome'] == outcome))}")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    excepted = {case["id"] for case in cases if "excepted" in case}
    sys.exit(any(is_wrong(row) for row in rows if row["id"] not in excepted))


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Return plan's best verdict on the layouts that a case's source leaves open."""
    command = [sys.executable, "-m", "zerofit", "plan", *case["flags"].split(), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(answer.stdout.splitlines()[-1])
    layouts = found["layouts"] + found["misfits"]
    best = min(layouts, key=lambda layout: (VERDICTS.index(layout["verdict"]), layout["peak_bytes"]))
    sizes = {"peak": "peak_bytes", "margin": "margin_bytes", "device": "device_total_bytes"}
    return {
        "id": case["id"],
        "outcome": "ran" if case["ran"] else "out of memory",
        "verdict": best["verdict"],
        **{f"{name}_gib": round(best[key] / GIB, 2) for name, key in sizes.items()},
    }


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether the outcome contradicts the verdict."""
    return row["verdict"] == ("does not fit" if row["outcome"] == "ran" else "fits")


if __name__ == "__main__":
    main()
