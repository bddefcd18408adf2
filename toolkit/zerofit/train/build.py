"""Build the model for its layout: in full, or partitioned by zero.Init while it is built."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero import Init
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import Tensor, nn

from zerofit.check.dotted import get
from zerofit.features.checkpointing import Checkpointing
from zerofit.models.batch_norm import BatchNorm, batch_norms, synchronize_batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import ModelSource, source_of
from zerofit.models.deferred import Stored
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs
from zerofit.models.pretrained_notes import drawn_head
from zerofit.spec.run_folder import Job
from zerofit.train.process_group import rank_device


def build_whole(job: Job, inputs: Inputs | None) -> nn.Module:
    """Build the model as the engine stores it: in full or, at ZeRO-3, partitioned if possible.

    Parameters are stored and partitioned while the model is built. The weights depend on the seed alone, not on the
    layout.
    """
    run, source = job.run, source_of(job.run)
    torch.manual_seed(run.seed)
    with _partitioned_from_birth(source, job.ds_config, inputs) as partitioned:
        stored = None if partitioned else stored_by_engine(job)
        if stored and _is_quantized(source) and job.layout.zero_stage == 3:
            # The engine partitions parameters with this method. Like the engine, Init replaces the linear function
            # if it gets a module.
            init = Init(module=nn.Module(), config_dict_or_path=job.ds_config)
            stored = replace(stored, divide=init._zero_init_param)
        checkpointing = run.activation_checkpointing
        model = build(source, inputs, dict(run.model_args), checkpointing=checkpointing, stored=stored)
    if partitioned:  # partitioned parameters are in reference cycles, so those replaced by ties remain
        gc.collect()
    if stored and stored.divide:
        # If any parameter is partitioned, the engine does not cast or move the other tensors (runtime/engine.py,
        # _configure_distributed_model).
        for parameter in model.parameters():
            if not is_zero_param(parameter):
                parameter.data = stored.store(parameter.data)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else buffer.to(stored.device)
    for parameter in model.parameters():
        _as_vector(parameter)
    return prepare_batch_norms(job, model)


def prepare_batch_norms(job: Job, model: nn.Module) -> nn.Module:
    """Give batch norms statistics over all ranks or, in 16 bits, compute them in float32."""
    if job.run.sync_batch_norm:
        synchronize_batch_norms(model)
    elif job.precision != "fp32":
        batch_norm_in_fp32(model)
    return model


def build_on_meta(job: Job, inputs: Inputs | None, checkpointing: Checkpointing = False) -> nn.Module:
    """Build the run's model on the meta device."""
    with torch.device("meta"):
        return build(source_of(job.run), inputs, dict(job.run.model_args), checkpointing=checkpointing)


def build_from_seed(job: Job, inputs: Inputs | None, stored: Stored, keep: set[str] | None = None) -> nn.Module:
    """Build the run's model with its initial weights. Store only those in `keep` (None: all)."""
    torch.manual_seed(job.run.seed)
    return build(source_of(job.run), inputs, dict(job.run.model_args), stored=stored, keep=keep)


def _as_vector(parameter: nn.Parameter) -> None:
    """Give a scalar parameter, such as CLIP's temperature, one dimension."""
    # DeepSpeed's broadcast fails on scalars (runtime/engine.py:2054, runtime/zero/partition_parameters.py:1204)
    if not parameter.dim():
        parameter.data = parameter.data.reshape(1)


def stored_by_engine(job: Job) -> Stored:
    """Return the dtype and the device with which the engine stores parameters."""
    dtype = DTYPES[job.precision] if get(job.ds_config, f"{job.precision}.enabled") else torch.float32
    # a model that DeepSpeed slices for tensor parallel ranks stays in host memory (engine.py,
    # _configure_distributed_model)
    sliced_by_deepspeed = job.layout.tp > 1 and not job.layout.combined
    return Stored(dtype=dtype, device=torch.device("cpu") if sliced_by_deepspeed else rank_device())


@contextmanager
def _partitioned_from_birth(source: ModelSource, ds_config: dict[str, object], inputs: Inputs | None) -> Iterator[bool]:
    """Make transformers build the model under zero.Init, if possible. Yield whether it does."""
    zero: dict[str, object] = get(ds_config, "zero_optimization", {})
    if (
        (source.family != "transformers" or zero.get("stage", 0) != 3)
        or zero.get("zenflow") is not None  # ZenFlow transposes only weights that are not partitioned
        or _is_quantized(source)  # bitsandbytes quantizes full weights, which are partitioned afterwards
        # transformers cannot load a folder into partitions of another shape (integrations/deepspeed.py)
        or drawn_head(source, inputs)
    ):
        yield False
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    def zero_init_param(self: Init, parameter: nn.Parameter) -> None:
        _as_vector(parameter)
        original(self, parameter)

    original: Any = Init._zero_init_param
    # transformers enters zero.Init while a config of stage 3 is alive, and keeps only a weak reference to it
    alive = HfDeepSpeedConfig(ds_config)
    try:
        with patch.object(Init, "_zero_init_param", zero_init_param):
            yield True
    finally:
        unset_hf_deepspeed_config()
        del alive


def _is_quantized(source: ModelSource) -> bool:
    return source.partial is not None and source.partial.quantization is not None


# A running mean m moves by momentum x (batch mean - m) per step. In bf16, which has 8 bits of precision, a step of
# less than m / 512 rounds to nothing, so statistics stop well before they are right.
def batch_norm_in_fp32(model: nn.Module) -> None:
    """Give all batch norms float32 statistics and weights, with bf16 or fp16 inputs and outputs."""

    # The kernels of CPUs and GPUs compute in float32, so backward can keep the input in the input's dtype. The kernels
    # need weights in the dtype of the statistics. So DeepSpeed's low-precision weights (one number per channel) are
    # cast in each call.
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
