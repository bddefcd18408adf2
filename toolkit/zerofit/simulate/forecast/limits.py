"""Find the number of layers at which a model reaches DeepSpeed's limits for large models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerofit.check.dotted import get
from zerofit.features.optimizers import has_weight_decay
from zerofit.models.build import build, expert_places, parameter_groups
from zerofit.models.catalog import source_of
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.partitions import buckets
from zerofit.spec.process import deepspeed_quiet

# Beyond the highest of these numbers, all memory grows linearly with the layers. With before + layer * n elements in a
# model of n repeated layers, a limit is reached at n = limit / layer:
#
#   stage   limit                                                     layer
#   0       the number that has the full model's largest bucket       1
#   1, 2    device_bytes / bytes of an element - before               parameters + their flat copy
#   1 to 3  reduce_bucket_size                                        trained parameters
#   3       max_live_parameters + prefetch_bucket_size                parameters
#   3       sub_group_size * ranks                                    trained parameters that these ranks divide
#
# The exception is stage 3's sub-groups of parameters. `sub_groups` computes them for any number of layers.
#
# DeepSpeed's defaults in elements (runtime/zero/config.py)
MAX_LIVE, SUB_GROUP, BUCKET = 1_000_000_000, 1_000_000_000, 500_000_000


@dataclass(frozen=True, kw_only=True)
class _Partitioned:
    """Trained parameters that are all divided among the same number of ranks.

    Sizes are in elements.
    """

    before: int  # outside of repeated layers
    layer: int  # per repeated layer
    ranks: int


def limits(target: SimulationTarget, few: SimulationTarget, more: SimulationTarget, count: int) -> list[float]:
    """Return for each of DeepSpeed's limits the number of layers that reaches it.

    Limits that `count` layers do not reach are left out. `few` and `more` have one and two of the model's repeated
    layers. Only repeated layers count. This excludes the different first layers of DeepSeek's models.
    """
    zero, layout = target.job.ds_config.get("zero_optimization", {}), target.job.layout
    one, two = _rank_model(few), _rank_model(more)
    a_layer = sum(p.numel() for p in two.parameters()) - sum(p.numel() for p in one.parameters())
    parts = list(_partitioned(one, two, layout.dp * layout.sp, layout.ep))
    reduced = (get(zero, "reduce_bucket_size", BUCKET), sum(part.layer for part in parts))
    found: list[tuple[float, int]] = []
    if layout.zero_stage == 0 and layout.dp * layout.sp > 1:
        found = [(_layers_before_the_largest_bucket(_trained(one, False), _trained(two, False), count), 1)]
    if layout.zero_stage in (1, 2):
        # parameters plus a flat copy: if the device has no room, the copy is made on the host (stage_1_and_2.py:453)
        before = sum(p.numel() for p in one.parameters()) - a_layer + sum(part.before for part in parts)
        room = target.device_bytes / ELEMENT_BYTES[target.job.precision] - before
        found = [(max(0, room), a_layer + reduced[1]), reduced]
    if layout.zero_stage == 3:
        live = get(zero, "stage3_max_live_parameters", MAX_LIVE) + get(zero, "stage3_prefetch_bucket_size", 0)
        sub_group = get(zero, "sub_group_size", SUB_GROUP)
        found = [(live, a_layer), reduced, *((sub_group * p.ranks, p.layer) for p in parts)]
    return [limit / size for limit, size in found if limit < size * count]


def sub_groups(few: SimulationTarget, more: SimulationTarget) -> Callable[[int], list[int]]:
    """Return a function: number of layers -> a rank's elements in each of stage 3's sub-groups.

    `few` and `more` have one and two of the model's repeated layers. The function returns [] if both an encoder and
    a decoder grow. It also returns [] with tensor or expert parallelism, since a rank then has parts of parameters.
    """
    zero, layout = few.job.ds_config.get("zero_optimization", {}), few.job.layout
    if layout.tp * layout.ep > 1:
        return lambda layers: []
    most, ranks = get(zero, "sub_group_size", SUB_GROUP), layout.dp * layout.sp
    decay = has_weight_decay(few.job.ds_config)
    ones, twos = (
        {
            group["name"]: [parameter.numel() for parameter in group["params"]]
            for group in parameter_groups(_rank_model(target).parameters(), decay)
        }
        for target in (few, more)
    )

    def at(layers: int) -> list[int]:
        found = []
        for group in twos:
            whole = _grown(ones.get(group, []), twos[group], layers)
            if whole is None:
                return []
            parts = [math.ceil(numel / ranks) for numel in whole]
            found += _sub_groups(parts, most)
        return found

    return at


def _sub_groups(parts: list[int], most: int) -> Iterator[int]:
    """Yield the elements of each sub-group."""
    # A sub-group is full once it has `most` elements (zero/stage3.py:1210).
    if sum(parts) <= most:
        yield sum(parts)
        return
    filled = 0
    for number, part in enumerate(parts, 1):
        filled += part
        if filled >= most or number == len(parts):
            yield filled
            filled = 0


def _layers_before_the_largest_bucket(one: list[int], two: list[int], count: int) -> int:
    """Return the highest number of layers whose largest gradient bucket is not the full model's.

    `one`, `two`: elements of each gradient in a model with one and with two layers. `count`: number of layers of the
    full model. If both an encoder and a decoder have a second layer, the result is unknown. Then `count` - 1 is
    returned.
    """
    if _grown(one, two, count) is None:
        return count - 1

    def largest(layers: int) -> dict[bool, int]:
        found = {True: 0, False: 0}  # of several gradients, of a single one
        for size, gradients in buckets(_grown(one, two, layers) or []):
            found[gradients > 1] = max(found[gradients > 1], size)
        return found

    whole = largest(count)
    return next((n for n in range(count - 1, 0, -1) if largest(n) != whole), 0)


# A model's parameters are listed in order, and repeated layers are adjacent. So the second layer shows where a layer
# begins, and what it adds:
#
#   one layer    embedding | a b c | norm head
#   two layers   embedding | a b c | a b c | norm head          same = 4, layer = [a, b, c]
def _grown(one: list[int], two: list[int], layers: int) -> list[int] | None:
    """Return the sequence of sizes for `layers` layers, from those for one and for two layers.

    The result is None if the second layer does not add its sizes at one place of the sequence.
    """
    same = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
    layer = two[same : same + len(two) - len(one)]
    if [*one[:same], *layer, *one[same:]] != two:
        return None
    return [*one[:same], *layer * (layers - 1), *one[same:]]


def _rank_model(target: SimulationTarget) -> nn.Module:
    run = target.job.run
    with torch.device("meta"):
        model = build(replace(source_of(run), pretrained=None), target.inputs, dict(run.model_args))
    if target.job.layout.ep > 1:
        with deepspeed_quiet():
            from zerofit.simulate.costs.traced_model import spread
        spread(model, target.job.layout.ep)
    return model


def _partitioned(one: nn.Module, two: nn.Module, ranks: int, ep: int) -> Iterator[_Partitioned]:
    """Yield the parameters that all ranks divide, then the experts' parameters.

    The latter are divided among the ranks with the same experts.
    """
    for spread_ones, dividing in ((False, ranks), (True, ranks // ep)):
        few, more = _trained(one, spread_ones), _trained(two, spread_ones)
        layer = sum(more) - sum(few)
        if more:
            yield _Partitioned(before=sum(few) - layer, layer=layer, ranks=dividing)


def _trained(model: nn.Module, spread_ones: bool) -> list[int]:
    experts = set(expert_places(model))
    return [p.numel() for n, p in enumerate(model.parameters()) if p.requires_grad and (n in experts) == spread_ones]
