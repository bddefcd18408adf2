"""The sizes of a model that decide an engine's memory, from the config and the number of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerofit.models.depth import of_all_layers
from zerofit.models.hf_config import EXPERTS, max_positions
from zerofit.rollout.cache import CacheLayers
from zerofit.spec.errors import Problem, UserError

# model types whose MLP has one matrix before the activation; other MLPs multiply the results of two matrices
PLAIN_MLP_TYPES = (
    *("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"),
)
# bytes of a quantised weight and its part of the scales and zero points: fp8 and int8 have a scale for each channel,
# 4-bit types for each group of 16 to 128 weights
BITS = {
    **dict.fromkeys(("fp8", "int8", "w8a8"), 1.0),
    **dict.fromkeys(("awq", "gptq", "w4a16"), (4 + 20 / 128) / 8),
    **dict.fromkeys(("nf4", "bitsandbytes"), (4 + 32 / 64) / 8),
    **dict.fromkeys(("nvfp4",), (4 + 8 / 16) / 8),
    "mxfp4": (4 + 8 / 32) / 8,
}
ROPE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The sizes of a model for an inference engine. Widths are elements per token without tensor parallelism."""

    name: str
    parameters: int
    vocabulary: int
    hidden: int
    mlp: int  # alive at once within an MLP: both factors of the product and the product
    experts: int = 0  # of a layer
    experts_of_token: int = 0
    expert: int = 0  # width of one expert
    table: int  # parameters of embedding and head, which are not quantised
    positions: int | None = None
    rope_bytes: int = 0
    heads: int = 1
    # for each kind of layer: number of layers; "full", "window", "latent" or "state"; sizes of the cache
    kinds: tuple[tuple[int, str, tuple[int, ...]], ...]

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that it is not routed to."""
        experts = self.experts - self.experts_of_token
        return self.parameters - 3 * self.hidden * self.expert * experts * sum(count for count, *_ in self.kinds)

    def weight_bytes(self, element_bytes: float, tensor_parallel: int, quantization: str | None = None) -> int:
        """Return the bytes of the weights on one rank."""
        each = BITS[quantization] if quantization else element_bytes
        matrices = (self.parameters - self.table) * each + self.table * element_bytes
        return round(matrices / tensor_parallel) + self.rope_bytes

    def cache_layers(self, cache_bytes: int, element_bytes: int, tensor_parallel: int) -> list[CacheLayers]:
        """Return one rank's layers by the shape of their cache. Every rank has the full latent of MLA."""
        found = []
        for count, kind, sizes in self.kinds:
            if kind == "state":
                state = sum(sizes) * element_bytes // tensor_parallel
                found.append(CacheLayers(count=count, state_bytes=state))
            elif kind == "latent":
                found.append(CacheLayers(count=count, token_bytes=sizes[0] * cache_bytes))
            else:
                heads, width, window = sizes
                token = 2 * max(1, heads // tensor_parallel) * width * cache_bytes
                found.append(CacheLayers(count=count, token_bytes=token, window=window or None))
        return found

    @classmethod
    def of(cls, name: str, config: Any, parameters: int) -> ServedModel:
        """Read a transformers config of a decoder. Raises UserError for other models."""
        text = config.get_text_config()
        hidden = getattr(text, "hidden_size", None)
        if getattr(config, "is_encoder_decoder", False) or not hidden or not getattr(text, "vocab_size", None):
            message = f"{name} is not a decoder that generates text; --serve and --method need a decoder"
            raise UserError(Problem(kind="usage", message=message, hint="name a language model", where="MODEL"))
        table = text.vocab_size * hidden * (1 if config.tie_word_embeddings or text.tie_word_embeddings else 2)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "ffn_hidden_size", None) or 4 * hidden
        inner = max(inner) if isinstance(inner, list) else inner
        experts = next((getattr(text, key) for key in EXPERTS if getattr(text, key, None)), 0)
        positions = max_positions(config)
        heads = of_all_layers(text, "num_attention_heads") or 1
        width = of_all_layers(text, "head_dim") or hidden // heads
        return cls(
            name=name,
            parameters=parameters,
            vocabulary=text.vocab_size,
            hidden=hidden,
            mlp=(2 if text.model_type in PLAIN_MLP_TYPES else 3) * inner,
            experts=experts,
            experts_of_token=getattr(text, "num_experts_per_tok", 0) or 0 if experts else 0,
            expert=(getattr(text, "moe_intermediate_size", None) or inner) if experts else 0,
            table=table,
            positions=positions,
            rope_bytes=(positions or 0) * width * ROPE_BYTES if _turns(text) else 0,
            heads=heads,
            kinds=tuple((count, *kind) for kind, count in Counter(_layers(text)).items()),
        )


def _turns(text: Any) -> bool:
    """Return whether positions are rotary; these need a table of sines."""
    return bool(getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None))


def _layers(text: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the kind and the sizes of each layer's cache."""
    kept = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)  # others read these caches
    names = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [None] * kept
    windowed = getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None)
    layers = getattr(text, "per_layer_config", None) or [text] * kept  # Gemma 4 has other heads in some layers
    for name, layer in zip(names[:kept], layers, strict=False):
        query = getattr(layer, "num_attention_heads", None) or 0
        heads = 1 if _multi_query(layer) else getattr(layer, "num_key_value_heads", None) or query
        if name in ("linear_attention", "mamba") or not query:
            yield "state", _state(text)
            continue
        width = getattr(layer, "head_dim", None) or text.hidden_size // query
        if latent := getattr(text, "kv_lora_rank", None):
            yield "latent", (latent + text.qk_rope_head_dim,)
        elif name == "chunked_attention":
            yield "window", (heads, width, text.attention_chunk_size)
        elif windowed and name in ("sliding_attention", None):
            yield "window", (heads, width, text.sliding_window)
        else:
            yield "full", (heads, width, 0)


def _multi_query(text: Any) -> bool:
    """Return whether all heads share one pair of keys and values; Falcon's newer models have groups."""
    return bool(getattr(text, "multi_query", False)) and not getattr(text, "new_decoder_architecture", False)


def _state(text: Any) -> tuple[int, ...]:
    """Return the elements of a sequence's convolution and state in one layer (layers/mamba/mamba_utils.py).

    A state in float32 counts twice, since other types have two bytes. The published configs of Qwen3.5 set float32.
    """
    dtype = getattr(text, "mamba_ssm_dtype", "float32" if text.model_type.startswith("qwen3_5") else None)
    wide_state = 2 if dtype == "float32" else 1
    if getattr(text, "linear_num_value_heads", None):  # gated delta net
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return (2 * keys + values) * (text.linear_conv_kernel_dim - 1), wide_state * values * text.linear_key_head_dim
    if getattr(text, "mamba_n_heads", None):  # Mamba 2
        inner = text.mamba_n_heads * text.mamba_d_head
        wide = inner + 2 * text.mamba_n_groups * text.mamba_d_state
        return wide * (text.mamba_d_conv - 1), inner * text.mamba_d_state
    inner = text.intermediate_size
    return inner * (text.conv_kernel - 1), inner * text.state_size
