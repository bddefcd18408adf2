"""How far `zerofit plan`'s step times are from published throughput, overall, by engine and by source.

    python benchmarks/time_accuracy.py CASES.json [--cache DIR] [--output FILE]

A case has a model's config, a cluster, a layout and the samples a second that somebody has published for them. Errors
are those of forecast / published samples a second. "Left out": the coefficients that were fitted to published figures
are fitted again for every source without its own. Models are traced once and kept in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from time_intervals import Case, alike, intervals, source_of

from zerofit.app.planning.profiles import ProfileRequest, get_profile
from zerofit.models.presets import PRESETS
from zerofit.plan.degrees import Degrees
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.rates import FITTED, Coefficients, Rates, rates_of
from zerofit.plan.space import LARGE_BUCKET, stage3_sizes
from zerofit.plan.time import StepParts, Timer
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import find_device
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root
from zerofit.spec.model_facts import bucket_elements
from zerofit.spec.profile import Kernel, LayerCost, Linear, Profile

# where a fit begins, and what holds it where few sources speak: SimuMax's tables, nccl-tests on 4 nodes (1 MiB at 8.8
# GB/s), hooks as `zerofit calibrate` measures them on an H100
PRIOR = Coefficients(memory=0.7, network=0.8, network_hop_s=30e-6, exposed_between=0.5, hook_s=379e-6)
STIFF = 0.01  # a coefficient twice as large is as bad as half a percent of error; 0.001 to 0.03 were tried
MOST = {"exposed_between": 1.0, "memory": 1.0, "network": 1.0}  # of coefficients that are shares
COMPILED, FUSED = 0.5, 0.6  # share of the traffic between products that fused kernels leave, assumed
# share of the peak, by the papers of FlashAttention (2022), FlashAttention-3 (2024) and FlashAttention-4's release
FLASH_ATTENTION = {
    ("FA1", "A100"): 0.33,
    ("FA1", "H100"): 0.21,
    ("FA3", "H200"): 0.63,
    ("FA3", "B200"): 0.57,
}
# tables whose own script asks for page-locked memory (insights/when-to-upgrade-gpus/benchmark.py:141 in their source);
# DeepSpeed's default is pageable before 0.19.5, which no source has
PINNED = ("stas-h200", "stas-b200")
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
    judge = Judge(cases, arguments.cache)
    ratios, left_out = judge.ratios(FITTED), judge.left_out()
    print("fitted to all:", judge.fit(cases))
    result = {
        **summary(cases, ratios),
        "left_out": summary(cases, left_out),
        **intervals(cases, left_out),
        "coefficients": asdict(FITTED),
    }
    show(result)
    if arguments.output:
        figures = {"ratios": ratios, "left_out_ratios": left_out}
        result |= {name: {key: round(ratio, 4) for key, ratio in of.items()} for name, of in figures.items()}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


class Judge:
    """Forecasts of all cases for given coefficients, and coefficients fitted to some of the cases."""

    def __init__(self, cases: list[Case], cache: Path):
        self._cases = cases
        self._profiles = [profile_of(case, cache) for case in cases]
        self._layouts = [list(layouts_of(*pair)) for pair in zip(cases, self._profiles, strict=True)]
        self._known: dict[Coefficients, dict[str, float]] = {}

    def ratios(self, coefficients: Coefficients) -> dict[str, float]:
        """Return forecast / published speed of each case: the fastest of the layouts that its source leaves open."""
        if coefficients not in self._known:
            found = self._known.setdefault(coefficients, {})
            for case, profile, layouts in zip(self._cases, self._profiles, self._layouts, strict=True):
                cluster = cluster_of(case)
                kind = BlockTimer if "FSDP" in case["framework"] else Timer
                timer = kind(profile, cluster, rates_for(case, cluster, coefficients))
                step_s = min(timer.step(layout).step_s for layout in layouts)
                found[case["id"]] = layouts[0].global_batch / step_s / case["published_samples_per_s"]
        return self._known[coefficients]

    def left_out(self) -> dict[str, float]:
        """Return each case's ratio by coefficients that were fitted without its source's figures."""
        ratios = {}
        for source in dict.fromkeys(map(source_of, self._cases)):
            fitted = self.fit([case for case in self._cases if source_of(case) != source])
            mine = [case["id"] for case in self._cases if source_of(case) == source]
            ratios |= {key: self.ratios(fitted)[key] for key in mine}
        return ratios

    def fit(self, cases: list[Case]) -> Coefficients:
        """Return the coefficients with the least error on these cases: one after the other, in ever smaller steps."""
        best, least = PRIOR, self._error(PRIOR, cases)
        for step in (1.3, 1.1, 1.03):
            moved = True
            while moved:
                moved = False
                for name, factor in itertools.product(asdict(best), (step, 1 / step)):
                    value = min(getattr(best, name) * factor, MOST.get(name, math.inf))
                    other = replace(best, **{name: round(value, 9)})
                    error = self._error(other, cases)
                    if error < least - 1e-4:
                        best, least, moved = other, error, True
        return best

    def _error(self, coefficients: Coefficients, cases: list[Case]) -> float:
        """Return the mean error of tables of any size, the log of the ratio up to a bound: a few sources are wrong."""
        ratios, sizes = self.ratios(coefficients), Counter(case["table"] for case in cases)
        weights = [sizes[case["table"]] ** -0.5 for case in cases]
        errors = [min(abs(math.log(ratios[case["id"]])), 1.0) for case in cases]
        moved = (math.log(getattr(coefficients, name) / prior) for name, prior in asdict(PRIOR).items())
        return sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights) + STIFF * sum(
            m * m for m in moved
        )


class BlockTimer(Timer):
    """Times of FSDP's steps, which gather each block in one call."""

    def parts(self, layout: PlannedLayout) -> StepParts:
        """Return what a step consists of."""
        parts = super().parts(layout)
        if not parts.fetches:
            return parts
        both = (parts.fetches.forward, parts.fetches.backward)
        forward, backward = (tuple((size, min(1.0, calls)) for size, calls in found) for found in both)
        return replace(parts, fetches=parts.fetches._replace(forward=forward, backward=backward))


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
    profile = get_profile(wanted, Reporter())[0]
    return split_everything(profile, case["tp"]) if case["tp"] > 1 else profile


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
        pin_optimizer=case["table"] in PINNED,
        pin_param=case["table"] in PINNED,
        checkpointing=case["activation_checkpointing"] is True,
        **(stage3_sizes(profile)._asdict() if case["zero_stage"] == 3 else {}),
    )
    if "FSDP" in case["framework"]:  # a block is whole from its recomputation to its backward, and nothing longer
        block = max(sum(layer.matrices + layer.vectors) for layer in profile.layers)
        layout = replace(layout, prefetch=block, reuse=2 * block, persistence=0)
    overlaps = (
        (False, True) if case["zero_stage"] and case["pp"] == 1 and case["overlap_comm"] is not False else (False,)
    )
    for bucket, overlap in itertools.product((bucket_elements(profile.parameters), LARGE_BUCKET), overlaps):
        yield replace(layout, bucket=bucket, overlap=overlap)


def split_everything(profile: Profile, tp: int) -> Profile:
    """Return the profile as Megatron's tensor parallel frameworks run it, which split what DeepSpeed repeats.

    The kernels between products work on a share of the sequence, and embedding, head and loss on one of the vocabulary.
    """

    def shared(line: Linear) -> Linear:
        return Linear(fixed=line.fixed / tp, per_sample=line.per_sample / tp)

    def kernels(whole: tuple[Kernel, ...], mine: tuple[Kernel, ...], name: str) -> tuple[Kernel, ...]:
        split = (k for k in whole if name != "block" or not k.shape)
        products = (k for k in mine if name == "block" and k.shape)
        return (*(replace(k, moved_bytes=shared(k.moved_bytes), flops=shared(k.flops)) for k in split), *products)

    def layer(whole: LayerCost, mine: LayerCost, name: str) -> LayerCost:
        return replace(
            mine,
            forward_kernels=kernels(whole.forward_kernels, mine.forward_kernels, name),
            backward_kernels=kernels(whole.backward_kernels, mine.backward_kernels, name),
        )

    costs = dict(profile.costs)
    for key in [key for key in costs if f"/tp={tp}/" in key]:
        whole = costs[key.replace(f"/tp={tp}/", "/tp=1/")]
        rows = zip(whole, costs[key], profile.layers, strict=True)
        costs[key] = tuple(layer(one, mine, run.name) for one, mine, run in rows)
    return replace(profile, costs=costs)


def rates_for(case: Case, cluster: Cluster, coefficients: Coefficients) -> Rates:
    """Return the rates of what ran: zerofit's own are those of DeepSpeed, and of torch's kernels, one an op."""
    rates = rates_of(cluster, case["precision"], fitted=coefficients)
    kernels, device = case["kernels"], cluster.device
    if case["torch_compile"]:
        rates = replace(rates, unfused=COMPILED)
    elif any(word in kernels for word in ("triton", "Transformer Engine", "Liger", "fused softmax", "fused LayerNorm")):
        rates = replace(rates, unfused=FUSED)
    generation = "FA3" if "FA3" in case["framework"] else "FA1" if "llm-foundry" in case["framework"] else ""
    share = FLASH_ATTENTION.get((generation, device.name))
    if share:
        rates = replace(rates, attention=share * (device.peak(case["precision"]) or 0.0))
    return (
        rates
        if case["stack"] != "other"
        else replace(rates, hook_s=0.0, gradient_s=0.0, engine_launch_s=0.0, streaming=math.inf)
    )


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
    right = pairs = 0
    for a, b in itertools.chain.from_iterable(itertools.combinations(group, 2) for group in alike(cases)):
        published = a["published_samples_per_s"] / b["published_samples_per_s"]
        if abs(published - 1) >= SAME_SPEED:
            pairs += 1
            right += (published > 1) == (published * ratios[a["id"]] / ratios[b["id"]] > 1)
    return right, pairs


def show(result: dict[str, Any]) -> None:
    """Print the summary."""
    left_out = {f"{name}, left out": result["left_out"][name] for name in ("all", "DeepSpeed")}
    rows = {"all": result["all"], "DeepSpeed": result["DeepSpeed"], **left_out, **result["tables"]}
    for name, row in rows.items():
        print(f"{name:22s}", ", ".join(f"{key} {value:g}" for key, value in row.items()))
    pairs = f"{result['pairs_in_order']} of {result['pairs']} pairs of layouts in the right order"
    print(f"median of tables {result['median_of_tables']:g}; {pairs}")
    print(f"80 % intervals widened by {result['wider']:g} have of figures of other sources", result["coverage"])


if __name__ == "__main__":
    main()
