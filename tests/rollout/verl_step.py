"""A step of verl 0.9 with FSDP 1: old log-probs, then training (verl/workers/engine/fsdp/transformer_impl.py)."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

SIZES = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}


class CrossEntropy(torch.autograd.Function):
    """flash-attn's cross-entropy, whose gradient overwrites the logits."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx, grads):
        return ctx.saved_tensors[0].mul_(grads.to(torch.bfloat16).unsqueeze(1))


def forward(model, inputs):
    output = model(input_ids=inputs, use_cache=False)
    logits = output.logits.flatten(0, 1)
    return CrossEntropy.apply(logits / torch.ones_like(logits[:, :1])).sum()


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
config = Qwen2Config(**SIZES, num_hidden_layers=2, vocab_size=151_936, tie_word_embeddings=True)
model = FullyShardedDataParallel(
    AutoModelForCausalLM.from_config(config, dtype=torch.float32),
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer}),
    device_id=device,
    mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
for _ in range(2):
    inputs = torch.randint(0, 151_936, (2, 1024), device=device)
    with torch.no_grad():
        forward(model, inputs)
    for _ in range(4):
        forward(model, inputs).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
