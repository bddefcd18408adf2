"""What DeepSpeed's parallelism has been seen to do rightly, by transformers' model_type."""

from __future__ import annotations

# model types whose attention takes position ids down to the kernel and names its kv heads, as Ulysses needs
SEQUENCE_PARALLEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
# model types that AutoTP has been seen to train like one device does; GPT-2 it refuses, ViT fails in forward
TENSOR_PARALLEL_TYPES = ("bert", "llama", "mistral", "qwen2", "qwen3")
