"""Document 000: ways to train in parallel, DataParallel to DeepSpeed, and how long large trainings take."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from zerofit.app.documents.bench import Bench
from zerofit.app.documents.forecast import planned
from zerofit.models.presets import NAMED
from zerofit.report.documents import Evidence, Figure, TeachingDocument
from zerofit.spec.units import shown_bytes

WAYS = ["data-parallel-threads", "threads", "ddp", "amp-fp16", "horovod", "zero2"]
CLASSES, SIDE, BATCH, EPOCHS = 10, 112, 32, 10
TRAIN, VALID = 8, 10  # images of a class
STEPS = EPOCHS * CLASSES * TRAIN // BATCH
IMAGES, PASSES = 1_400_000, 90  # of ResNet-50's training
GPU = "v100-16gb"
WAYS_TEXT = """80 of scikit-learn's digits, enlarged to 3x112x112 and randomly cropped and flipped, as every
image folder is. One device is one CPU rank with one core; the other strategies split the batch of 32 over two ranks.
`torch.nn.DataParallel` needs two CUDA devices: `threads` does the same by hand on a CPU, and the next table
forecasts it for GPUs. Autocast with GradScaler is `amp-fp16`, DeepSpeed is `zero2`."""
ROUNDING = """If a strategy splits the batch, its weights differ from those of one device only by rounding: sums have
another order, and training amplifies the difference. `amp-fp16` computes products in 16 bits."""
THREADS_TEXT = """torch's own `nn.DataParallel` runs on fake tensors for two GPUs, and zerofit notes what every
operation allocates on each of them and what they copy to each other in one step, for the batch of both GPUs
together. The last column is what a rank of DistributedDataParallel sends with a ring all-reduce of 2 ranks: its
gradients once."""
THREADS_NOTES = [
    "The first GPU stores the inputs of both, all outputs and the optimizer's states.",
    "At every step it sends all weights and half of the inputs, and receives all gradients.",
    "DistributedDataParallel keeps the weights on each GPU and sends only gradients, during backward.",
]
LARGE_TEXT = """Forecasts by `zerofit plan`, which ranks the layouts of the engine; the best one is shown. The
document's GPU is not given, so ResNet-50 is planned for V100. 300 billion tokens and 3.1 million tokens a step
are those of Brown et al. (2020)."""


def document(bench: Bench) -> TeachingDocument:
    """Train the document's network with each of its strategies, and forecast the experiments that need GPUs."""
    costs, large = _data_parallel(bench), _large_trainings(bench)
    small = costs["simplecnn-112"]
    one, eight = large["ResNet-50, 1 GPU"], large["ResNet-50, 8 GPUs"]
    gpt = NAMED["gpt-3-175b"].parameters
    uneven = f"{shown_bytes(small['peak'][0])} against {shown_bytes(small['peak'][1])}"
    fewer = "No figure of the document is known here; ours are forecasts for V100 in fp16."
    return TeachingDocument(
        number="000",
        title="ways to train in parallel",
        network="`simplecnn-112`: 64 convolutions 3x3, a 2x2 max-pooling, linear to 10 classes, on 3x112x112 images.",
        experiment="Batch 32, SGD with learning rate 0.001 and momentum 0.9, 10 epochs.",
        figures=[
            Figure(name="parameters", theirs="2,008,842", ours=f"{NAMED['simplecnn-112'].parameters:,}"),
            Figure(
                name="DataParallel: memory of the first GPU against the second",
                theirs="a drawback",
                ours=uneven,
                why="Forecast of tensors for two GPUs, without kernels' workspaces.",
            ),
            Figure(
                name="DataParallel: sent by the first GPU in a step",
                theirs="a drawback",
                ours=f"{shown_bytes(small['sent'][0])}, and {shown_bytes(small['received'][0])} received",
                why="Forecast.",
            ),
            Figure(name="ResNet-50, 1.4 million images, 90 epochs, 1 GPU", theirs="-", ours=_hours(one), why=fewer),
            Figure(name="the same on 8 GPUs", theirs="-", ours=_hours(eight), why=fewer),
            Figure(
                name="GPT-3's parameters",
                theirs="175 B",
                ours=f"{gpt / 1e9:.1f} B (`gpt-3-175b`)",
                why="Counted with the word and position embeddings; 175 is rounded.",
            ),
        ],
        evidence=[_ways(bench), _data_parallel_table(costs), _large_table(large)],
    )


def _data_parallel(bench: Bench) -> dict[str, Any]:
    """Simulate DataParallel on two GPUs with the document's batch, and with a larger network."""
    from zerofit.models.build import build
    from zerofit.models.catalog import find
    from zerofit.models.inputs import ImageInputs
    from zerofit.simulate.costs.data_parallel import data_parallel_costs

    def simulate(model: str, inputs: ImageInputs, batch: int) -> dict[str, Any]:
        costs = data_parallel_costs(partial(build, find(model), inputs, {}), inputs, batch)
        return {"batch": batch, **asdict(costs)}

    def both() -> dict[str, Any]:
        images = ImageInputs(channels=3, size=224, classes=1000)
        small = simulate("simplecnn-112", ImageInputs(channels=3, size=SIDE, classes=CLASSES), BATCH)
        return {"simplecnn-112": small, "resnet50": simulate("resnet50", images, BATCH)}

    return bench.keep("000-data-parallel", both)


def _data_parallel_table(costs: dict[str, Any]) -> Evidence:
    rows = []
    for model, found in costs.items():
        for gpu in range(2):
            sizes = [found[name][gpu] for name in ("peak", "sent", "received")]
            rows.append(
                [model, str(found["batch"]), str(gpu), *map(shown_bytes, [*sizes, 4 * NAMED[model].parameters])]
            )
    return Evidence(
        title="DataParallel's two drawbacks",
        text=THREADS_TEXT,
        columns=["network", "batch", "GPU", "peak of tensors", "sent a step", "received a step", "DDP sends a step"],
        rows=rows,
        notes=THREADS_NOTES,
        figures=costs,
    )


def _large_trainings(bench: Bench) -> dict[str, Any]:
    """Plan ResNet-50 and GPT-3."""
    found = {}
    for gpus in (1, 8):
        work = {"global_batch": 256, "samples": IMAGES, "epochs": PASSES}
        name = f"ResNet-50, {gpus} GPU{'s' if gpus > 1 else ''}"
        found[name] = planned(bench, f"000-resnet50-{gpus}", "resnet50", GPU, gpus, **work)
    for nodes in (1, 4, 128):
        work = {"global_batch": 1536, "seq_len": 2048, "tokens": "300B"}
        found[f"GPT-3, {8 * nodes} GPUs"] = planned(
            bench, f"000-gpt-3-{nodes}", "gpt-3-175b", "a100-80gb", 8, nodes, **work
        )
    return found


def _large_table(large: dict[str, Any]) -> Evidence:
    rows = []
    for name, found in large.items():
        step = f"{found['step_s']:.3g} s" if found["step_s"] < 100 else f"{found['step_s']:,.0f} s"
        figures = [shown_bytes(found["peak_bytes"]), step, _hours(found)]
        rows.append([name, found["layout"], *figures, f"`{found['command']}`"])
    columns = ["training", "best layout", "memory of a GPU", "step", "time", "command"]
    return Evidence(title="Hours of large trainings", text=LARGE_TEXT, columns=columns, rows=rows, figures=large)


def _hours(found: dict[str, Any]) -> str:
    if not found["fits"]:
        return "does not fit"
    return f"{found['hours']:.1f} h" if found["hours"] < 1000 else f"{found['hours'] / 24:,.0f} days"


def _ways(bench: Bench) -> Evidence:
    """Train in each way: each sees the same images in the same order."""
    images = enlarged_digits(bench.folder / "digits-112")
    done = bench.compare(
        "000-ways",
        "simplecnn-112",
        "strategies",
        data=f"imagefolder:{images}",
        image_size=SIDE,
        strategies=WAYS,
        ranks=2,
        global_batch=BATCH,
        steps=STEPS,
        lr=0.001,
    )
    return bench.evidence(done, "The ways, 10 epochs each", text=WAYS_TEXT, notes=[ROUNDING])


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
