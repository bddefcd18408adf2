"""Simulate transformers' generation.

Sequences get their maximum length, but few tokens are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.evaluation import EVALUATION
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.utils.generic import ModelOutput

GENERATION = "generation"
COMPUTED = 3  # tokens: after the prompt, with the prompt's cache, with the cache at its full length
_FIRST = ("build", "init", "step")  # phases that a batch's generation ends
_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")  # of each token
_POSITIONS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def generation(meter: ScriptTracker, log: PhaseLog) -> None:
    """Give generation its own phase, and let sequences reach their full length quickly.

    (transformers.GenerationMixin._sample, _beam_search, _beam_search_has_unfinished_sequences,
    _update_model_kwargs_for_generation)
    """
    # A simulation does not know when an end-of-sequence token is sampled. Each token of a large model takes 1 s to
    # simulate. So only the first two tokens and the last token are simulated, and the cache grows at once.
    announce_generation(log)
    left_out: list[int] = []  # tokens that each of the next updates of the running generation skips, last first
    skipped: list[Tensor] = []  # the memory of these tokens' ids during the running generation
    for name in ("_sample", "_beam_search"):
        replace_in(GenerationMixin, name, _shortened(getattr(GenerationMixin, name), meter, left_out, skipped))
    update = cast("Callable[..., dict[str, Any]]", GenerationMixin._update_model_kwargs_for_generation)

    def updated(
        self: GenerationMixin, outputs: ModelOutput, model_kwargs: dict[str, Any], *args: object, **kwargs: object
    ) -> dict[str, Any]:
        updated_kwargs = update(self, outputs, model_kwargs, *args, **kwargs)
        if left_out and (tokens := left_out.pop()):
            logits = outputs["logits"]
            skipped.append(torch.empty((logits.shape[0], tokens), dtype=torch.long, device=logits.device))
            _lengthen(updated_kwargs, tokens)
        return updated_kwargs

    # transformers would compare the scores of beams, which are unknown
    def has_unfinished(heuristic: Tensor, finished: Tensor, at_limit: Tensor, early: object) -> bool:
        known = known_value(at_limit)
        return known is None or not bool(known.all())

    replace_in(GenerationMixin, "_update_model_kwargs_for_generation", updated)
    replace_in(GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(has_unfinished))


def announce_generation(log: PhaseLog) -> None:
    """Begin phase GENERATION at each call of `generate`, and end it after the call.

    During an evaluation, the phase does not change.
    """
    generate: Callable[..., object] = vars(GenerationMixin)["generate"]  # its type asks for a model as self

    def generated(self: GenerationMixin, *args: object, **kwargs: object) -> object:
        before = log.name
        if before == EVALUATION:
            return generate(self, *args, **kwargs)
        log.step = max(log.step, 0)
        log.begin(GENERATION)
        try:
            return generate(self, *args, **kwargs)
        finally:
            log.begin("forward" if before in _FIRST else before)

    replace_in(GenerationMixin, "generate", generated)


def _shortened(
    original: Callable[..., Tensor | ModelOutput], meter: ScriptTracker, left_out: list[int], skipped: list[Tensor]
) -> Callable[..., Tensor | ModelOutput]:
    """Return a method that computes COMPUTED tokens and returns sequences of full length."""

    def decode(
        self: GenerationMixin,
        input_ids: Tensor,
        logits_processor: object,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **rest: object,
    ) -> Tensor | ModelOutput:
        limit = stopping_criteria.max_length or 0
        tokens = limit - input_ids.shape[1]
        hidden = tokens - COMPUTED
        cached = rest.get("use_cache") and _growing_layers(rest) is not None
        if hidden > 0 and cached and not any(getattr(generation_config, name) for name in _KEPT):
            most = f"generation: each sequence gets {tokens} new tokens, the limit"
            meter.note(f"{most}; {COMPUTED} of these tokens were computed")
            # both limits: beam search reads max_length, sampling only the criteria
            generation_config = copy.copy(generation_config)
            generation_config.max_length = limit - hidden
            others = [criterion for criterion in stopping_criteria if not isinstance(criterion, MaxLengthCriteria)]
            stopping_criteria = StoppingCriteriaList([*others, MaxLengthCriteria(limit - hidden)])
            left_out[:] = [hidden, 0]
        output = original(self, input_ids, logits_processor, stopping_criteria, generation_config, **rest)
        skipped.clear()
        if isinstance(output, Tensor):
            return _up_to(output, limit)
        output["sequences"] = _up_to(output["sequences"], limit)
        return output

    return decode


def _growing_layers(kwargs: Mapping[str, object]) -> Sequence[DynamicLayer] | None:
    """Return the layers of a model's cache if it grows with each token; None for other caches."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the name in older releases
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(cache, Cache):
        return None
    # a static or quantized cache has its full size from the start, or keeps other tensors
    layers = [layer for layer in cache.layers if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)]
    return cast("list[DynamicLayer]", layers) if len(layers) == len(cache.layers) else None


def _lengthen(kwargs: dict[str, Any], tokens: int) -> None:
    """Add `tokens` columns to the masks, positions and cache that the next forward gets."""
    prefix = "decoder_" if "encoder_outputs" in kwargs else ""  # other masks are those of the encoder's input
    for name in (f"{prefix}{name}" for name in _POSITIONS):
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            # masks repeat their last column; positions count up from it
            added = value[..., -1:].expand(*value.shape[:-1], tokens)
            if name.endswith("position_ids"):
                added = added + torch.arange(1, tokens + 1, dtype=value.dtype, device=value.device)
            kwargs[name] = torch.cat([value, added], dim=-1)
    for layer in _growing_layers(kwargs) or ():
        assert layer.keys is not None
        length = layer.keys.shape[-2] + tokens
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += tokens
            # without the next token, which completes the window (transformers/cache_utils.py)
            length = min(length, layer.sliding_window - 1)
        for name in ("keys", "values"):
            old = getattr(layer, name)
            setattr(layer, name, old.new_empty((*old.shape[:-2], length, old.shape[-1])))


def _up_to(tokens: Tensor, limit: int) -> Tensor:
    """Return sequences of length `limit`."""
    # beam search may have computed a shorter length from fake values
    return tokens if tokens.shape[1] >= limit else tokens.new_empty((tokens.shape[0], limit))
