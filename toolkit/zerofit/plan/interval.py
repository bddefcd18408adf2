"""Give the uncertainty of forecast step times, from forecast errors on published figures."""

from __future__ import annotations

from typing import NamedTuple

from zerofit.plan.layout import PlannedLayout
from zerofit.spec.model_facts import is_text

LONG = 16_384  # tokens per sample


class PublishedErrors(NamedTuple):
    """The interval of the middle 80 % of the ratios measured / forecast in one class of figures."""

    what: str
    figures: int
    low: float
    high: float
    narrower: str = "--measured"  # the measurement that narrows the interval most


# benchmarks/results/time-accuracy.json, "classes". Each forecast is fitted without the figure's own source. Each
# interval contains 80 % of the figures of a source that was left out of it. A layout belongs to the first class that
# matches.
CLASSES = {
    "image": PublishedErrors("image models", 29, 0.83, 1.26, "zerofit calibrate"),
    "offload": PublishedErrors("an offloaded optimizer", 10, 0.89, 1.19, "zerofit calibrate"),
    "pipeline": PublishedErrors("pipelines", 10, 0.81, 1.35),
    "tensor": PublishedErrors("tensor parallelism", 20, 0.76, 1.2),
    "long": PublishedErrors("sequences of 16K and more", 20, 0.92, 1.15, "zerofit calibrate"),
    "fsdp2": PublishedErrors("FSDP", 97, 0.9, 1.09),
    "nodes": PublishedErrors("DeepSpeed on several nodes", 31, 0.9, 1.18),
    "text": PublishedErrors("DeepSpeed on one node", 32, 0.65, 1.63, "zerofit calibrate"),
}
# Published step times of torchtitan's Llama 2 and 3 (2024 and 2025: 3 on A100, 4 on H100) were 0.98 to 1.28 times the
# forecasts. These releases had norms of several kernels and a loss in one piece; there are no figures of newer ones.
TITAN = PublishedErrors("torchtitan", 7, 0.98, 1.28)
# "pairs_interval": for a layout's step time, if another layout of the same model and machine was measured
PAIRS = PublishedErrors("two layouts of one model on one machine", 78, 0.89, 1.13)
AS_MEASURED = PublishedErrors("measured", 1, 1.0, 1.0)


def class_of(layout: PlannedLayout, task: str, seq_len: int | None, nodes: int) -> str:
    """Return the key in CLASSES for a layout on GPUs."""
    fitting = {
        "image": not is_text(task),
        "offload": layout.offload != "none",
        "pipeline": layout.pp > 1,
        "tensor": layout.tp > 1,
        "long": (seq_len or 0) >= LONG,
        "fsdp2": layout.by_layer,
        "nodes": nodes > 1,
    }
    return next((name for name, fits in fitting.items() if fits), "text")


def errors_of(layout: PlannedLayout, task: str, seq_len: int | None, nodes: int) -> PublishedErrors:
    """Return the forecast errors on published figures in the same class as the layout."""
    if layout.engine == "torchtitan":
        return TITAN
    return CLASSES[class_of(layout, task, seq_len, nodes)]
