"""Split a model over any process group, by transformers' plan, with layers of AutoTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from torch import nn

from zerofit.checkpoint.index import TensorSlice
from zerofit.models.deferred import Stored


# Splitting on the meta device costs no memory and shows which slice of which weight each rank needs. The model is then
# built a second time with weights, and every weight is cut to that slice as soon as it exists.
def build_split(
    shape: nn.Module, group: dist.ProcessGroup, stored: Stored, make: Callable[[Stored], nn.Module]
) -> nn.Module:
    """Split `shape`, a model on the meta device, over the group. Return it with weights.

    `make` builds the same model with weights, and keeps only the slices that its argument `stored` selects.
    """
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    auto = _split(shape, degree, group)
    cuts = {name: slice_of(p, rank) for name, p in shape.named_parameters()}
    slices = {name: cut.take for name, cut in cuts.items() if cut is not None}
    fill(shape, make(replace(stored, slices=slices)), {})
    auto.register_replicated_grad_hooks(shape)  # for the norms of Qwen3's heads
    return shape


def slice_of(p: nn.Parameter, rank: int) -> TensorSlice | None:
    """Return the slice of a parameter on tensor rank `rank`; None if AutoTP has not split it.

    Raises ValueError if DeepSpeed does not record the cut.
    """
    meta = getattr(p, DS_AUTOTP_UC_META, None)
    if not meta or meta["replicated"]:
        return None
    dim, parts = meta["partition_dim"], meta["sub_param_shard_widths"] or [meta["partition_sizes"]]
    if dim is None or parts == [None]:
        raise ValueError("DeepSpeed does not record how it cut a weight for tensor parallelism")
    ranges, offset = [], 0
    for widths in parts:
        ranges.append((offset + sum(widths[:rank]), widths[rank]))
        offset += sum(widths)
    if offset != meta["logical_shape"][dim]:
        raise ValueError(f"the parts of a weight of shape {meta['logical_shape']} add up to {offset} along {dim}")
    return TensorSlice(dim, tuple(ranges))


def _split(model: nn.Module, degree: int, group: dist.ProcessGroup) -> AutoTP:
    """Replace the model's linear layers in place by layers that are split over `group`."""
    # like `DeepSpeedEngine._apply_autotp_partitioning`, which uses a global group (module_inject/auto_tp.py:397)
    set_autotp_mode(training=True)  # otherwise the layers' weights are frozen (module_inject/layers.py:495)
    plan: Any = _get_hf_tp_plan(model)  # every type in TENSOR_PLAN_TYPES has a plan
    specs: Any = TPPlanConverter.convert(plan)
    auto = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=degree, layer_specs=specs),
        model_config=model.config,
        training_mode=True,
    )
    auto.mp_group, auto.mp_size = group, degree
    auto.update_linear_policies()
    auto._replace_module(model)
    return auto


def fill(shape: nn.Module, weights: nn.Module, renamed: Mapping[str, nn.Parameter]) -> None:
    """Move parameters and buffers of `weights` into `shape`, a split model on meta.

    `renamed`: parameters that have different names in `weights`.
    """
    parameters = {**dict(weights.named_parameters(remove_duplicate=False)), **renamed}
    sources = dict(weights.named_modules(remove_duplicate=False))
    for path, module in shape.named_modules(remove_duplicate=False):
        for name, on_meta in module._parameters.items():
            if on_meta is not None:
                parameter = parameters[f"{path}.{name}" if path else name]
                # DeepSpeed's marks of the split are attributes of the parameter on meta
                vars(parameter).update({k: v for k, v in vars(on_meta).items() if k not in vars(parameter)})
                module._parameters[name] = parameter
        if path in sources:
            module._buffers.update(sources[path]._buffers)
