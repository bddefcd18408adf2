"""Accelerate's FSDP2, as its guide writes it."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM

wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrap))
model = AutoModelForCausalLM.from_pretrained("llama")
optimizer = torch.optim.AdamW(model.parameters())
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 64
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
for batch in loader:
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
