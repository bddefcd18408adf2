"""How much the averaged gradient varies, by the number of devices: measured, and by the formula (docs/formulas.md).

python benchmarks/gradient_variance.py [--draws 400]

LeNet on scikit-learn's digits as it is drawn, 16 samples a device, in float64 on one process: what is averaged is what
an all-reduce would average. A draw takes the samples of one step without putting any back.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_json
from zerofit.spec.run import Run

OUT = Path(__file__).parent / "results" / "gradient-variance"
DEVICES, SAMPLES = (1, 2, 4, 8, 16, 32), 16
AT_ONCE = 100  # samples, whose gradients are taken together


def main() -> None:
    """Measure, write variance.json and draw variance.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=400, help="steps for each number of devices")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    each = sample_gradients()
    rows = [row(each, devices, asked.draws) for devices in DEVICES]
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {"model": "lenet", "samples": len(each), "draws": asked.draws}
    write_json(asked.out / "variance.json", {**about, "rows": rows})
    draw(rows, asked.out / "variance.png")
    for one in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in one.items()))


def sample_gradients() -> Tensor:
    """Return the gradient of each training sample's loss, (samples, parameters) in float64."""
    data = open_data(Run(data="digits"), "image", None, Reporter())
    torch.manual_seed(0)
    model: Any = build(find("lenet"), data.inputs, {}).double()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x[None],)), label[None])

    found = []
    for first in range(0, len(data.train), AT_ONCE):
        some = range(first, min(first + AT_ONCE, len(data.train)))
        batch = data.train.batch(some, some)
        each = vmap(grad(loss), (None, 0, 0))(weights, batch["inputs"].double(), batch["labels"])
        found.append(torch.cat([one.flatten(1) for one in each.values()], dim=1))
    return torch.cat(found)


def row(each: Tensor, devices: int, draws: int) -> dict[str, float]:
    """Return the variance of a step's gradient, the sum over all parameters: measured over draws, and expected."""
    population, taken = len(each), devices * SAMPLES
    generator, mean = torch.Generator().manual_seed(devices), each.mean(0)
    one = (each - mean).square().sum(1).mean().item()
    measured = 0.0
    for _ in range(draws):
        shares = torch.randperm(population, generator=generator)[:taken].chunk(devices)
        averaged = torch.stack([each[share].mean(0) for share in shares]).mean(0)
        measured += (averaged - mean).square().sum().item() / draws
    finite = (population - taken) / (population - 1)
    return {"devices": devices, "measured": measured, "replaced": one / taken, "expected": one / taken * finite}


def draw(rows: list[dict[str, float]], file: Path) -> None:
    """Draw variance against devices, both in powers of two."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    devices = [one["devices"] for one in rows]
    axes.plot(devices, [one["replaced"] for one in rows], "--", color="0.6", label="one sample's / n")
    axes.plot(devices, [one["expected"] for one in rows], color="0.3", label="one sample's / n x (M - n) / (M - 1)")
    axes.plot(devices, [one["measured"] for one in rows], "o", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.set_xlabel(f"devices, {SAMPLES} samples each")
    axes.set_ylabel("variance of the averaged gradient")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
