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
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from time_intervals import Case, alike, intervals, source_of

from zerofit.app.planning.layout_pins import LayoutPins
from zerofit.app.planning.profiles import ProfileRequest, get_profile, read_profile
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.search_setup import SearchSetup, forecast_of, setup_of
from zerofit.features.engines import Engine
from zerofit.models.presets import PRESETS
from zerofit.plan.degrees import Degrees
from zerofit.plan.fit import check_fit
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.outlook import LONG, class_of
from zerofit.plan.rates import FITTED, Coefficients
from zerofit.plan.search import timer_of
from zerofit.plan.space import space_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import find_device
from zerofit.spec.errors import ModelError, Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.files import cache_root
from zerofit.spec.model_facts import AttentionKernel

# where a fit begins, and what holds it where few sources speak: SimuMax's tables, nccl-tests on 4 nodes (1 MiB at 8.8
# GB/s), hooks as `zerofit calibrate` measures them on an H100
PRIOR = Coefficients(memory=0.7, network=0.8, network_hop_s=30e-6, exposed_between=0.5, hook_s=379e-6)
STIFF = 0.01  # a coefficient twice as large is as bad as half a percent of error; 0.001 to 0.03 were tried
MOST = {"exposed_between": 1.0, "memory": 1.0, "network": 1.0}  # of coefficients that are shares
# kernels as fused as Liger's
FUSED = ("triton", "Transformer Engine", "Liger", "fused softmax", "fused LayerNorm")
ONE_THREAD = ("deepcompile-offload",)  # `accelerate launch` sets OMP_NUM_THREADS=1 (benchmarks/deepcompile/run.sh)
# tables whose own script asks for page-locked memory (insights/when-to-upgrade-gpus/benchmark.py:141 in their source);
# DeepSpeed's default is pageable before 0.19.5, which no source has
PINNED = ("stas-h200", "stas-b200")
# what errors are listed by, besides the tables
KINDS: dict[str, Callable[[Case], bool]] = {
    "DeepSpeed": lambda case: case["stack"] != "other",
    "DeepSpeed, Hugging Face": lambda case: case["stack"] == "hf-deepspeed",
    "16K tokens and more": lambda case: (case["seq_len"] or 0) >= LONG,
    "offloading": lambda case: case["offload_optimizer"] != "none",
    "tensor parallel": lambda case: case["tp"] > 1,
    "pipelines": lambda case: case["pp"] > 1,
    "several nodes": lambda case: case["nodes"] > 1,
}
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
    cases = judge.cases
    ratios, left_out = judge.ratios(FITTED), judge.left_out()
    print("fitted to all:", judge.fit(cases))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    result = {
        "date": f"{datetime.now():%Y-%m-%d}",
        "commit": commit.strip(),
        **summary(cases, ratios),
        "verdicts": dict(Counter(judge.verdicts().values())),
        "left_out": summary(cases, left_out),
        **intervals(cases, left_out, judge.classes()),
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
        self.cases: list[Case] = []  # those that plan forecasts
        self._cache = cache
        self._planned: list[tuple[SearchSetup, Cluster, list[PlannedLayout]]] = []
        for case in cases:
            try:
                self._planned.append(planned(case, cache))
                self.cases.append(case)
            except (UserError, ModelError) as error:
                print(f"{case['id']}: no forecast: {error}")
        self._known: dict[Coefficients, dict[str, float]] = {}

    def ratios(self, coefficients: Coefficients) -> dict[str, float]:
        """Return forecast / published speed of each case: the fastest of the layouts that its source leaves open."""
        if coefficients not in self._known:
            found = self._known.setdefault(coefficients, {})
            for case, (setup, cluster, rows) in zip(self.cases, self._planned, strict=True):
                timer = timer_of(setup.profile, cluster, setup.request, fitted=coefficients)
                speed = max(row.global_batch / timer.step(row).step_s for row in rows)
                found[case["id"]] = speed / case["published_samples_per_s"]
        return self._known[coefficients]

    def verdicts(self) -> dict[str, str]:
        """Return whether plan says that each case fits; all of them ran. The smallest of the open layouts counts.

        No option of plan says that the cross-entropy alone is fused, as in llm-foundry. Of a GPT-2 shape, Liger fuses
        no more than that, so those cases have the profile with Liger's kernels.
        """
        found = {}
        for case, (setup, cluster, rows) in zip(self.cases, self._planned, strict=True):
            fused = "xentropy" in case["kernels"]
            profile = read_profile(profile_of(case, self._cache, True)) if fused else setup.profile
            forecast = forecast_of(profile, cluster)
            fits = [check_fit(forecast(row), row, cluster) for row in rows]
            found[case["id"]] = min(fits, key=lambda fit: fit.utilization).verdict
        return found

    def classes(self) -> dict[str, str]:
        """Return the class of each case, as the plan gives it."""
        found = {}
        for case, (setup, cluster, rows) in zip(self.cases, self._planned, strict=True):
            found[case["id"]] = class_of(rows[0], setup.profile.task, setup.profile.seq_len, cluster.nodes)
        return found

    def left_out(self) -> dict[str, float]:
        """Return each case's ratio by coefficients that were fitted without its source's figures."""
        ratios = {}
        for source in dict.fromkeys(map(source_of, self.cases)):
            fitted = self.fit([case for case in self.cases if source_of(case) != source])
            mine = [case["id"] for case in self.cases if source_of(case) == source]
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


def planned(case: Case, cache: Path) -> tuple[SearchSetup, Cluster, list[PlannedLayout]]:
    """Return the plan's request for a case, as options of `zerofit plan` make it, and its rows with the case's layout.

    Raises UserError and ModelError.
    """
    cluster, options, file = cluster_of(case), options_of(case), profile_of(case, cache, is_fused(case))
    image = f"image:{case['image']}" if case["image"] else None
    left_out: dict[str, tuple[Problem, int]] = {}
    for engine in engines_of(case):
        pins: Any = {name: value for name, value in options.items() if engine == "deepspeed" or name != "zero_stage"}
        request = PlanningRequest(profile=file, image=image, engines=(engine,), pins=pins)
        if engine == "torchtitan":  # its own model is traced, too
            pins["seq_len"] = case["seq_len"]
            request = PlanningRequest(model=model_file(case, cache), engines=(engine,), pins=pins)
        setup = setup_of(cluster, request, Reporter())[0]
        space = space_of(setup.profile, cluster, setup.request)
        if rows := [row for family in space.families for row in family if is_row(case, row)]:
            return setup, cluster, rows
        left_out |= space.left_out
    raise UserError(*(problem for problem, _ in left_out.values()))


def engines_of(case: Case) -> tuple[Engine, ...]:
    """Return the engines whose layouts a case may have: of the first that plan forecasts.

    FSDP is planned as FSDP2 where that is forecast, else as ZeRO-3. torchtitan's figures are from releases before the
    planned one, so its models count only where FSDP2 is not forecast: with tensor parallelism. torchtune's weights are
    not divided on one GPU, and DeepSpeed would have float32 copies of them.
    """
    if "torchtitan" in case["framework"] and case["tp"] > 1:
        return ("torchtitan",)
    if "torchtune" in case["framework"]:
        return ("fsdp2",)
    return ("fsdp2", "deepspeed") if "FSDP" in case["framework"] else ("deepspeed",)


def is_row(case: Case, row: PlannedLayout) -> bool:
    """Return whether a row has the case's sharding: buckets and overlap are open, FSDP2's ways are not.

    Composer, which llm-foundry trains with, reduces gradients after each micro batch.
    """
    reshard = "SHARD_GRAD_OP" not in case["framework"]
    each = "llm-foundry" in case["framework"] and row.accumulation > 1
    return not row.by_layer or (row.replicas, row.reshard, row.sync_each_batch) == (1, reshard, each)


def options_of(case: Case) -> LayoutPins:
    """Return the case's options of `zerofit plan`: what its source says; the fastest of the rest is taken."""
    split = case["stack"] == "other" and case["tp"] > 1
    options: LayoutPins = {
        "precision": case["precision"],
        "zero_stage": case["zero_stage"],
        "micro_batch": case["micro_batch"],
        "gradient_accumulation_steps": case["accumulation"],
        "activation_checkpointing": case["activation_checkpointing"],
        "tensor_parallel": case["tp"],
        "pipeline": case["pp"],
        "sequence_parallel": case["sp"],
        "offload": case["offload_optimizer"],
        "offload_param": case["offload_param"],
        "pin_memory": case["table"] in PINNED,
        "attn_implementation": attention_of(case),
        "compile": case["torch_compile"],
        "liger_kernel": is_fused(case),
        "tensor_sequence_parallel": split,
    }
    if case["overlap_comm"] is False:
        options["overlap_comm"] = False
    if "torchtune" in case["framework"]:  # its recipes have dtype: bf16
        options["model_args"] = {"dtype": "bfloat16"}
    if case["table"] in ONE_THREAD:
        options["cpu_threads"] = 1
    return options


def attention_of(case: Case) -> AttentionKernel:
    """Return the attention kernel of a case; torch's SDPA was FlashAttention-2 in the releases of the sources."""
    if is_unfused(case):
        return "eager"
    if "FA3" in case["framework"]:
        return "flash_attention_4" if case["gpu"] == "b200" else "flash_attention_3"
    if "llm-foundry" in case["framework"]:
        return "flash_attention_1"
    return "sdpa" if "Transformer Engine" in case["kernels"] else "flash_attention_2"


def is_fused(case: Case) -> bool:
    """Return whether the case has fused kernels like Liger's."""
    return any(word in case["kernels"] for word in FUSED)


def is_unfused(case: Case) -> bool:
    """Return whether attention makes the whole matrix of scores."""
    return not case["flash_attention"] and case["image"] is None


def profile_of(case: Case, cache: Path, fused: bool) -> Path:
    """Trace the case's model, or take the stored profile. `fused`: whether its kernels are fused like Liger's."""
    wanted = ProfileRequest(
        model=model_file(case, cache),
        precision=case["precision"],
        device="cuda",
        seq_len=case["seq_len"],
        image=f"image:{case['image']}" if case["image"] else None,
        checkpointings=(case["activation_checkpointing"],),
        degrees=tuple(dict.fromkeys((Degrees(), Degrees(case["tp"], 1, case["sp"])))),
        liger_kernel=fused,
    )
    file = get_profile(wanted, Reporter())[1]
    assert file
    return file


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


def cluster_of(case: Case) -> Cluster:
    """Return the case's machines, with what its source says of them, as a device file would."""
    device, given = find_device(case["gpu"]), case["device_overrides"]
    device = replace(device, **{key: given[key] for key in ("link", "bandwidth", "memory_bytes") if key in given})
    network = int(given["network"]) if "network" in given else None
    return Cluster(device, gpus=case["gpus_per_node"], nodes=case["nodes"], network=network)


def summary(cases: list[Case], ratios: dict[str, float]) -> dict[str, Any]:
    """Return errors overall, on DeepSpeed's engine and by table, and pairs of layouts in the right order."""
    tables = {t: [c for c in cases if c["table"] == t] for t in dict.fromkeys(c["table"] for c in cases)}
    by_table = {table: errors(mine, ratios) for table, mine in tables.items()}
    right, pairs = order(cases, ratios)
    return {
        "all": errors(cases, ratios),
        **{kind: errors(mine, ratios) for kind, belongs in KINDS.items() if (mine := list(filter(belongs, cases)))},
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
    kinds = [kind for kind in ("all", *KINDS) if kind in result]
    left_out = {f"{kind}, left out": result["left_out"][kind] for kind in kinds}
    rows = {**{kind: result[kind] for kind in kinds}, **left_out, **result["tables"]}
    for name, row in rows.items():
        print(f"{name:34s}", ", ".join(f"{key} {value:g}" for key, value in row.items()))
    pairs = f"{result['pairs_in_order']} of {result['pairs']} pairs of layouts in the right order"
    print(f"median of tables {result['median_of_tables']:g}; {pairs}")
    print("verdicts on these runs:", result["verdicts"])
    print("80 % intervals have of figures of other sources", result["coverage"], "widened by", result["wider"])


if __name__ == "__main__":
    main()
