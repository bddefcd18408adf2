"""Compute the memory of TRL's fused head, which needs no tensor of all logits.

Since 1.15, TRL computes the logits in tiles, and accumulates the head's gradient in fp32
(trl/kernels/chunked_logprob.py). For distillation, it has float32 tiles of student and teacher
(trl/kernels/chunked_divergence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from zerofit.spec.profile import ZERO3, BackwardMoment, LayerCost, LayerRun, Linear, Profile, Scored

TILE_TOKENS, TILE_WORDS = 4096, 32768  # fewer tokens have a smaller tile


def with_fused_head(
    profile: Profile,
    scored: int,
    element_bytes: int,
    micro_batch: int | None = None,
    *,
    when: Scored,
    teacher: bool = False,
) -> Profile:
    """Return the profile with TRL's fused head in place of a loss that needs all logits.

    `scored`: number of tokens per sample that get log-probs. `micro_batch`: number of samples; None: any large number.
    `when`: the attribute `scored` of the returned profile.

    `teacher`: the loss is the divergence from a teacher's logits. At stage 3, TRL gathers the teacher's head for this
    loss (`maybe_gather_lm_head_ctx`).
    """
    head, hidden = profile.layers[-1], profile.hidden_size or 0
    owner = next((layer for layer in profile.layers if layer.name == head.tied_to), head)
    trained = max(owner.matrices[:1], default=0)  # frozen weights have no gradient
    weight = max((trained, *owner.frozen))
    logits = (profile.seq_len or 0) * weight // max(1, hidden)
    if not logits:
        return profile
    tokens = min(TILE_TOKENS, scored * micro_batch) if micro_batch else TILE_TOKENS

    def fused(cost: LayerCost, gathered: int = 0) -> LayerCost:
        row, rounded = element_bytes * scored * hidden, element_bytes * tokens * TILE_WORDS
        tile = 2 * 4 * tokens * TILE_WORDS if teacher else rounded
        rows = 2 * row if teacher else row
        saved = replace(cost.saved_bytes, per_sample=max(0, cost.saved_bytes.per_sample - 4 * logits) + rows)
        forward = Linear(fixed=tile + gathered, per_sample=saved.per_sample)
        gradient = (4 + element_bytes) * trained  # in fp32, and its copy in the weight's type
        if teacher:  # the student's tile is rounded, while the one before it is still alive or its gradient is copied
            gradient = rounded + max(gradient, 4 * trained + rounded + gathered)
        backward = Linear(fixed=tile + gradient, per_sample=saved.per_sample + 4 * scored * hidden + row)
        first = replace(cost.backward[0], live=(backward,)) if cost.backward else BackwardMoment(live=(backward,))
        return replace(
            cost,
            saved_bytes=saved,
            forward_peak_bytes=forward,
            forward=(forward,),
            backward_peak_bytes=backward,
            backward=(first, *cost.backward[1:]),
            output_bytes=Linear(per_sample=4 * scored),
            largest_bytes=Linear(fixed=tile),
        )

    if teacher:
        every = {f"{key}{ZERO3}": costs for key, costs in profile.costs.items()}
        profile = replace(profile, zero3=every | profile.zero3)
    sharded = partial(fused, gathered=element_bytes * weight if teacher else 0)
    return with_head(profile, fused, lambda costs: _read_by_model(head, costs), when, sharded)


def with_head(
    profile: Profile,
    changed: Callable[[LayerCost], LayerCost],
    read: Callable[[tuple[LayerCost, ...]], tuple[LayerCost, ...]],
    when: Scored,
    sharded: Callable[[LayerCost], LayerCost] | None = None,
) -> Profile:
    """Return a profile in which the head has new costs. `changed` computes the new costs from the old costs.

    `sharded` computes the new costs at stage 3; None: `changed` does. `read` sets which modules read the head's weight.
    """

    def of(settings: dict[str, tuple[LayerCost, ...]], change: Callable[[LayerCost], LayerCost]) -> dict[str, Any]:
        return {key: read((*costs[:-1], change(costs[-1]))) for key, costs in settings.items()}

    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    values |= {"costs": of(profile.costs, changed), "zero3": of(profile.zero3, sharded or changed)}
    return _PROFILES[when](**values)


class _ScoredFirst(Profile):
    scored = "first"


class _ScoredWithin(Profile):
    scored = "within"


class _ScoredReentrant(Profile):
    scored = "reentrant"


_PROFILES = {"never": Profile, "first": _ScoredFirst, "within": _ScoredWithin, "reentrant": _ScoredReentrant}


def _read_by_model(head: LayerRun, costs: tuple[LayerCost, ...]) -> tuple[LayerCost, ...]:
    """Return the costs with the head's weight assigned to the model.

    TRL does not call the head. Instead, the model reads the head's weight. `head`: the last layer. DeepSpeed
    gathers an external parameter when the module that reads it runs (zero/parameter_offload.py:88).
    """
    first, last = costs[0].calls, costs[-1].calls
    if not (first and last):
        return costs
    if head.tied_to:
        others = next((call.others for call in last if call.others), ())
        kept = tuple(call for call in last if not call.others)
    else:
        mine = head.matrices + head.vectors + head.frozen
        weight = mine.index(max(mine))
        others = ((len(costs) - 1, weight),)
        kept = tuple(call for call in last if weight not in call.places)
    begin, end = first[0]._replace(others=others), kept[-1]._replace(others=others)
    changed = replace(costs[0], calls=(begin, *first[1:])), replace(costs[-1], calls=(*kept[:-1], end))
    return changed[0], *costs[1:-1], changed[1]
