"""The sizes of a model that decide an engine's memory, from the model's config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from zerofit.models.depth import of_all_layers
from zerofit.models.hf_config import EXPERTS, max_positions
from zerofit.rollout.cache import CacheLayers
from zerofit.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Model types whose MLP has one matrix before the activation; other MLPs multiply the results of two matrices.
PLAIN_MLP_TYPES = (
    *("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "nemotron", "nemotron_h", "opt", "phi"),
    "starcoder2",
)
# Bytes of a quantized weight and its part of the scales and zero points: fp8 and int8 have a scale for each channel,
# 4-bit types for each group of 16 to 128 weights.
BITS = {
    **dict.fromkeys(("fp8", "int8", "w8a8"), 1.0),
    **dict.fromkeys(("awq", "gptq", "w4a16"), (4 + 20 / 128) / 8),
    **dict.fromkeys(("nf4", "bitsandbytes"), (4 + 32 / 64) / 8),
    **dict.fromkeys(("nvfp4",), (4 + 8 / 16) / 8),
    "mxfp4": (4 + 8 / 32) / 8,
}
# Weights in mxfp4 are those of the experts. vLLM pads the hidden size to a multiple of 256, and the experts' width for
# its kernel, Marlin or (on Hopper) Triton (model_executor/layers/quantization/mxfp4.py).
EXPERTS_ONLY, HIDDEN_MULTIPLE, MARLIN_MULTIPLE, TRITON_MULTIPLE = "mxfp4", 256, 128, 64
ROPE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The sizes of a model for an inference engine; widths are elements per token on one GPU."""

    name: str
    parameters: int
    vocabulary: int
    hidden: int
    mlp: int  # alive at once within an MLP: both factors of the product and the product
    experts: int = 0  # of a layer
    experts_of_token: int = 0
    expert: int = 0  # width of one expert
    expert_layers: int = 0
    expert_matrices: int = 3
    table: int  # parameters of embedding and head, which are not quantized
    published: str | None = None  # format of the published weights, if they are quantized
    unquantized: int = 0  # other parameters that the published weights keep in 16 bits
    reads_images: bool = False
    positions: int | None = None
    rope_bytes: int = 0
    heads: int = 0  # of attention; 0: the model has none
    # for each kind of layer: number of layers; "full", "window", "latent" or "state"; sizes of the cache
    kinds: tuple[tuple[int, str, tuple[int, ...]], ...]

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: of the experts, those that its router chooses."""
        return self.parameters - (self.experts - self.experts_of_token) * self._of_expert(self.hidden, self.expert)

    def _of_expert(self, hidden: int, width: int) -> int:
        """Return the parameters of one expert in all layers."""
        return self.expert_matrices * hidden * width * self.expert_layers

    def weight_bytes(
        self,
        element_bytes: float,
        tensor_parallel: int,
        quantization: str | None = None,
        expert_multiple: int = MARLIN_MULTIPLE,
    ) -> int:
        """Return the bytes of the weights on one rank.

        Experts in mxfp4 are padded: their width becomes a multiple of `expert_multiple`.
        """
        weight_bytes = BITS[quantization] if quantization else element_bytes
        quantized = stored = self.parameters - self.table - (self.unquantized if quantization == self.published else 0)
        if quantization == EXPERTS_ONLY and self.experts:
            quantized = self.experts * self._of_expert(self.hidden, self.expert)
            width = tensor_parallel * _up(-(-self.expert // tensor_parallel), expert_multiple)
            stored = self.experts * self._of_expert(_up(self.hidden, HIDDEN_MULTIPLE), width)
        total = stored * weight_bytes + (self.parameters - quantized) * element_bytes
        return round(total / tensor_parallel) + self.rope_bytes

    def cache_layers(self, cache_bytes: int, element_bytes: int, tensor_parallel: int) -> list[CacheLayers]:
        """Return one rank's layers, grouped by the shape of their cache."""
        layers = []
        for count, kind, sizes in self.kinds:
            if kind == "state":
                state = sum(sizes) * element_bytes // tensor_parallel
                layers.append(CacheLayers(count=count, state_bytes=state))
            elif kind == "latent":  # MLA's latent is not divided: every rank has it in full
                layers.append(CacheLayers(count=count, token_bytes=sizes[0] * cache_bytes))
            else:
                heads, width, window = sizes
                token = 2 * max(1, heads // tensor_parallel) * width * cache_bytes  # keys and values
                layers.append(CacheLayers(count=count, token_bytes=token, window=window or None))
        return layers

    @classmethod
    def of(cls, name: str, config: PretrainedConfig, parameters: int, published: str | None = None) -> ServedModel:
        """Read a decoder's transformers config. Raises UserError for other models."""
        text = config.get_text_config()
        hidden: int = getattr(text, "hidden_size", None) or 0
        is_decoder = not getattr(config, "is_encoder_decoder", False)
        refuse_unless(is_decoder and hidden > 0 and bool(getattr(text, "vocab_size", None)), name)
        tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, text))
        table = text.vocab_size * hidden * (1 if tied else 2)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "ffn_hidden_size", None) or 4 * hidden
        inner = max(inner) if isinstance(inner, list) else inner
        expert_layers = _expert_layers(text)
        experts = next((getattr(text, key) for key in EXPERTS if getattr(text, key, None)), 0) if expert_layers else 0
        positions = max_positions(config)
        heads = of_all_layers(text, "num_attention_heads") or 0
        width = of_all_layers(text, "head_dim") or hidden // (heads or 1)
        is_rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)
        matrices = 2 if text.model_type in PLAIN_MLP_TYPES else 3
        return cls(
            name=name,
            parameters=parameters,
            vocabulary=text.vocab_size,
            hidden=hidden,
            mlp=matrices * inner,
            experts=experts,
            experts_of_token=getattr(text, "num_experts_per_tok", 0) or 0 if experts else 0,
            expert=(getattr(text, "moe_intermediate_size", None) or inner) if experts else 0,
            expert_layers=expert_layers if experts else 0,
            expert_matrices=matrices,
            table=table,
            published=published,
            reads_images=hasattr(config, "vision_config"),
            positions=positions,
            rope_bytes=(positions or 0) * width * ROPE_BYTES if is_rotary else 0,  # a table of sines and cosines
            heads=heads,
            kinds=tuple((count, *kind) for kind, count in Counter(_layers(text)).items()),
        )


def refuse_unless(decoder: bool, name: str) -> None:
    """Raise UserError if a model is not a decoder."""
    if not decoder:
        message = f"{name} is not a decoder that generates text; --serve and --method need a decoder"
        raise UserError(Problem(kind="usage", message=message, hint="name a language model", where="MODEL"))


def unquantized_modules(quantization: object) -> tuple[str, ...]:
    """Return the patterns of modules that a `quantization_config` leaves in 16 bits.

    The keys are those of transformers, compressed-tensors, bitsandbytes and ModelOpt. Raises UserError for a pattern
    that is not a valid regular expression.
    """
    if not isinstance(quantization, Mapping):
        return ()
    keys = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules")
    lists = [quantization.get(key) for key in keys]
    patterns = tuple(str(word) for words in lists if isinstance(words, list | tuple) for word in words)
    for pattern in patterns:
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except re.error as error:
            message = f"the pattern {pattern!r} is no regular expression: {error}"
            where = "quantization_config in config.json"
            raise UserError(Problem(kind="bad-value", message=message, hint="correct it", where=where)) from None
    return patterns


def matches(module: str, pattern: str) -> bool:
    """Return whether `pattern` matches a module or one that contains it.

    A pattern is "re:...", a name with *, or some parts of a dotted name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."


def published_format(quantization: object) -> str | None:
    """Return the format of weights by their `quantization_config`; None if not quantized.

    The format is a key of BITS, or else the name of the method.
    """
    if not isinstance(quantization, Mapping):
        return str(quantization) if quantization else None
    method, bits = str(quantization.get("quant_method") or ""), str(quantization.get("bits"))
    if method == "bitsandbytes":
        return "nf4" if quantization.get("load_in_4bit") else "int8"
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(quantization.get("quant_algo")), method)
    if method == "compressed-tensors":
        groups = quantization.get("config_groups")
        named = groups.values() if isinstance(groups, Mapping) else ()
        weights_of_groups = [group.get("weights") for group in named if isinstance(group, Mapping)]
        kinds = {f"{weights.get('type')}{weights.get('num_bits')}" for weights in weights_of_groups if weights}
        known = {"float8": "fp8", "int8": "int8", "int4": "w4a16", "float4": "nvfp4"}
        return known.get(kinds.pop(), method) if len(kinds) == 1 else method
    if method in ("awq", "gptq", "auto-round", "auto_round"):
        return {"8": "int8", "4": "w4a16"}.get(bits, f"{method} of {bits} bits")
    return {"fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4"}.get(method, method) or None


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _expert_layers(text: PretrainedConfig) -> int:
    """Return the number of layers with experts, if the model has experts."""
    layers, period = text.num_hidden_layers, getattr(text, "expert_layer_period", None)
    if period:  # Jamba
        return len(range(text.expert_layer_offset, layers, period))
    if text.model_type == "nemotron_h":
        return text.layers_block_type.count("moe")
    return layers - (getattr(text, "first_k_dense_replace", 0) or 0)  # DeepSeek's first layers have none


def _layers(text: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the kind and the sizes of each cache (see `ServedModel.kinds`)."""
    caches = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)  # other layers read these
    names = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [None] * caches
    windowed = getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None)
    layers = getattr(text, "per_layer_config", None) or [text] * caches  # Gemma 4 has other heads in some layers
    for name, layer in zip(names[:caches], layers, strict=False):
        query = getattr(layer, "num_attention_heads", None) or 0
        # All heads may share one pair of keys and values, except in newer Falcon models, where each group has a pair.
        is_shared = getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False)
        heads = 1 if is_shared else getattr(layer, "num_key_value_heads", None) or query
        if name in ("mlp", "moe"):  # of Nemotron-H, whose layers have either a mixer or an MLP
            continue
        if name in ("linear_attention", "mamba", "conv") or not query:
            yield "state", _state(text)
            continue
        if text.model_type == "falcon_h1":  # a state and attention in each layer
            yield "state", _state(text)
        width = getattr(layer, "head_dim", None) or text.hidden_size // query
        if latent := getattr(text, "kv_lora_rank", None):
            yield "latent", (latent + text.qk_rope_head_dim,)
        elif name == "chunked_attention":
            yield "window", (heads, width, text.attention_chunk_size)
        elif windowed and name in ("sliding_attention", None):
            yield "window", (heads, width, text.sliding_window)
        else:
            yield "full", (heads, width, 0)


# The formulas are those of layers/mamba/mamba_utils.py.
def _state(text: PretrainedConfig) -> tuple[int, ...]:
    """Return the 2-byte elements of a sequence's convolution and state in one layer."""
    # Each element of a float32 state counts as two elements. The published configs of Qwen3.5 set float32.
    dtypes = [getattr(text, key, None) for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")]
    wide_state = 2 if "float32" in dtypes or (not any(dtypes) and text.model_type.startswith("qwen3_5")) else 1
    if getattr(text, "conv_L_cache", None):  # LFM2's short convolutions
        return (text.hidden_size * (text.conv_L_cache - 1),)
    if getattr(text, "linear_num_value_heads", None):  # gated delta net
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return (2 * keys + values) * (text.linear_conv_kernel_dim - 1), wide_state * values * text.linear_key_head_dim
    if getattr(text, "mamba_n_heads", None):  # Mamba 2
        inner = text.mamba_n_heads * text.mamba_d_head
        convolved = inner + 2 * text.mamba_n_groups * text.mamba_d_state
        return convolved * (text.mamba_d_conv - 1), inner * text.mamba_d_state
    if getattr(text, "mamba_num_heads", None):  # Mamba 2 in Nemotron-H
        inner = text.mamba_num_heads * text.mamba_head_dim
        convolved = inner + 2 * text.n_groups * text.ssm_state_size
        return convolved * (text.conv_kernel - 1), wide_state * inner * text.ssm_state_size
    if getattr(text, "mamba_expand", None):  # Mamba 1 in Jamba
        inner = text.mamba_expand * text.hidden_size
        return inner * (text.mamba_d_conv - 1), inner * text.mamba_d_state
    inner = text.intermediate_size
    return inner * (text.conv_kernel - 1), inner * text.state_size
