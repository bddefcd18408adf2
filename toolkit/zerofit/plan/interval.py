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


# benchmarks/results/time-accuracy.json, "classes": forecasts fitted without each figure's own source, and intervals
# wide enough for 80 % of the figures of a source that they were made without
CLASSES = {
    "image": PublishedErrors("image models", 29, 0.84, 1.31),
    "text": PublishedErrors("DeepSpeed without offloading", 54, 0.9, 1.38),
    "offload": PublishedErrors("DeepSpeed with an offloaded optimizer", 10, 0.89, 2.14),
}
# "pairs_interval": of one layout's step time where that of another one, of the same model and machine, is known
PAIRS = PublishedErrors("two layouts of one model on one machine", 78, 0.88, 1.13)
AS_MEASURED = PublishedErrors("measured", 1, 1.0, 1.0)


def class_of(task: str, offload: str) -> str:
    """Return the class of a training on GPUs, a key of CLASSES."""
    if not is_text(task):
        return "image"
    return "offload" if offload != "none" else "text"


def errors_of(task: str, offload: str) -> PublishedErrors:
    """Return how far forecasts of such trainings were from published figures."""
    return CLASSES[class_of(task, offload)]
