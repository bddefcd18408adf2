"""How far `zerofit plan`'s times of collectives are from published nccl-tests and the like, by message size.

python -m benchmarks.collective_curves [--out FILE]

`collective_curves.json` has the tables, each with its source: microseconds by bytes of the whole tensor, on A100, H100,
H200 and B200. Nothing was fitted to them; the bandwidth that plan takes for all-reduces which a switch adds up is that
of their largest messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofit.plan.kernels import RankGroup, collective_s
from zerofit.plan.rates import rates_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import find_device

CURVES = Path(__file__).parent / "collective_curves.json"
KINDS = {"a100": "a100-80gb", "h100": "h100-80gb", "h200": "h200", "b200": "b200"}
MIB = 2**20
SIZES = {"64 KiB to 1 MiB": MIB, "to 16 MiB": 16 * MIB, "to 256 MiB": 256 * MIB, "256 MiB and more": 2**60}


def main() -> None:
    asked = parse()
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    rows = []
    for table in json.loads(CURVES.read_text()):
        ratios = {size: forecast_s(table, size) / (1e-6 * us) for size, us in table["rows"]}
        rows.append({key: table[key] for key in ("source", "op", "gpu", "gpus_per_node", "nodes", "network_gbit")})
        rows[-1]["ratios"] = {size: round(ratio, 3) for size, ratio in ratios.items()}
        where = "one node" if table["nodes"] == 1 else "several nodes"
        for size, ratio in ratios.items():
            found[where, table["op"], next(name for name, most in SIZES.items() if size < most)].append(ratio)
    print(f"{len(rows)} tables; forecast / published seconds, median (figures):")
    summary = []
    for where, op in sorted({key[:2] for key in found}):
        cells = {name: found[where, op, name] for name in SIZES}
        medians = {name: round(statistics.median(ratios), 2) for name, ratios in cells.items() if ratios}
        summary.append({"where": where, "op": op, "median": medians, "figures": sum(map(len, cells.values()))})
        shown = ", ".join(f"{name} {median:.2f} ({len(cells[name])})" for name, median in medians.items())
        print(f"{where:14s}{op:15s} {shown}")
    if asked.out:
        asked.out.write_text(json.dumps({"summary": summary, "tables": rows}, indent=1) + "\n")


def forecast_s(table: dict[str, Any], size: int) -> float:
    """Return what plan says of one call."""
    device, gpus = find_device(KINDS[table["gpu"]]), table["gpus_per_node"]
    if table["network_gbit"]:
        device = replace(device, node=replace(device.node, network=table["network_gbit"] * 1e9 / 8 / gpus))
    rates = rates_of(Cluster(device, gpus=gpus, nodes=table["nodes"]), "bf16")
    return collective_s(table["op"], size, 1, RankGroup(gpus * table["nodes"], gpus), rates)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write every table's ratios into this JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
