"""The memory of a head that computes all log-probs at once, or in chunks with verl's fused kernels.

verl's rules are those of verl/workers/engine/fsdp/transformer_impl.py (`prepare_model_outputs`) and
verl/utils/experimental/torch_functional.py (FusedLinearForPPO). OpenRLHF's are those of openrlhf/models/actor.py
(`forward`) and openrlhf/trainer/ray/ppo_actor.py (`training_step`). Both use flash-attn's cross-entropy
(flash_attn/ops/triton/cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zerofit.rollout.fused_head import with_head
from zerofit.spec.profile import BackwardMoment, LayerCost, Linear, Profile, Scored

CHUNK_TOKENS = 512
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
