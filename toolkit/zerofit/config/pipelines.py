"""Pipelines: checks of the schedule, the layout, the batch and the DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Mapping

from zerofit.check.dotted import get
from zerofit.spec.errors import Problems
from zerofit.spec.mesh import pipeline_parts
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout

PIPE_PARTITIONED = ("pipe_partitioned", "grad_partitioned")  # keys of "pipeline" that split activations


def most_stages(run: Run, ranks: int, layers: int | None) -> int:
    """Return the number of stages for `--pipeline auto`.

    It is the ranks divided by the tensor and sequence degrees. If the model has too few layers, the number is smaller,
    and the other ranks are data parallel. `layers`: None if unknown.
    """
    most = max(1, ranks // (run.tensor_parallel * run.sequence_parallel))
    # stages divide the ranks, so that all stages have equally many data parallel replicas
    for stages in range(most, 1, -1):
        if most % stages == 0 and (layers is None or pipeline_parts(stages, run.pipeline_schedule) <= layers):
            return stages
    return 1


def check_schedule(run: Run, layout: Layout, config: Mapping[str, object], problems: Problems) -> None:
    """Check the requirements of DualPipeV (DeepSpeed 0.19.8, runtime/pipe/dualpipev.py:97-104).

    If `run.gradient_accumulation_steps` is None, it counts as 1.
    """
    if run.pipeline_schedule != "dualpipev":
        return
    asked, place = "--pipeline-schedule dualpipev", "--pipeline-schedule"
    if layout.pp == 1:
        message = f"{asked} needs a pipeline, but --pipeline is 1"
        problems.add("layout", message, "use --pipeline 2 or more, or leave the schedule out", place)
        return
    if layout.zero_stage == 0:
        message = f"{asked} at ZeRO stage 0 is not supported: only stage 1 was verified against training on one device"
        problems.add("layout", message, "use --ds-config pipeline (stage 1)", "zero_optimization.stage")
    least, steps = pipeline_parts(layout.pp, run.pipeline_schedule), run.gradient_accumulation_steps or 1
    if steps < least:
        problems.add(
            "layout",
            f"{asked} with {steps} gradient accumulation steps: {layout.pp} stages have {least} parts and need at "
            f"least {least} micro batches",
            f"use --gradient-accumulation-steps {least} or more (and a smaller --micro-batch)",
            "--gradient-accumulation-steps",
        )
    for key in PIPE_PARTITIONED:
        if layout.tp > 1 and get(config, f"pipeline.{key}") is True:
            message = f"pipeline.{key} with {asked}: stages send full activations in this schedule"
            problems.add("layout", message, "remove the key", f"pipeline.{key}")
    if run.compile:
        message = f"--compile with {asked} is not supported: it was not verified against training on one device"
        problems.add("layout", message, "leave one of them out", "--compile")


def check_layers(run: Run, layout: Layout, facts: ModelFacts, problems: Problems) -> None:
    """Check that each part of a pipeline has a layer."""
    parts = pipeline_parts(layout.pp, run.pipeline_schedule)
    if layout.pp == 1 or facts.layers is None or parts <= facts.layers:
        return
    # DualPipeV folds the layers into a V: each stage has two parts, one of each half of the model.
    parts_per_stage = parts // layout.pp
    needs = f"{parts} layers"
    if parts_per_stage > 1:
        needs += " (two per stage with --pipeline-schedule dualpipev)"
    message = f"--pipeline {layout.pp} needs at least {needs}, but {run.model} has {facts.layers}"
    fewer = facts.layers // parts_per_stage
    hint = f"use --pipeline {fewer} or less" if fewer > 1 or parts_per_stage == 1 else "leave --pipeline-schedule out"
    problems.add("layout", message, hint, "--pipeline")
