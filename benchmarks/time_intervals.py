"""Intervals of forecast step times: how far published figures lay from forecasts, by class, and what they cover."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

from zerofit.plan.outlook import CLASSES

Case = dict[str, Any]
Classed = dict[str, list[Case]]
WIDER = tuple(round(0.5 + 0.05 * n, 2) for n in range(71))  # factors on an interval's distance from its middle
# A class with figures of so few sources takes those of all texts, too, with and without the source that is left out.
FEW_SOURCES = 3
COVERED = 0.8


def intervals(cases: list[Case], ratios: Mapping[str, float], class_by_id: Mapping[str, str]) -> dict[str, Any]:
    """Return for each class how many figures it has, and the middle 80 % of published / forecast step time.

    Sources lie further apart than the figures of one. So each class is widened about its middle until 80 % of its
    figures lie within what the other sources tell. `coverage` says how many do. `pairs`: the same of one layout's step
    time where another of the same model and machine is known.
    """
    classed = {name: [case for case in cases if class_by_id[case["id"]] == name] for name in CLASSES}
    classed = {name: found for name, found in classed.items() if found}
    wider = {name: _wider(classed, ratios, name) for name in classed}
    spans = {name: span(pool(classed, name), ratios, wider[name]) for name in classed if len(pool(classed, name)) > 1}
    inside = {name: covered(classed, ratios, name, wider[name]) for name in classed}
    pairs = [ratios[a["id"]] / ratios[b["id"]] for group in alike(cases) for a, b in itertools.permutations(group, 2)]
    tenths = statistics.quantiles(pairs, n=10, method="inclusive") if pairs else [1.0]
    every = [within for found in inside.values() for within in found]
    return {
        "classes": {name: [len(classed[name]), round(low, 2), round(high, 2)] for name, (low, high) in spans.items()},
        "wider": wider,
        "coverage": {name: round(mean(found), 3) for name, found in {**inside, "all": every}.items()},
        "pairs_interval": [len(pairs) // 2, round(tenths[0], 2), round(tenths[-1], 2)],
    }


def mean(inside: list[bool]) -> float:
    """Return the share of figures inside; all of none."""
    return statistics.mean(inside) if inside else 1.0


def _wider(classed: Classed, ratios: Mapping[str, float], name: str) -> float:
    """Return the factor with which a class covers 80 % of its figures."""
    shares = {wider: mean(covered(classed, ratios, name, wider)) for wider in WIDER}
    return min(shares, key=lambda wider: (abs(shares[wider] - COVERED), wider))


def pool(classed: Classed, name: str, without: str = "") -> list[Case]:
    """Return the figures that tell a class's interval, without a source."""
    mine = [case for case in classed[name] if source_of(case) != without]
    if name == "image" or sources(classed[name]) > FEW_SOURCES:
        return mine
    texts = (case for key, cases in classed.items() if key != "image" for case in cases)
    return mine + [case for case in texts if source_of(case) != without]


def span(cases: list[Case], ratios: Mapping[str, float], wider: float) -> tuple[float, float]:
    """Return the 10th and 90th percentile, moved away from the median, as shares of the forecast."""
    tenths = statistics.quantiles((math.log(ratios[case["id"]]) for case in cases), n=10, method="inclusive")
    low, middle, high = tenths[0], tenths[4], tenths[-1]
    return math.exp(middle - wider * (middle - low)), math.exp(middle + wider * (high - middle))


def covered(classed: Classed, ratios: Mapping[str, float], name: str, wider: float) -> list[bool]:
    """Return for each figure of a class whether the interval that is made without its source contains it.

    Without its only source, a class would have the interval of other classes. So that source is not left out.
    """
    inside: list[bool] = []
    of_class = dict.fromkeys(map(source_of, classed[name]))
    for source in of_class:
        told = pool(classed, name, source if len(of_class) > 1 else "")
        if len(told) < 2:
            continue
        low, high = span(told, ratios, wider)
        inside += [low <= ratios[case["id"]] <= high for case in classed[name] if source_of(case) == source]
    return inside


def alike(cases: list[Case]) -> list[list[Case]]:
    """Return the figures of one model on one machine, in each table."""
    groups: dict[tuple, list[Case]] = {}
    for c in cases:
        ranks = c["gpus_per_node"] * c["nodes"]
        same = ("table", "model", "gpu", "seq_len", "precision", "image", "torch_compile")
        groups.setdefault((ranks, *(c[key] for key in same)), []).append(c)
    return list(groups.values())


def sources(cases: list[Case]) -> int:
    """Return how many sources the figures have."""
    return len(set(map(source_of, cases)))


def source_of(case: Case) -> str:
    """Return the family of tables that one publisher measured in one way: the first word of the table."""
    return case["table"].partition("-")[0]
