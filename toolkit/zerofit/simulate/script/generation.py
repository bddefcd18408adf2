"""Simulate transformers' generation.

Sequences get their maximum length, but few tokens are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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

GENERATION = "generation"
COMPUTED = 3  # tokens: after the prompt, with the prompt's cache, with the cache at its full length
_FIRST = ("build", "init", "step")  # phases that a batch's generation ends
_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")  # of each token
_POSITIONS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def generation(meter: ScriptTracker, log: PhaseLog) -> None:
    """Give generation its own phase, and let sequences reach their full length quickly.

    A simulation does not know when an end-of-sequence token is sampled. Each token of a large model takes 1 s to
    simulate. So only the first two tokens and the last token are simulated, and the cache grows at once.
    (transformers.GenerationMixin._sample, _beam_search, _beam_search_has_unfinished_sequences,
    _update_model_kwargs_for_generation)
    """
    announce_generation(log)
    left_out: list[int] = []  # tokens that each of the next updates of the running generation skips, last first
    skipped: list[Tensor] = []  # the memory of these tokens' ids during the running generation
    for name in ("_sample", "_beam_search"):
        replace_in(GenerationMixin, name, _shortened(getattr(GenerationMixin, name), meter, left_out, skipped))
    kind: Any = GenerationMixin  # its methods ask for a model as self
    update = kind._update_model_kwargs_for_generation

    def updated(
        self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: object, **named: object
    ) -> dict[str, Any]:
        found = update(self, outputs, model_kwargs, *args, **named)
        if left_out and (tokens := left_out.pop()):
            rows = outputs.logits.shape[0]
            skipped.append(torch.empty((rows, tokens), dtype=torch.long, device=outputs.logits.device))
            _lengthen(found, tokens)
        return found

    def goes_on(heuristic: Tensor, finished: Tensor, at_limit: Tensor, early: object) -> bool:
        known = known_value(at_limit)
        return known is None or not bool(known.all())

    replace_in(GenerationMixin, "_update_model_kwargs_for_generation", updated)
    replace_in(GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(goes_on))


def announce_generation(log: PhaseLog) -> None:
    """Begin phase GENERATION at each call of `generate`, and end it after the call.

    During an evaluation, the phase does not change.
    """
    kind: Any = GenerationMixin  # its methods ask for a model as self
    generate = kind.generate

    def generated(self: Any, *args: object, **kwargs: object) -> object:
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
    original: Callable[..., Any], meter: ScriptTracker, left_out: list[int], skipped: list[Tensor]
) -> Callable[..., Any]:

    def decode(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: object,
    ) -> Any:
        limit = stopping_criteria.max_length or 0
        tokens = limit - input_ids.shape[1]
        hidden = tokens - COMPUTED
        cached = rest.get("use_cache") and _can_grow(rest.get("past_key_values"))
        if hidden > 0 and cached and not any(getattr(generation_config, name) for name in _KEPT):
            most = f"generation: each sequence gets {tokens} new tokens, the limit"
            meter.note(f"{most}; {COMPUTED} of these tokens were computed")
            generation_config = copy.copy(generation_config)
            generation_config.max_length = limit - hidden
            others = [one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria)]
            stopping_criteria = StoppingCriteriaList([*others, MaxLengthCriteria(limit - hidden)])
            left_out[:] = [hidden, 0]
        made = original(self, input_ids, logits_processor, stopping_criteria, generation_config, **rest)
        skipped.clear()
        if isinstance(made, Tensor):
            return _up_to(made, limit)
        made.sequences = _up_to(made.sequences, limit)
        return made

    return decode


def _can_grow(cache: Any) -> bool:
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    growing = (DynamicLayer, DynamicSlidingWindowLayer)
    return isinstance(cache, Cache) and all(type(layer) in growing for layer in cache.layers)


def _lengthen(kwargs: dict[str, Any], tokens: int) -> None:
    prefix = "decoder_" if "encoder_outputs" in kwargs else ""  # other masks are those of the encoder's input
    for name in (f"{prefix}{name}" for name in _POSITIONS):
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = _longer(kwargs[name], tokens, counts=name.endswith("position_ids"))
    cache = kwargs["past_key_values"]
    layers: list[Any] = (cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache).layers
    for layer in layers:
        length = layer.keys.shape[-2] + tokens
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += tokens
            length = min(length, layer.sliding_window - 1)
        for name in ("keys", "values"):
            kept = getattr(layer, name)
            setattr(layer, name, kept.new_empty((*kept.shape[:-2], length, kept.shape[-1])))


def _up_to(tokens: Tensor, limit: int) -> Tensor:
    """Return sequences of length `limit`. Beam search may have computed a shorter length from fake values."""
    return tokens if tokens.shape[1] >= limit else tokens.new_empty((tokens.shape[0], limit))


def _longer(value: Tensor, tokens: int, *, counts: bool = False) -> Tensor:
    """Return `value` with `tokens` more elements in the last dimension.

    The new elements repeat the last element. With `counts`, they count up from it.
    """
    more = value[..., -1:].expand(*value.shape[:-1], tokens)
    if counts:
        more = more + torch.arange(1, tokens + 1, dtype=value.dtype, device=value.device)
    return torch.cat([value, more], dim=-1)
