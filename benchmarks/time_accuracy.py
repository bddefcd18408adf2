"""How far `zerofit plan`'s step times are from published throughput, overall, by engine and by source.

    python benchmarks/time_accuracy.py CASES.json [--cache DIR] [--output FILE]

A case has a model's config, a cluster, a layout and the samples a second that somebody has published for them. Errors
are those of forecast / published samples a second. Models are traced once and kept in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.presets import PRESETS
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import rates_of
from zerofit.plan.space import LARGE_BUCKET, Degrees, stage3_sizes
from zerofit.plan.time import Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import find_device
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root
from zerofit.spec.model_facts import bucket_elements
from zerofit.spec.profile import Profile

Case = dict[str, Any]
SAME_SPEED = 0.03  # published figures that differ by less say nothing of an order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="published figures with their settings")
    parser.add_argument("--cache", type=Path, default=cache_root() / "time-accuracy", help="where profiles are kept")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if not arguments.cases.is_file():
        print(f"{arguments.cases} is not here: nothing to compare with")
        return
    os.environ["ZEROFIT_CACHE"] = str(arguments.cache)
    cases: list[Case] = json.loads(arguments.cases.read_text())["cases"]
    ratios = {}
    for case in cases:
        step_s, layout = forecast(case, profile_of(case, arguments.cache))
        ratios[case["id"]] = layout.global_batch / step_s / case["published_samples_per_s"]
    result = summary(cases, ratios)
    show(result)
    if arguments.output:
        result["ratios"] = {key: round(ratio, 4) for key, ratio in ratios.items()}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def profile_of(case: Case, cache: Path) -> Profile:
    """Trace the case's model, or take the kept profile."""
    checkpointing = case["activation_checkpointing"] is True  # "selective" recomputes attention's scores alone
    wanted = ProfileRequest(
        model=model_file(case, cache),
        precision=case["precision"],
        device="cuda",
        seq_len=case["seq_len"],
        image=f"image:{case['image']}" if case["image"] else None,
        checkpointings=(checkpointing,),
        degrees=tuple(dict.fromkeys((Degrees(), Degrees(case["tp"], 1, case["sp"])))),
    )
    return get_profile(wanted, Reporter())[0]


def model_file(case: Case, cache: Path) -> str:
    """Return the model's name, or a file with its config; attention without a fused kernel is said there."""
    config = case["model_config"] or PRESETS.get(case["model"])
    if config is None or not (case["model_config"] or is_unfused(case)):
        return case["model"]
    if is_unfused(case):
        config = {**config, "attn_implementation": "eager"}
    path = cache / "models" / f"{case['model']}{'-unfused' if is_unfused(case) else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return str(path)


def is_unfused(case: Case) -> bool:
    """Return whether attention makes the whole matrix of scores."""
    return not case["flash_attention"] and case["image"] is None


def cluster_of(case: Case) -> Cluster:
    """Return the case's machines, with what its source says of them."""
    device, given = find_device(case["gpu"]), case["device_overrides"]
    device = replace(device, **{key: given[key] for key in ("link", "bandwidth", "memory_bytes") if key in given})
    if "network" in given:
        device = replace(device, node=replace(device.node, network=given["network"]))
    return Cluster(device, gpus=case["gpus_per_node"], nodes=case["nodes"])


def layouts_of(case: Case, profile: Profile) -> Iterable[PlannedLayout]:
    """Yield the case's layout with the buckets and overlap that its source leaves open."""
    layout = PlannedLayout(
        **{key: case[key] for key in ("zero_stage", "micro_batch", "accumulation", "tp", "pp", "sp", "precision")},
        **{key: case[key] for key in ("offload_optimizer", "offload_param")},
        dp=case["gpus_per_node"] * case["nodes"] // (case["tp"] * case["pp"] * case["sp"]),
        checkpointing=case["activation_checkpointing"] is True,
        **(stage3_sizes(profile)._asdict() if case["zero_stage"] == 3 else {}),
    )
    overlaps = (
        (False, True) if case["zero_stage"] and case["pp"] == 1 and case["overlap_comm"] is not False else (False,)
    )
    for bucket, overlap in itertools.product((bucket_elements(profile.parameters), LARGE_BUCKET), overlaps):
        yield replace(layout, bucket=bucket, overlap=overlap)


def forecast(case: Case, profile: Profile) -> tuple[float, PlannedLayout]:
    """Return seconds of a step and the layout: the fastest of those that the source leaves open."""
    cluster = cluster_of(case)
    timer = Timer(profile, cluster, rates_of(cluster, case["precision"]))
    return min(((timer.step(one).step_s, one) for one in layouts_of(case, profile)), key=lambda pair: pair[0])


def summary(cases: list[Case], ratios: dict[str, float]) -> dict[str, Any]:
    """Return errors overall, on DeepSpeed's engine and by table, and pairs of layouts in the right order."""
    tables = {t: [c for c in cases if c["table"] == t] for t in dict.fromkeys(c["table"] for c in cases)}
    by_table = {table: errors(mine, ratios) for table, mine in tables.items()}
    right, pairs = order(cases, ratios)
    return {
        "all": errors(cases, ratios),
        "DeepSpeed": errors([case for case in cases if case["stack"] != "other"], ratios),
        "median_of_tables": round(statistics.median(row["median"] for row in by_table.values()), 4),
        "pairs_in_order": right,
        "pairs": pairs,
        "tables": by_table,
    }


def errors(cases: list[Case], ratios: dict[str, float]) -> dict[str, float]:
    """Return how many figures, the median ratio of forecast to published speed, and median and 90th of |ratio - 1|."""
    mine = [ratios[case["id"]] for case in cases]
    off = sorted(abs(ratio - 1) for ratio in mine)
    ninth = off[0] if len(off) == 1 else statistics.quantiles(off, n=10, method="inclusive")[-1]
    figures = {"ratio": statistics.median(mine), "median": statistics.median(off), "p90": ninth}
    return {"figures": len(off), **{name: round(value, 4) for name, value in figures.items()}}


def order(cases: list[Case], ratios: dict[str, float]) -> tuple[int, int]:
    """Return how many pairs of layouts of the same model and machine are in the published order, and of how many."""
    groups: dict[tuple, list[Case]] = {}
    for c in cases:
        ranks = c["gpus_per_node"] * c["nodes"]
        same = ("table", "model", "gpu", "seq_len", "precision", "image", "torch_compile")
        groups.setdefault((ranks, *(c[key] for key in same)), []).append(c)
    right = pairs = 0
    for a, b in itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups.values()):
        published = a["published_samples_per_s"] / b["published_samples_per_s"]
        if abs(published - 1) >= SAME_SPEED:
            pairs += 1
            right += (published > 1) == (published * ratios[a["id"]] / ratios[b["id"]] > 1)
    return right, pairs


def show(result: dict[str, Any]) -> None:
    """Print the summary."""
    rows = {"all": result["all"], "DeepSpeed": result["DeepSpeed"], **result["tables"]}
    for name, row in rows.items():
        print(f"{name:22s}", ", ".join(f"{key} {value:g}" for key, value in row.items()))
    pairs = f"{result['pairs_in_order']} of {result['pairs']} pairs of layouts in the right order"
    print(f"median of tables {result['median_of_tables']:g}; {pairs}")


if __name__ == "__main__":
    main()
