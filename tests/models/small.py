"""Small versions of every family, and the inputs they take."""

import torch

from zerofit.models.inputs import ImageInputs, Inputs, TextInputs

TEXT = TextInputs(vocab_size=90, seq_len=12)
IMAGES = ImageInputs(channels=3, size=32, classes=5)
_ROPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_GPT2 = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}

# name: the model, its --model-args
TRANSFORMERS: dict[str, tuple[str, dict]] = {
    "llama": ("llama-tiny", {}),
    "llama tied, scaled rope": ("llama-3.2-1b", {**_ROPE, "head_dim": 8}),
    "qwen2": ("qwen2.5-7b", _ROPE),
    "qwen2 tied": ("qwen2.5-0.5b", _ROPE),
    "mixtral": ("mixtral-8x7b", _ROPE),
    "mixtral with a window": ("mixtral-8x7b", {**_ROPE, "sliding_window": 4}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2 untied": ("gpt2", {**_GPT2, "tie_word_embeddings": False}),
    "bert": ("bert-base", {**_ENCODER, "vocab_size": 100}),
    "bert untied": ("bert-base", {**_ENCODER, "vocab_size": 100, "tie_word_embeddings": False}),
    "vit": ("vit-b-16-hf", _ENCODER),
}

CNNS = ["simplecnn", "lenet", "mlp", "resnet18-small", "resnet18", "resnet50", "vgg11_bn"]


def inputs_of(task: str) -> Inputs:
    return IMAGES if task == "image" else TEXT


def batch_of(inputs: Inputs, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    if isinstance(inputs, ImageInputs):
        return torch.randn(count, inputs.channels, inputs.size, inputs.size, generator=generator)
    return torch.randint(0, inputs.vocab_size, (count, inputs.seq_len), generator=generator)
