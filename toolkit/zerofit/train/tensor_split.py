"""Split a model over any process group, by transformers' plan, with layers of AutoTP.

With expert parallelism, DeepSpeed's AutoEP layers are used, and a rank builds only its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups
from torch import Tensor, nn

from zerofit.checkpoint.index import TensorSlice
from zerofit.models.deferred import Stored
from zerofit.spec.mesh import expert_rank
from zerofit.spec.run_folder import Layout
from zerofit.train.process_group import rank_device

# DeepSpeed's engine can only convert a model that every rank has in full (runtime/engine.py:816). This module converts
# the model on the meta device, then fills it with weights.
#
# The same weights in both libraries, for E experts of hidden size h and intermediate size i:
#
#     transformers   gate_up_proj (E, 2i, h)            down_proj (E, h, i)
#     AutoEP         w1 (E/ep, i, h)  w3 (E/ep, i, h)   w2 (E/ep, h, i)       on each of ep ranks
#
# AutoEP's name of an expert weight -> transformers' name, and which half of each expert's rows
SOURCES = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None)}
HALVES = 2  # gate_up_proj contains the rows of w1, then of w3
SHARE = "zerofit_expert_share"  # attribute of a parameter


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
    auto = cast(Any, AutoTP)(  # pyright would follow its methods into all models of transformers
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


@dataclass(frozen=True, kw_only=True)
class ExpertShare:
    """The part of a transformers weight that an AutoEP parameter contains."""

    name: str  # of the weight in the full model
    shape: tuple[int, ...]  # (experts, rows, columns) of that weight
    count: int  # experts per rank
    half: int | None  # which half of each expert's rows; None: all

    def cut(self, rank: int) -> TensorSlice:
        """Return the part of the full weight on expert parallel rank `rank`."""
        first, rows = rank * self.count, self.shape[1]
        if self.half is None:
            return TensorSlice(0, ((first, self.count),))
        start, length = self.half * rows // HALVES, rows // HALVES
        ranges = tuple((expert * rows + start, length) for expert in range(first, first + self.count))
        return TensorSlice(0, ranges, joined=1)


def build_spread(shape: nn.Module, layout: Layout, stored: Stored, make: Callable[[Stored], nn.Module]) -> nn.Module:
    """Give `shape`, a model on the meta device, weights and only this rank's experts.

    `make` builds the model with weights, and keeps only the experts that its argument `stored` selects.
    """
    sizes, rank = {name: tuple(p.shape) for name, p in shape.named_parameters()}, expert_rank(dist.get_rank(), layout)
    convert(shape, layout.ep, rank)
    slices = {}
    for path, layer in expert_layers(shape).items():
        for own, (source, half) in SOURCES.items():
            name, count = f"{path}.experts.{source}", layer.num_local_experts
            share = ExpertShare(name=name, shape=sizes[name], count=count, half=half)
            setattr(getattr(layer.experts, own), SHARE, share)
            # w1 and w3 have the same source, and so the same slice
            slices[name] = partial(_take, rank * count, count)
    weights = make(replace(stored, slices=slices))
    renamed: dict[str, nn.Parameter] = {}
    for path, layer in expert_layers(shape).items():
        block: Any = weights.get_submodule(path)
        renamed |= {f"{path}.{own}": p for own, p in _taken_weights(block).items()}
        layer.tokens_per_expert = torch.zeros(layer.num_experts, device=stored.device)
        layer.router._buffers.update(block.gate._buffers)  # DeepSeek-V3 has a bias of router scores
    fill(shape, weights, renamed)
    return shape


def make_expert_groups(layout: Layout) -> None:
    """Create the expert groups of all stages of a pipeline."""
    # DeepSpeed itself would use a pipeline's `model` axis for tensor ranks (module_inject/auto_ep_layer.py,
    # `set_deepspeed_parallelism`), and would create no groups on a stage without experts.
    groups._create_expert_and_data_parallel(expert_parallel_size_=layout.ep, mp_size=1, pp_size=layout.pp)


def expert_layers(module: nn.Module) -> dict[str, AutoEPMoELayer]:
    """Return the AutoEP layers of a model by path."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, AutoEPMoELayer)}


def share_of(p: nn.Parameter) -> ExpertShare | None:
    """Return the expert share of a parameter; None if it has no experts."""
    return getattr(p, SHARE, None)


def published_names(module: nn.Module) -> dict[str, str]:
    """Return transformers' name for each AutoEP name of a parameter or buffer."""
    names = {own: share.name for own, p in module.named_parameters() if (share := share_of(p))}
    for path, layer in expert_layers(module).items():
        names[f"{path}.router.gate.weight"] = f"{path}.gate.weight"
        names |= {f"{path}.router.{own}": f"{path}.gate.{own}" for own in layer.router._buffers}
    return names


def gathered_experts(experts: GroupedExperts, layout: Layout, collect: bool) -> Iterator[tuple[str, Tensor]]:
    """Gather the full weights of a layer's experts. Yield them on the CPU if `collect`.

    The rank with the first experts sets `collect`. All ranks must iterate over this together.
    """
    weights: dict[str, Tensor] = {}
    with GatheredParameters(list(experts.parameters()), enabled=layout.zero_stage == 3):
        for p in experts.parameters():
            share, own = cast(ExpertShare, share_of(p)), p.detach().contiguous()
            group = groups._get_expert_parallel_group(vars(p)["group_name"])
            is_first, size = dist.get_rank(group) == 0, dist.get_world_size(group)
            parts = [torch.empty_like(own) for _ in range(size)] if is_first else None
            dist.gather(own, parts, group=group, group_dst=0)
            for rank, part in enumerate(parts if parts and collect else ()):
                if share.name not in weights:
                    weights[share.name] = torch.empty(share.shape, dtype=p.dtype)
                cut = share.cut(rank)
                cut.put(weights[share.name], part.cpu().view(cut.shape(share.shape)))
    yield from weights.items()


def _take(first: int, count: int, weight: Tensor) -> Tensor:
    return weight[first : first + count].clone()


def _taken_weights(block: Any) -> dict[str, nn.Parameter]:
    """Remove the weights from transformers' expert block, and return them under AutoEP's names."""
    weights = {"router.gate.weight": block.gate.weight}
    for own, (source, half) in SOURCES.items():
        weight = getattr(block.experts, source)
        data = weight.data if half is None else weight.data.chunk(HALVES, dim=1)[half].contiguous()
        weights[f"experts.{own}"] = nn.Parameter(data, requires_grad=weight.requires_grad)
    block.experts._parameters.clear()  # frees each layer's weights before the next layer's are copied
    return weights


def convert(model: nn.Module, degree: int, rank: int) -> None:
    """Replace transformers' expert layers with AutoEP's in a model on the meta device."""
    _mend_registry()
    auto = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=degree))
    specs = auto.ep_parser()
    with torch.device("meta"):
        auto.replace_moe_layers(specs, degree, rank)
    for layer in expert_layers(model).values():
        layer._modules.pop("gate", None)  # a second reference to the router, which would be saved twice


@cache
def _mend_registry() -> None:
    """Adapt transformers' registry of recorded outputs to AutoEP's calls."""
    # AutoEP calls `get` with the class's name and a default (module_inject/auto_ep_presets/base.py:326). transformers
    # expects a model and no default (utils/output_capturing.py:39).
    from transformers.utils import output_capturing

    def name_of(key: object) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    kind: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    if kind is dict:  # before transformers 5.23 a plain dict by class name
        return
    kind.get = lambda self, key, default=None: dict.get(self, name_of(key)) or ({} if default is None else default)
    kind.__setitem__ = lambda self, key, value: dict.__setitem__(self, name_of(key), value)


class RouterBalance:
    """Records routers' losses and, with expert parallelism, tokens per expert in a step."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, shared: bool = False):
        """`group`: ranks with the same layers. `shared`: only some of these ranks record losses."""
        self._group, self._shared = group, shared
        layers = expert_layers(module).values()
        self._counters = [cast(Tensor, layer.tokens_per_expert) for layer in layers]
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor] = []  # (layers, experts) of each forward

    def begin(self) -> None:
        """Begin a forward. Discard counts from evaluations and from recomputation in backward."""
        for counter in self._counters:
            counter.zero_()

    def end(self) -> None:
        """Record the forward that has just ended."""
        if self._counters:
            self._tokens.append(torch.stack(self._counters))

    def note(self, router_loss: Tensor) -> None:
        """Record the routers' part of a forward's loss."""
        self._losses.append(router_loss.detach().float())

    def figures(self) -> dict[str, Tensor]:
        """Return the step's figures over all ranks, and reset the counts. All ranks must call this.

        `router_loss`: the part of the loss that comes from routers. `expert_load_most` and `expert_load_least`: tokens
        of the experts with the most and the fewest tokens in any layer, divided by an even share.
        """
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], []
        figures: dict[str, Tensor] = {}
        if losses or self._shared:
            sums = torch.tensor([0.0, len(losses)], device=rank_device())
            sums[0] = sum(losses)
            dist.all_reduce(sums)
            figures["router_loss"] = sums[0] / sums[1]
        if tokens:
            counts = torch.stack(tokens).sum(0)
            dist.all_reduce(counts, group=self._group)
            loads = counts / counts.mean(1, keepdim=True)
            extremes = torch.stack([loads.max(), -loads.min()])
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            figures |= {"expert_load_most": extremes[0], "expert_load_least": -extremes[1]}
        return figures
