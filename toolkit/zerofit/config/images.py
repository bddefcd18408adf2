"""Refuses combinations that image augmentation or averaged weights do not support."""

from __future__ import annotations

from collections.abc import Mapping

from zerofit.check.dotted import get
from zerofit.features.zero import features_on
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ModelFacts, is_image
from zerofit.spec.run import Run, flag
from zerofit.spec.run_folder import Layout

IMAGE_FIELDS = ("mixup", "cutmix", "random_erasing", "image_sizes", "sync_batch_norm")  # only for images


def check_averages(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check that the layout and the DeepSpeed JSON allow averaged weights (--ema)."""
    if run.ema is None:
        return
    degrees = {"--tensor-parallel": layout.tp, "--pipeline": layout.pp, "--sequence-parallel": layout.sp}
    for name, degree in (degrees | {"--expert-parallel": layout.ep}).items():
        if degree > 1:
            message = f"--ema with {name} {degree}: averages only work with data parallelism, at ZeRO 0 to 3"
            problems.add("layout", message, f"set {name} to 1, or remove --ema", "--ema")
    apart = [feature.path for feature in features_on(config) if not feature.averaged]
    apart += ["offload_optimizer.device"] * (get(config, "zero_optimization.offload_optimizer.device") == "nvme")
    for path in apart:
        message = f"--ema with {path}: averages need float32 master weights in memory after each step"
        problems.add("layout", message, "leave one of them out", "--ema")


def check_images(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check image augmentation against the model's kind and the layout."""
    # A segmentation model counts as an image model here. `_check_targets` refuses augmentations that would not fit
    # masks.
    asked = [name for name in IMAGE_FIELDS if getattr(run, name)]
    for name in asked if not is_image(facts.task) else ():
        message = f"{flag(name)}: {run.model} ({facts.task}) is not an image classifier"
        problems.add("conflict", message, "leave it out", flag(name))
    if facts.task == "gan" and run.ema:
        problems.add("conflict", "--ema is not supported for a GAN", "leave it out", "--ema")
    _check_targets(run, facts, problems)
    if run.image_sizes and run.image_size:
        message = f"--image-sizes {run.image_sizes} and --image-size {run.image_size} are both given"
        problems.add("conflict", message, "leave --image-size out: evaluation uses the last size", "--image-size")
    for name, why in {
        "image_sizes": "the first step sets the shape of all later messages between stages",
        "sync_batch_norm": "each stage would have to synchronize batch norm among its own replicas",
    }.items():
        if layout.pp > 1 and getattr(run, name):
            problems.add("layout", f"{flag(name)} with --pipeline {layout.pp}: {why}", "leave one out", flag(name))


def _check_targets(run: Run, facts: ModelFacts, problems: Problems) -> None:
    mixed = [name for name in ("mixup", "cutmix") if getattr(run, name)]
    for name in [*mixed, *(["label_smoothing"] if run.label_smoothing else [])]:
        if not facts.gives_logits or run.loss == "mse" or (facts.own and run.loss is None):
            message = f"{flag(name)} needs a cross entropy loss, which {run.model} does not have here"
            hint = "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else "")
            problems.add("loss", message, hint, flag(name))
        if run.loss_chunk:
            message = f"{flag(name)} with --loss-chunk: the chunked loss supports one class per target"
            problems.add("loss", message, "leave --loss-chunk out: images have few targets", "--loss-chunk")
    for name in [*mixed, *(["random_erasing"] if run.random_erasing else [])]:
        if facts.task == "segmentation":
            message = f"{flag(name)}: each pixel has its own class, and this augmentation would not change the mask"
            hint = "leave it out; crops and flips are applied to image and mask together"
            problems.add("conflict", message, hint, flag(name))
