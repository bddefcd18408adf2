"""What cannot go with the habits of image training and with averaged weights, refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerofit.check.dotted import get
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import ModelFacts, is_image
from zerofit.spec.run import Run, flag
from zerofit.spec.run_folder import Layout

IMAGE_FIELDS = ("mixup", "cutmix", "random_erasing", "image_sizes", "sync_batch_norm")  # what only images have
# keys by which master weights are not whole float32 numbers in memory
_APART = (
    "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload",
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
)


def check_averages(run: Run, layout: Layout, config: Mapping[str, Any], problems: Problems) -> None:
    """Check averaged weights against what keeps master weights out of reach."""
    if run.ema is None:
        return
    degrees = {"--tensor-parallel": layout.tp, "--pipeline": layout.pp, "--sequence-parallel": layout.sp}
    for name, degree in (degrees | {"--expert-parallel": layout.ep}).items():
        if degree > 1:
            message = f"--ema with {name} {degree}: averages are kept for data parallel ranks, at ZeRO 0 to 3"
            problems.add("layout", message, f"leave {name} at 1, or --ema out", "--ema")
    apart = [path for path in _APART if get(config, path)]
    apart += ["offload_optimizer.device"] * (get(config, "zero_optimization.offload_optimizer.device") == "nvme")
    for path in apart:
        message = f"--ema with {path}: averages need the master weights in float32, in memory after each step"
        problems.add("layout", message, "leave one of them out", "--ema")


def check_images(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check what is done to images and their targets against the model's kind and the layout."""
    asked = [name for name in IMAGE_FIELDS if getattr(run, name)]
    for name in asked if not is_image(facts.task) else ():
        message = f"{flag(name)}: {run.model} ({facts.task}) is no classifier of images"
        problems.add("conflict", message, "leave it out", flag(name))
    if facts.task == "gan" and run.ema:
        problems.add("conflict", "--ema: a GAN's two networks have no average here", "leave it out", "--ema")
    _check_targets(run, facts, problems)
    if run.image_sizes and run.image_size:
        message = f"--image-sizes {run.image_sizes} and --image-size {run.image_size} are both given"
        problems.add("conflict", message, "the last of --image-sizes is what the model is evaluated at", "--image-size")
    for name, why in {
        "image_sizes": "stages agree on the shape of what they send at the first step",
        "sync_batch_norm": "a stage's batch norms would have to meet those of its replicas alone",
    }.items():
        if layout.pp > 1 and getattr(run, name):
            problems.add("layout", f"{flag(name)} with --pipeline {layout.pp}: {why}", "leave one out", flag(name))


def _check_targets(run: Run, facts: ModelFacts, problems: Problems) -> None:
    """Check what changes the targets against how the loss is computed."""
    mixed = [name for name in ("mixup", "cutmix") if getattr(run, name)]
    for name in [*mixed, *(["label_smoothing"] if run.label_smoothing else [])]:
        if not facts.gives_logits or run.loss == "mse" or (facts.own and run.loss is None):
            message = f"{flag(name)} changes the targets of a cross entropy, which {run.model} is not trained with here"
            hint = "leave it out" + (", or give --loss cross-entropy" if facts.own and run.loss is None else "")
            problems.add("loss", message, hint, flag(name))
        if run.loss_chunk:
            message = f"{flag(name)} with --loss-chunk: the loss in chunks knows one class a target"
            problems.add("loss", message, "leave --loss-chunk out: images have few targets", "--loss-chunk")
    for name in [*mixed, *(["random_erasing"] if run.random_erasing else [])]:
        if facts.task == "segmentation":
            message = f"{flag(name)}: each pixel has a class of its own, which does not move with the image"
            hint = "leave it out; crops and flips are drawn for image and mask together"
            problems.add("conflict", message, hint, flag(name))
