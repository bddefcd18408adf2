"""The activation that a pipeline stage gets from the one before it, which a single simulated rank cannot receive."""

from __future__ import annotations

from typing import Any

import torch

from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs
from zerofit.models.layers import as_layers
from zerofit.train.build import example
from zerofit.train.pipeline import PipelineTrainer


def set_stage_input_shape(driver: PipelineTrainer, inputs: Inputs) -> None:
    """Give the stage's engine the shape that the stage before it would send.

    DeepSpeed sends it as numbers ahead of the first activation (runtime/pipe/engine.py, `_recv_tensor_meta`), which are
    zeros in a process group that sends nothing.
    """
    engine: Any = driver.engine
    shape, dtype = _input_of(driver, inputs)

    def received(send_stage: int) -> Any:
        return engine._allocate_or_extend_buffers(0, list(shape), dtype)

    engine._recv_tensor_meta = received


@torch.no_grad()
def _input_of(driver: PipelineTrainer, inputs: Inputs) -> tuple[torch.Size, torch.dtype]:
    """Return shape and type of the activation that enters the stage, by running the layers before it on meta.

    They are built once more, since the driver's may share weights with layers of this stage.
    """
    run, dtype = driver.job.run, DTYPES[driver.job.precision]
    with torch.device("meta"):
        model = build(find(run.model), inputs, dict(run.model_args)).to(dtype)
        x = example(inputs, driver.job.batch.micro)
    x = x.to(dtype) if x.is_floating_point() else x
    for layer in as_layers(model)[: driver.first_layer]:
        x = layer.module(x)
    return x.shape, x.dtype
