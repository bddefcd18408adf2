"""Document 003: a small network shared out in each way, and networks of other kinds trained for a few steps."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.documents.document import DocumentRun
from benchmarks.documents.page import TeachingDocument
from zerofit.app.comparing.laboratory import Done, Evidence, flags
from zerofit.app.comparing.rows import StrategyRow
from zerofit.app.training.train import train
from zerofit.spec.errors import DoesNotFit, RunFailed
from zerofit.spec.files import number_in, read_jsonl
from zerofit.spec.foreign import read_json
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder


def repeat(document: DocumentRun) -> TeachingDocument:
    """Split the document's network in each way; train one network of each other kind with DeepSpeed's engine."""
    halves, both = document.compare("2-ranks"), document.compare("4-ranks")
    rows, missing = train_all(document)
    values = {
        "ddp_ranks": _of(both, "ddp", lambda row: str(row.ranks)),
        "model_parallel_ranks": _of(halves, "model-parallel", lambda row: str(row.ranks)),
        "hybrid_difference": _of(both, "hybrid", lambda row: f"{row.max_weight_difference:.1e}"),
    }
    evidence = [document.comparison_table("2-ranks", halves), document.comparison_table("4-ranks", both)]
    return document.page(values, [*evidence, _training_table(document, rows, missing)])


def _of(done: Done, strategy: str, show: Callable[[StrategyRow], str]) -> str:
    """Return a value from a strategy's row, or the row's status if that is not "ok"."""
    row = next(row for row in done.compared.rows if row.strategy == strategy)
    return show(row) if row.status == "ok" else row.status


def train_all(document: DocumentRun) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return a row for each kind of network, and the reason for each missing row."""
    rows, missing = {}, []
    for name in document.entry["trainings"]:
        try:
            rows[name] = document.keep(name, partial(trained, document, name))
        except (DoesNotFit, RunFailed) as error:  # the next command tries again
            missing.append(f"{name}: {error}")
    return rows, missing


def trained(document: DocumentRun, name: str) -> dict[str, Any]:
    """Train a network of this kind like `zerofit train`, and return its row. A GAN also writes a drawing."""
    output = document.file(name)
    shutil.rmtree(output, ignore_errors=True)  # left by a command that was killed
    result = train(Run(**document.entry["trainings"][name], output=output))
    folder = RunFolder(output)
    steps = read_jsonl(folder.metrics)
    row = {
        "parameters": read_json(folder.profile)["parameters"],
        "steps": result.steps,
        "loss_before": steps[0]["loss"],
        "loss_after": steps[-1]["loss"],
        "eval": dict(result.eval),
        "seconds": sum(number_in(step, "step_s") or 0.0 for step in steps),
    }
    if (output / "drawings.png").exists():
        shutil.copy(output / "drawings.png", drawing(document))
    shutil.rmtree(output)  # the weights of VGG alone take 0.5 GB
    return row


def drawing(document: DocumentRun) -> Path:
    """Return the file of the GAN's drawing."""
    return document.file("drawing.png")


def _training_table(document: DocumentRun, rows: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> Evidence:
    """Return a row for each kind of network, the reasons for missing rows, and the drawing."""
    trainings = document.entry["trainings"]
    cells = []
    for name, row in rows.items():
        losses = [row["loss_before"], row["loss_after"], row["eval"]["loss"]]
        first = [name, f"`{trainings[name]['model']}`", f"{row['parameters']:,}", str(trainings[name]["ranks"])]
        cells.append([*first, str(row["steps"]), *(f"{loss:.3f}" for loss in losses), f"{row['seconds']:.1f}"])
    commands = [shlex.join(["zerofit", "train", *flags(options)]) for options in trainings.values()]
    picture = drawing(document) if "GAN" in rows else None
    content = {"rows": cells, "command": "\n".join(commands), "picture": picture, "figures": dict(rows)}
    return document.table("trainings", notes=missing, **content)
