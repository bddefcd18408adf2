"""Intervals of forecast step times: how far published figures lay from forecasts, by class, and what they cover."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

from zerofit.plan.interval import CLASSES, class_of

Case = dict[str, Any]
WIDER = tuple(round(1 + 0.05 * n, 2) for n in range(21))  # how far intervals may be widened


def intervals(cases: list[Case], ratios: dict[str, float]) -> dict[str, Any]:
    """Return for each class how many figures it has, and the middle 80 % of published / forecast step time.

    Sources lie further apart than the figures of one: intervals are widened about their middle until 80 % of the
    figures lie within what the other sources tell. `coverage` says how many do. `pairs`: the same of one layout's
    step time where another of the same model and machine is known.
    """
    classed = {name: [case for case in cases if class_of_case(case) == name] for name in CLASSES}
    coverages = {wider: coverage(classed, ratios, wider) for wider in WIDER}
    wider = min(coverages, key=lambda one: (abs(coverages[one]["all"] - 0.8), one))
    spans = {name: interval(classed, ratios, name, wider) for name in classed}
    pairs = [ratios[a["id"]] / ratios[b["id"]] for group in alike(cases) for a, b in itertools.permutations(group, 2)]
    tenths = statistics.quantiles(pairs, n=10, method="inclusive")
    return {
        "classes": {name: [len(classed[name]), round(low, 2), round(high, 2)] for name, (low, high) in spans.items()},
        "wider": wider,
        "coverage": coverages[wider],
        "pairs_interval": [len(pairs) // 2, round(tenths[0], 2), round(tenths[-1], 2)],
    }


def class_of_case(case: Case) -> str | None:
    """Return the class of a figure; None for texts on other engines than DeepSpeed's, with which zerofit trains."""
    if not case["image"] and case["stack"] == "other":
        return None
    return class_of("image" if case["image"] else "causal-lm", case["offload_optimizer"])


def interval(classed: dict[str, list[Case]], ratios: dict[str, float], name: str, wider: float) -> tuple[float, float]:
    """Return the 10th and 90th percentile of a class, moved away from the median, as shares of the forecast.

    An offloaded optimizer is not known better than DeepSpeed's engine as a whole.
    """
    pools = [classed[name]]
    if name == "offload":
        pools.append(classed["offload"] + classed["text"])
    spans = []
    for pool in pools:
        logs = [math.log(ratios[case["id"]]) for case in pool]
        if len(logs) > 1:
            tenths = statistics.quantiles(logs, n=10, method="inclusive")
            low, middle, high = tenths[0], tenths[4], tenths[-1]
            spans.append((middle - wider * (middle - low), middle + wider * (high - middle)))
    return math.exp(min(low for low, _ in spans)), math.exp(max(high for _, high in spans))


def coverage(classed: dict[str, list[Case]], ratios: dict[str, float], wider: float) -> dict[str, float]:
    """Return the share of figures within the interval that is made without their source, by class and of all."""
    inside: dict[str, list[bool]] = {name: [] for name in classed}
    for name, mine in classed.items():
        for source in dict.fromkeys(map(source_of, mine)):
            others = {key: [case for case in of if source_of(case) != source] for key, of in classed.items()}
            low, high = interval(others, ratios, name, wider)
            inside[name] += [low <= ratios[case["id"]] <= high for case in mine if source_of(case) == source]
    everything = [one for found in inside.values() for one in found]
    return {name: round(statistics.mean(found), 3) for name, found in {**inside, "all": everything}.items()}


def alike(cases: list[Case]) -> list[list[Case]]:
    """Return the figures of one model on one machine, in each table."""
    groups: dict[tuple, list[Case]] = {}
    for c in cases:
        ranks = c["gpus_per_node"] * c["nodes"]
        same = ("table", "model", "gpu", "seq_len", "precision", "image", "torch_compile")
        groups.setdefault((ranks, *(c[key] for key in same)), []).append(c)
    return list(groups.values())


def source_of(case: Case) -> str:
    """Return the family of tables that one publisher measured in one way: the first word of the table."""
    return case["table"].partition("-")[0]
