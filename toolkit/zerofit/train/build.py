"""Building the model the way its layout needs it: whole, under zero.Init, or only one pipeline stage's layers."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero import Init
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import Tensor, nn

from zerofit.check.dotted import get
from zerofit.models.batch_norm import BatchNorm, batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import ModelSource, source_of
from zerofit.models.deferred import Stored
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs
from zerofit.models.pretrained_notes import drawn_head
from zerofit.models.sync_batch_norm import synchronize_batch_norms
from zerofit.spec.run_folder import Job
from zerofit.train.process_group import rank_device


def build_whole(job: Job, inputs: Inputs | None) -> nn.Module:
    """Build the whole model as the engine would store it; a transformers model at ZeRO stage 3 is partitioned instead.

    Both happen as it is built. The weights are a function of the seed alone, whatever the layout.
    """
    run, source = job.run, source_of(job.run)
    torch.manual_seed(run.seed)
    with _partitioned_from_birth(source, job.ds_config, inputs) as partitioned:
        stored = None if partitioned else stored_by_engine(job)
        if stored and _is_quantized(source) and job.layout.zero_stage == 3:
            stored = replace(stored, divide=_divider(job.ds_config))
        checkpointing = run.activation_checkpointing
        model = build(source, inputs, dict(run.model_args), checkpointing=checkpointing, stored=stored)
    if partitioned:  # its parameters have methods that hold them: one that another was tied in place of is a cycle
        gc.collect()
    if stored and stored.divide:
        _store_others(model, stored)
    for parameter in model.parameters():
        _as_vector(parameter)
    return prepare_batch_norms(job, model)


def prepare_batch_norms(job: Job, model: nn.Module) -> nn.Module:
    """Let the batch norms of a built model see all ranks' samples, where asked to, and compute in float32."""
    if job.run.sync_batch_norm:
        synchronize_batch_norms(model)
    elif job.precision != "fp32":
        batch_norm_in_fp32(model)
    return model


def build_on_meta(job: Job, inputs: Inputs | None, checkpointing: bool = False) -> Any:
    """Build the run's model without any memory."""
    with torch.device("meta"):
        return build(source_of(job.run), inputs, dict(job.run.model_args), checkpointing=checkpointing)


def build_from_seed(job: Job, inputs: Inputs | None, stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Build the run's model with its initial weights, of which those named in `keep` are stored (None: all)."""
    torch.manual_seed(job.run.seed)
    return build(source_of(job.run), inputs, dict(job.run.model_args), stored=stored, keep=keep)


def _as_vector(parameter: nn.Parameter) -> None:
    """Give a number (the temperature of CLIP) one dimension: DeepSpeed broadcasts parameters as bytes, and fails on it.

    (runtime/engine.py:2054, runtime/zero/partition_parameters.py:1204)
    """
    if not parameter.dim():
        parameter.data = parameter.data.reshape(1)


def stored_by_engine(job: Job) -> Stored:
    """Return how the engine will store parameters: it casts and moves them (engine.py: _configure_distributed_model).

    Where DeepSpeed makes the slices of tensor parallel ranks itself, it takes them from the model in host memory.
    """
    dtype = DTYPES[job.precision] if get(job.ds_config, f"{job.precision}.enabled") else torch.float32
    by_deepspeed = job.layout.tp > 1 and not job.layout.combined
    return Stored(dtype=dtype, device=torch.device("cpu") if by_deepspeed else rank_device())


@contextmanager
def _partitioned_from_birth(source: ModelSource, ds_config: dict[str, Any], inputs: Inputs | None) -> Iterator[bool]:
    """Let transformers enter zero.Init, as it does by itself while an HfDeepSpeedConfig of stage 3 is alive.

    Gives whether it does.
    """
    zero = ds_config.get("zero_optimization", {})
    if source.family != "transformers" or zero.get("stage", 0) != 3 or zero.get("zenflow") is not None:
        yield False  # ZenFlow transposes whole weights, and leaves partitioned ones as they are
        return
    if _is_quantized(source):
        yield False  # bitsandbytes quantises whole weights, each of which is divided then
        return
    if drawn_head(source, inputs):
        yield False  # transformers reads no folder into partitions of another shape (integrations/deepspeed.py)
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    def zero_init_param(self: Init, parameter: nn.Parameter) -> None:
        _as_vector(parameter)
        original(self, parameter)

    original: Any = Init._zero_init_param
    alive = HfDeepSpeedConfig(ds_config)  # transformers itself keeps no more than a weak reference
    try:
        with patch.object(Init, "_zero_init_param", zero_init_param):
            yield True
    finally:
        unset_hf_deepspeed_config()
        del alive


def _is_quantized(source: ModelSource) -> bool:
    return source.partial is not None and source.partial.quantization is not None


def _divider(ds_config: dict[str, Any]) -> Callable[[nn.Parameter], None]:
    """Return how DeepSpeed's engine divides each parameter of a whole model among ranks, to be called before."""
    nothing = nn.Module()  # with a module it takes its own linear function for all, as the engine has it
    return Init(module=nothing, config_dict_or_path=ds_config)._zero_init_param


def _store_others(model: nn.Module, stored: Stored) -> None:
    """Cast and move what is not divided: the engine leaves a model of which something is divided as it is.

    (runtime/engine.py, _configure_distributed_model)
    """
    for parameter in model.parameters():
        if not is_zero_param(parameter):
            parameter.data = stored.store(parameter.data)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(stored.device)


def batch_norm_in_fp32(model: nn.Module) -> None:
    """Give every batch norm float32 statistics and weights, beside inputs and outputs of bf16 or fp16.

    Running statistics in low precision would stop moving: a step of the mean is below half an ulp. The kernels of both
    devices compute in float32 inside, so that what backward keeps is the input as it came. They refuse weights of
    another type than the statistics: DeepSpeed's low-precision ones (one number a channel) are cast in each call.
    """

    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            None if self.weight is None else self.weight.float(),
            None if self.bias is None else self.bias.float(),
            self.training or self.running_mean is None,
            momentum or 0.0,
            self.eps,
        )

    for norm in batch_norms(model):
        if not isinstance(norm, nn.SyncBatchNorm):
            norm.forward = types.MethodType(forward, norm)
