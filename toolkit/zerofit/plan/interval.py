"""Give intervals for step times: the errors of forecasts of the same class on published figures."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.spec.model_facts import is_text


class PublishedErrors(NamedTuple):
    """The middle 80 % of published step times of one class, as multiples of their forecasts."""

    what: str
    figures: int
    low: float
    high: float


# benchmarks/results/time-accuracy.json, "classes". Each forecast is fitted without the figure's own source. Each
# interval contains 80 % of the figures of a source that was left out when the interval was made
CLASSES = {
    "image": PublishedErrors("image models", 29, 0.84, 1.31),
    "text": PublishedErrors("DeepSpeed without offloading", 54, 0.9, 1.38),
    "offload": PublishedErrors("DeepSpeed with an offloaded optimizer", 10, 0.89, 2.14),
}
# "pairs_interval": for one layout's step time if another one's is known, of the same model and machine
PAIRS = PublishedErrors("two layouts of one model on one machine", 78, 0.88, 1.13)
AS_MEASURED = PublishedErrors("measured", 1, 1.0, 1.0)


def class_of(task: str, offload: str) -> str:
    """Return the class of a run on GPUs, a key of CLASSES."""
    if not is_text(task):
        return "image"
    return "offload" if offload != "none" else "text"


def errors_of(task: str, offload: str) -> PublishedErrors:
    """Return the errors of such forecasts on published figures."""
    return CLASSES[class_of(task, offload)]
