"""Intervals of step times: how far forecasts of the same class were from published figures."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.spec.model_facts import is_text


class PublishedErrors(NamedTuple):
    """Where the middle 80 % of published step times of one class lay, as multiples of their forecasts."""

    what: str
    figures: int
    low: float
    high: float


# benchmarks/results/time-accuracy.json, "classes": forecasts fitted without each figure's own source
CLASSES = {
    "image": PublishedErrors("image models", 29, 0.91, 1.46),
    "offload": PublishedErrors("DeepSpeed with an offloaded optimizer", 10, 0.45, 2.35),
    "nodes": PublishedErrors("DeepSpeed on several nodes", 33, 0.9, 1.47),
    "node": PublishedErrors("DeepSpeed on one node", 21, 0.71, 1.5),
}


def class_of(task: str, nodes: int, offload: str) -> str:
    """Return the class of a training on GPUs, a key of CLASSES."""
    if not is_text(task):
        return "image"
    if offload != "none":
        return "offload"
    return "nodes" if nodes > 1 else "node"


def errors_of(task: str, nodes: int, offload: str) -> PublishedErrors:
    """Return how far forecasts of such trainings were from published figures."""
    return CLASSES[class_of(task, nodes, offload)]
