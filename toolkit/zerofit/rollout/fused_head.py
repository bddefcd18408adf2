"""The memory of TRL's fused head: log-probs of the scored tokens, without a tensor of all logits.

Since 1.15, TRL computes logits in tiles, and adds up the head's gradient in fp32 (trl/kernels/chunked_logprob.py).
"""

from __future__ import annotations

from dataclasses import replace

from zerofit.spec.profile import BackwardMoment, LayerCost, Linear, Profile

TILE_TOKENS, TILE_WORDS = 4096, 32768  # fewer tokens have a smaller tile


def with_fused_head(profile: Profile, scored: int, element_bytes: int, micro_batch: int | None = None) -> Profile:
    """Return a profile with TRL's head instead of a loss of all logits.

    `scored`: tokens of a sample with log-probs. `micro_batch`: its samples; None stands for many.
    """
    head, hidden = profile.layers[-1], profile.hidden_size or 0
    owner = next((layer for layer in profile.layers if layer.name == head.tied_to), head)
    trained = max(owner.matrices[:1], default=0)  # frozen weights have no gradient
    logits = (profile.seq_len or 0) * max((trained, *owner.frozen)) // max(1, hidden)
    if not logits:
        return profile
    tokens = min(TILE_TOKENS, scored * micro_batch) if micro_batch else TILE_TOKENS

    def fused(cost: LayerCost) -> LayerCost:
        row, tile = element_bytes * scored * hidden, element_bytes * tokens * TILE_WORDS
        saved = replace(cost.saved_bytes, per_sample=max(0, cost.saved_bytes.per_sample - 4 * logits) + row)
        forward = Linear(fixed=tile, per_sample=saved.per_sample)
        gradient = (4 + element_bytes) * trained  # in fp32, and its copy in the weight's type
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

    def with_head(settings: dict[str, tuple[LayerCost, ...]]) -> dict[str, tuple[LayerCost, ...]]:
        return {key: (*costs[:-1], fused(costs[-1])) for key, costs in settings.items()}

    return replace(profile, costs=with_head(profile.costs), zero3=with_head(profile.zero3))
