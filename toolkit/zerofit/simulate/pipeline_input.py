"""What a pipeline stage gets from the one before it, which a single simulated rank cannot receive."""

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


def announce_input(driver: PipelineTrainer, inputs: Inputs) -> None:
    """Tell the stage's engine the shape that the stage before it would announce.

    DeepSpeed sends it as numbers ahead of the first activation (runtime/pipe/engine.py, `_recv_tensor_meta`), which are
    zeros in a process group that sends nothing.
    """
    engine = driver.engine
    shape, dtype = _input_of(driver, inputs)

    def received(send_stage: int) -> Any:
        return engine._allocate_or_extend_buffers(0, list(shape), dtype)

    engine._recv_tensor_meta = received


@torch.no_grad()
def _input_of(driver: PipelineTrainer, inputs: Inputs) -> tuple[torch.Size, torch.dtype]:
    """Shape and type of the activation that enters the stage: the layers before it, run on meta.

    They are built once more, since the driver's may share weights with layers of this stage.
    """
    run, dtype = driver.job.run, DTYPES[driver.job.run.precision]
    with torch.device("meta"):
        model = build(find(run.model), inputs, dict(run.model_args)).to(dtype)
        x = example(inputs, driver.job.batch.micro)
    x = x.to(dtype) if x.is_floating_point() else x
    for layer in as_layers(model)[: driver.bounds[driver.place.pp_rank]]:
        x = layer.module(x)
    return x.shape, x.dtype
