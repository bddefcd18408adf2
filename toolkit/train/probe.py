"""What a model costs, read off it on the meta device: no memory, no download, a second or two."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from zerofit.models.build import build, check_forward, forward_logits, max_positions, parameter_count
from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.inputs import Inputs
from zerofit.models.layers import as_layers
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.facts import ModelFacts
from zerofit.spec.run import RunSpec
from zerofit.train.build import example


def probe(source: ModelSource, inputs: Inputs, run: RunSpec) -> ModelFacts:
    """The facts of a model for these inputs. Raises UserError where model and data do not go together."""
    try:
        with torch.device("meta"):
            model = build(source, inputs, dict(run.model_args))
        if source.task != "custom":
            with _no_data():
                check_forward(model, source, inputs)
        layers = _layer_count(model, needed=run.pipeline > 1)
    except ModelError as error:
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")) from None
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    largest = max(p.numel() for p in model.parameters())
    return ModelFacts(
        task=source.task,
        parameters=parameter_count(model),
        largest_parameter=largest,
        hidden_size=getattr(config, "hidden_size", None) or math.isqrt(largest),
        forward_flops=_forward_flops(model, source, inputs),
        attention_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        max_positions=max_positions(config) if config is not None and source.task != "image" else None,
        model_type=getattr(config, "model_type", None),
        layers=layers,
        has_batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
    )


def _layer_count(model: nn.Module, needed: bool) -> int | None:
    try:
        return len(as_layers(model))
    except ModelError:
        if needed:
            raise
        return None


def _forward_flops(model: nn.Module, source: ModelSource, inputs: Inputs) -> int | None:
    """Multiply-adds times two of one sample's forward, counted op by op by torch's own counter."""
    if source.task in ("custom", "gan"):
        return None
    # in bf16, since grouped matrix products (mixtures of experts) have no other type on meta; FLOPs are the same
    x = example(inputs, 1).to("meta")
    x = x.bfloat16() if x.is_floating_point() else x
    counter = FlopCounterMode(display=False)
    with _no_data(), counter, torch.no_grad():
        forward_logits(model.bfloat16().eval(), x)
    return counter.get_total_flops() or None


def _no_data() -> FakeTensorMode:
    """transformers asks masks for their values, which meta tensors refuse; on fake ones it sees that there are none."""
    return FakeTensorMode(allow_non_fake_inputs=True)
