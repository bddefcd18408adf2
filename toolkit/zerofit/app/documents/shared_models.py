"""Document 003: a small network shared out in each way, and networks of other kinds trained for a few steps."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zerofit.app.comparing.laboratory import Done, flags
from zerofit.app.comparing.rows import StrategyRow
from zerofit.app.documents.bench import Bench
from zerofit.app.training.train import train
from zerofit.models.presets import NAMED
from zerofit.report.documents import Evidence, Figure, TeachingDocument
from zerofit.spec.errors import DoesNotFit, RunFailed
from zerofit.spec.files import read_jsonl
from zerofit.spec.foreign import read_json
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder

NETWORK = "mlp-table"
STEPPED = {"data": "synthetic", "global_batch": 64, "steps": 60, "lr": 0.05, "eval_samples": 1000}
COMMON = {"ranks": 2, "ds_config": "zero2", "save_every": "0", "eval_samples": 200}
SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
SMALL_BERT["vocab_size"] = 512
PIXELS = {"data": "digits", "image_size": 32, "global_batch": 32}
TEXT = {"data": "synthetic", "seq_len": 64, "global_batch": 16}
SLOW = (
    "VGG has so many parameters that a step takes seconds on a CPU, so we trained few steps. Their losses include "
    "dropout."
)
# by the document's name of the network
TRAININGS: dict[str, dict[str, Any]] = {
    "Transformer": {"model": "llama-tiny", **TEXT, "steps": 40},
    "BERT": {"model": "bert-base", "model_args": SMALL_BERT, **TEXT, "steps": 40},
    "VGG": {"model": "vgg11_bn", **PIXELS, "ranks": 1, "steps": 8, "lr": 0.02},  # 0.5 GB of gradients a step on two
    "ResNet": {"model": "resnet18", **PIXELS, "steps": 40},
    "GAN": {
        "model": "dcgan",
        "model_args": {"width": 32},
        "data": "digits",
        "global_batch": 32,
        "epochs": 25,
        "lr": 1e-3,
    },
}


def document(bench: Bench) -> TeachingDocument:
    """Split the document's network in each way; train one network of each other kind with DeepSpeed's engine."""
    halves = bench.compare("003-2-ranks", NETWORK, "strategies", strategies=["model-parallel"], ranks=2, **STEPPED)
    both = bench.compare("003-4-ranks", NETWORK, "strategies", strategies=["ddp", "hybrid"], ranks=4, **STEPPED)
    kept, missing = train_all(bench)
    return TeachingDocument(
        number="003",
        title="data parallel, model parallel, and both",
        network=f"`{NETWORK}`: 10-100-10, two linear layers with ReLU between them.",
        experiment="Data parallel with a world size of 4, model parallel on two devices, both together; a Transformer, "
        "BERT, VGG, ResNet and a GAN with its drawing.",
        figures=[
            Figure(name="parameters", theirs="2,110", ours=f"{NAMED[NETWORK].parameters:,}"),
            Figure(name="world size of data parallel", theirs="4", ours=_of(both, "ddp", lambda row: f"{row.ranks}")),
            Figure(
                name="devices of model parallel",
                theirs="2",
                ours=_of(halves, "model-parallel", lambda row: f"{row.ranks}"),
            ),
            Figure(
                name="both together: largest difference of a weight from one device's",
                theirs="-",
                ours=_of(both, "hybrid", lambda row: f"{row.max_weight_difference:.1e}"),
            ),
        ],
        evidence=[
            bench.evidence(halves, "Model parallel on two ranks"),
            bench.evidence(both, "Data parallel on four ranks, and pairs of ranks that share a model"),
            _kept(bench, kept, missing),
        ],
    )


def train_all(bench: Bench) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return a row for each kind of network, and why others have none."""
    kept, missing = {}, []
    for name in TRAININGS:
        try:
            kept[name] = bench.keep(f"003-{name}", partial(trained, bench, name))
        except (DoesNotFit, RunFailed) as error:  # the next command tries again
            missing.append(f"{name}: {error}")
    return kept, missing


def trained(bench: Bench, name: str) -> dict[str, Any]:
    """Train a network of this kind as `zerofit train` does; return its row. A GAN leaves its drawing."""
    rows = bench.folder / "rows"
    output = rows / f"003-{name}"
    shutil.rmtree(output, ignore_errors=True)  # of a command that was killed
    result = train(Run(**COMMON | TRAININGS[name], output=output))
    folder = RunFolder(output)
    steps = read_jsonl(folder.metrics)
    row = {
        "parameters": read_json(folder.profile)["parameters"],
        "steps": result.steps,
        "loss_before": steps[0]["loss"],
        "loss_after": steps[-1]["loss"],
        "eval": dict(result.eval),
        "seconds": sum(step["step_s"] for step in steps),
    }
    if (output / "drawings.png").exists():
        shutil.copy(output / "drawings.png", drawing(bench))
    shutil.rmtree(output)  # the weights of VGG alone take 0.5 GB
    return row


def drawing(bench: Bench) -> Path:
    """Return the file of the GAN's drawing."""
    return bench.folder.absolute() / "rows" / "003-drawing.png"


def _of(done: Done, strategy: str, show: Callable[[StrategyRow], str]) -> str:
    """Return a figure of a strategy's row, or the row's status if it has none."""
    row = next(row for row in done.compared.rows if row.strategy == strategy)
    return show(row) if row.status == "ok" else row.status


def _kept(bench: Bench, kept: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> Evidence:
    """Return a row for each kind of network, why others have none, and the drawing."""
    rows = [
        [
            name,
            f"`{TRAININGS[name]['model']}`",
            f"{row['parameters']:,}",
            str((COMMON | TRAININGS[name])["ranks"]),
            str(row["steps"]),
            f"{row['loss_before']:.3f}",
            f"{row['loss_after']:.3f}",
            f"{row['eval']['loss']:.3f}",
            f"{row['seconds']:.1f}",
        ]
        for name, row in kept.items()
    ]
    return Evidence(
        title="A network of each kind, trained through DeepSpeed's engine",
        text="ZeRO 2; seconds are for the steps alone. The losses are those of the first step, before any update, "
        "and of the last. A GAN's loss is the sum of both networks' losses, which need not decrease. "
        "The picture is what the GAN draws after its last step.",
        command="\n".join(shlex.join(["zerofit", "train", *flags({**COMMON, **of})]) for of in TRAININGS.values()),
        columns=[
            "kind",
            "model",
            "parameters",
            "ranks",
            "steps",
            "first loss",
            "last loss",
            "validation loss",
            "seconds",
        ],
        rows=rows,
        notes=[SLOW, *missing],
        picture=drawing(bench) if "GAN" in kept else None,
        figures=dict(kept),
    )
