"""The memory of a model's head where it computes log-probs in place of a loss.

A fused head has no tensor of all logits. Since 1.15, TRL computes the logits in tiles, and accumulates the head's
gradient in fp32 (trl/kernels/chunked_logprob.py). For distillation, it has float32 tiles of student and teacher
(trl/kernels/chunked_divergence.py).

    logits    tokens x vocabulary               never exist at once
    a tile    4,096 tokens x 32,768 words       one is alive at a time
    saved     the scored tokens' hidden states  for the backward, which computes the tiles again

A whole head computes all log-probs at once, or in chunks with verl's fused kernels. verl's rules are those of
verl/workers/engine/fsdp/transformer_impl.py (`prepare_model_outputs`) and verl/utils/experimental/torch_functional.py
(FusedLinearForPPO). OpenRLHF's are those of openrlhf/models/actor.py (`forward`) and
openrlhf/trainer/ray/ppo_actor.py (`training_step`). Both use flash-attn's cross-entropy
(flash_attn/ops/triton/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

from zerofit.spec.profile import ZERO3, BackwardMoment, LayerCost, LayerRun, Linear, Profile, Scored

Costs = tuple[LayerCost, ...]  # of all layers

TILE_TOKENS, TILE_WORDS = 4096, 32768  # of TRL's fused head; fewer tokens have a smaller tile
CHUNK_TOKENS = 512  # of verl's fused kernels
# Bytes of each logit in a chunk: float32 logits, probabilities and their product; in the backward logits,
# probabilities, one-hot labels, their difference or the gradient, and its sum with 0.
CHUNK_FORWARD, CHUNK_BACKWARD = 12, 20


class LogitBytes(NamedTuple):
    """Bytes per logit that are in use at once, in each phase."""

    forward: float
    saved: float  # until the backward
    backward: float  # of the cross-entropy
    product: float  # in the backward of the head's product


# In 16 bits. The gradient overwrites the logits that are divided by the temperature; its division allocates others.
VERL = LogitBytes(forward=4, saved=2, backward=4, product=2)
EARLY_VERL = LogitBytes(forward=2, saved=2, backward=4, product=2)  # before 0.9, which divides in place
# In float32, from logits in 16 bits. The model's output keeps them in the backward, beside gradients in both types.
OPENRLHF = LogitBytes(forward=6, saved=4, backward=10, product=6)


# For the log-softmax, torch copies the logits of the scored tokens. Backward first needs two gradients with the size of
# this copy. Then it needs a gradient with the size of all logits (trl/experimental/online_dpo, `_forward`).
def online_dpo(scored: float) -> LogitBytes:
    """Return the bytes per logit of TRL's OnlineDPOTrainer.

    `scored`: the share of the tokens whose log-softmax the trainer keeps, in 16 bits.
    """
    return LogitBytes(forward=2 + 4 * scored, saved=2 * scored, backward=max(6 * scored, 2 + 2 * scored), product=2)


def with_whole_head(
    profile: Profile, each: LogitBytes | None, element_bytes: int, *, when: Scored = "first"
) -> Profile:
    """Return the profile with a head that computes no loss, but the log-probs of all tokens.

    `each`: bytes of each logit. None stands for verl's use_fused_kernels with the backend "torch".
    `when`: the attribute `scored` of the returned profile.
    """
    head, hidden, length = profile.layers[-1], profile.hidden_size or 0, profile.seq_len or 0
    owner = next((layer for layer in profile.layers if layer.name == head.tied_to), head)
    weight = max((*owner.matrices, *owner.frozen), default=0)
    logits = length * weight // max(1, hidden)
    if not logits:
        return profile
    row, vocabulary = element_bytes * length * hidden, weight // hidden
    tile = CHUNK_TOKENS * vocabulary

    def changed(cost: LayerCost) -> LayerCost:
        other = max(0, cost.saved_bytes.per_sample - 4 * logits)  # without the loss's float32 logits
        end = cost.backward[0].end if cost.backward else Linear()
        if each is None:
            saved = Linear(fixed=cost.saved_bytes.fixed, per_sample=other + row)
            forward = Linear(fixed=CHUNK_FORWARD * tile, per_sample=saved.per_sample)
            lines = (forward,)
            moments = [Linear(fixed=CHUNK_BACKWARD * tile + 2 * end.fixed, per_sample=other + 2 * row)]
        else:
            saved = Linear(fixed=cost.saved_bytes.fixed, per_sample=other + each.saved * logits)
            made = Linear(per_sample=other + element_bytes * logits)  # by the model; then the log-probs
            forward = Linear(per_sample=other + each.forward * logits)
            lines = (made, forward)
            product = Linear(fixed=end.fixed, per_sample=other + each.product * logits + end.per_sample)
            moments = [Linear(per_sample=other + each.backward * logits), product]
        first = cost.backward[0] if cost.backward else BackwardMoment(live=())
        peak = max(moments, key=lambda line: line.at(1))
        return replace(
            cost,
            saved_bytes=saved,
            forward_peak_bytes=forward,
            forward=lines,
            backward_peak_bytes=peak,
            backward=(replace(first, live=tuple(moments)), *cost.backward[1:]),
            output_bytes=Linear(per_sample=4 * length),
            largest_bytes=Linear(per_sample=each.saved * logits) if each else Linear(fixed=4 * tile),
        )

    return with_head(profile, changed, lambda costs: costs, when)


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
    `when`: the attribute `scored` of the returned profile. `teacher`: the loss is the divergence from a teacher's
    logits.
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

    # At stage 3, TRL gathers the teacher's head for the loss (`maybe_gather_lm_head_ctx`), so its costs differ there.
    if teacher:
        zero3 = {f"{key}{ZERO3}": costs for key, costs in profile.costs.items()}
        profile = replace(profile, zero3=zero3 | profile.zero3)
    sharded = partial(fused, gathered=element_bytes * weight if teacher else 0)
    return with_head(profile, fused, lambda costs: _read_by_model(head, costs), when, sharded)


def with_head(
    profile: Profile,
    changed: Callable[[LayerCost], LayerCost],
    read: Callable[[Costs], Costs],
    when: Scored,
    sharded: Callable[[LayerCost], LayerCost] | None = None,
) -> Profile:
    """Return a profile whose head has the costs that `changed` computes from the old ones.

    `sharded` computes the new costs at stage 3; None: `changed` does. `read` sets which modules read the head's weight.
    """

    def of(settings: dict[str, Costs], change: Callable[[LayerCost], LayerCost]) -> dict[str, Costs]:
        return {key: read((*costs[:-1], change(costs[-1]))) for key, costs in settings.items()}

    values = {field.name: getattr(profile, field.name) for field in fields(profile)}
    values |= {"costs": of(profile.costs, changed), "zero3": of(profile.zero3, sharded or changed)}
    return _PROFILES[when](**values)


# `scored` is no field, so that stored profiles do not have it.
class _ScoredFirst(Profile):
    scored = "first"


class _ScoredWithin(Profile):
    scored = "within"


class _ScoredReentrant(Profile):
    scored = "reentrant"


_PROFILES = {"never": Profile, "first": _ScoredFirst, "within": _ScoredWithin, "reentrant": _ScoredReentrant}


# TRL does not call the head. Instead, the model reads the head's weight. DeepSpeed gathers such an external parameter
# when the module that reads it runs (zero/parameter_offload.py:88).
def _read_by_model(head: LayerRun, costs: Costs) -> Costs:
    """Return the costs with the weight of the head, the last layer, assigned to the model."""
    first, last = costs[0].calls, costs[-1].calls
    if not (first and last):
        return costs
    if head.tied_to:
        others = next((call.others for call in last if call.others), ())
        remaining = tuple(call for call in last if not call.others)
    else:
        sizes = head.matrices + head.vectors + head.frozen
        weight = sizes.index(max(sizes))
        others = ((len(costs) - 1, weight),)
        remaining = tuple(call for call in last if weight not in call.places)
    # The model's own call begins in the first layer and ends in the last one.
    begin, end = first[0]._replace(others=others), remaining[-1]._replace(others=others)
    first_cost = replace(costs[0], calls=(begin, *first[1:]))
    last_cost = replace(costs[-1], calls=(*remaining[:-1], end))
    return first_cost, *costs[1:-1], last_cost
