"""Document 000: ways to train in parallel, from DataParallel to DeepSpeed, and the duration of large runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.documents.document import DocumentRun
from benchmarks.documents.page import TeachingDocument
from zerofit.app.comparing.laboratory import Evidence
from zerofit.models.presets import NAMED
from zerofit.spec.units import shown_bytes

CLASSES, SIDE, BATCH = 10, 112, 32
TRAIN, VALID = 8, 10  # images of a class


def repeat(document: DocumentRun) -> TeachingDocument:
    """Train the document's network with each of its strategies, and forecast the experiments that need GPUs."""
    costs, plans = document.keep("data-parallel", _simulate_data_parallel), document.plans()
    done = document.compare("ways", data=f"imagefolder:{enlarged_digits(document.folder / 'digits-112')}")
    small = costs["simplecnn-112"]
    values: dict[str, Any] = {
        name: [shown_bytes(size) for size in small[name]] for name in ("peak", "sent", "received")
    }
    values["hours"] = {name: _hours(plan) for name, plan in plans.items()}
    evidence = [
        document.comparison_table("ways", done),
        _data_parallel_table(document, costs),
        document.plan_table(plans, _plan_cells),
    ]
    return document.page({**values, "gpt_billions": NAMED["gpt-3-175b"].parameters / 1e9}, evidence)


def _simulate_data_parallel() -> dict[str, Any]:
    """Simulate DataParallel on two GPUs with the document's network and with a larger one."""
    from benchmarks.documents.data_parallel import data_parallel_costs
    from zerofit.models.build import build
    from zerofit.models.catalog import find
    from zerofit.models.inputs import ImageInputs

    networks = {
        "simplecnn-112": ImageInputs(channels=3, size=SIDE, classes=CLASSES),
        "resnet50": ImageInputs(channels=3, size=224, classes=1000),
    }
    return {
        model: {"batch": BATCH, **asdict(data_parallel_costs(partial(build, find(model), inputs, {}), inputs, BATCH))}
        for model, inputs in networks.items()
    }


def _data_parallel_table(document: DocumentRun, costs: dict[str, Any]) -> Evidence:
    rows = []
    for model, cost in costs.items():
        for gpu in range(2):
            sizes = [cost[name][gpu] for name in ("peak", "sent", "received")] + [4 * NAMED[model].parameters]
            rows.append([model, str(cost["batch"]), str(gpu), *map(shown_bytes, sizes)])
    return document.table("data-parallel", rows=rows, figures=costs)


def _plan_cells(plan: Mapping[str, Any]) -> list[str]:
    """Return the memory of a GPU, the step time and the time of the full run."""
    step = f"{plan['step_s']:.3g} s" if plan["step_s"] < 100 else f"{plan['step_s']:,.0f} s"
    return [shown_bytes(plan["peak_bytes"]), step, _hours(plan)]


def _hours(plan: Mapping[str, Any]) -> str:
    if not plan["fits"]:
        return "does not fit"
    return f"{plan['hours']:.1f} h" if plan["hours"] < 1000 else f"{plan['hours'] / 24:,.0f} days"


def enlarged_digits(folder: Path) -> Path:
    """Write some of scikit-learn's digits as image files of 112x112 pixels, unless they exist."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    for label in range(CLASSES):
        images = digits.images[digits.target == label][: TRAIN + VALID]
        for number, pixels in enumerate(images):
            part = "train" if number < TRAIN else "val"
            file = folder / part / str(label) / f"{number}.png"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                grey = Image.fromarray((pixels * 255 / 16).astype("uint8"))
                grey.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file)
    return folder
