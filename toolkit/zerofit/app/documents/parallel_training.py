"""Document 000: ways to train in parallel, DataParallel to DeepSpeed, and how long large trainings take."""

from __future__ import annotations

from pathlib import Path

from zerofit.app.documents.bench import Bench
from zerofit.report.documents import Evidence, Figure, TeachingDocument

WAYS = ["data-parallel-threads", "threads", "ddp", "amp-fp16", "horovod", "zero2"]
CLASSES, SIDE, BATCH, EPOCHS = 10, 112, 32, 10
TRAIN, VALID = 16, 10  # images of a class
STEPS = EPOCHS * CLASSES * TRAIN // BATCH


def document(bench: Bench) -> TeachingDocument:
    """Train its network in each of its ways, and forecast what needs GPUs."""
    return TeachingDocument(
        number="000",
        title="ways to train in parallel",
        network="`simplecnn-112`: 64 convolutions 3x3, a 2x2 max-pooling, linear to 10 classes, on 3x112x112 images.",
        experiment="Batch 32, SGD with learning rate 0.001 and momentum 0.9, 10 epochs.",
        figures=[Figure(name="parameters", theirs="2,008,842", ours="2,008,842")],
        evidence=[_ways(bench)],
    )


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
    return bench.evidence(done, "The ways, 10 epochs each")


def enlarged_digits(folder: Path) -> Path:
    """Write some of scikit-learn's digits as image files of 112x112 pixels, unless they are there."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
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
