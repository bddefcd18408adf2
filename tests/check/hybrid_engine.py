"""What DeepSpeed's hybrid engine does with a tiny model of each type: one gloo rank on the CPU. Prints JSON.

The CPU has no inference kernels. Python fallbacks of DeepSpeed replace them. Attention and GELU return only shapes,
because their fallbacks support fewer models than the kernels.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.replace_policy import replace_policies
from deepspeed.ops.transformer.inference.op_binding import SoftmaxContextOp
from deepspeed.ops.transformer.inference.op_binding.base import BaseOp
from deepspeed.ops.transformer.inference.op_binding.gelu_gemm import GELUGemmOp
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CLIPVisionConfig, CLIPVisionModel

from zerofit.train.process_group import compile_no_collectives

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 16},
    "llama": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 2},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 64},
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "hybrid_engine": {"enabled": True},
}


def attend(_: object, query_key_value: torch.Tensor, attn_mask: torch.Tensor, heads: int, *__: Any, **___: Any) -> Any:
    """Return zeros in the kernel's shapes: [batch, tokens, width], and twice [batch, heads, tokens, head size]."""
    batch, tokens, width = query_key_value.shape
    if tokens == 1 and attn_mask.shape[-1] == 1:
        raise RuntimeError("beyond the attention mask")
    cached = query_key_value.new_zeros(batch, heads, tokens, width // 3 // heads)
    return query_key_value.new_zeros(batch, tokens, width // 3), cached, cached


def built(kind: str) -> torch.nn.Module:
    """Return a tiny model of a type."""
    if kind == "clip":
        return CLIPVisionModel(CLIPVisionConfig(**SIZES))
    config = AutoConfig.for_model(kind, **OTHERS.get(kind, {}))
    for name, value in SIZES.items():
        setattr(config, name, value)  # also if the type has its own name for it
    return (AutoModel if "bert" in kind else AutoModelForCausalLM).from_config(config)


def outcome(kind: str) -> str:
    """Return the error of initialize() or generate(); "transformers" if the model's own generate() runs."""
    try:
        model = built(kind)
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
        engine.eval()
        prompt = torch.full((2, 9), 5)
        with torch.no_grad():
            engine.module.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, min_new_tokens=3)
    except (AttributeError, RuntimeError) as error:
        return str(error)
    return "kernels" if engine._inference_containers else "transformers"


def kinds_with_policy() -> list[str]:
    """Return the model types whose layers DeepSpeed replaces by inference kernels."""
    for policy in replace_policies:
        policy(None)
    classes = [policy._orig_layer_class for policy in replace_policies]
    flat = [c for found in classes for c in (found if isinstance(found, list) else [found]) if c is not None]
    return sorted({c.__module__.split(".")[-2] for c in flat})


if __name__ == "__main__":
    compile_no_collectives()
    BaseOp.inference_module = SimpleNamespace()
    SoftmaxContextOp.forward = attend
    GELUGemmOp.forward = lambda _, input, **__: input.clone()
    found = {kind: outcome(kind) for kind in [*kinds_with_policy(), "qwen2"]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)
