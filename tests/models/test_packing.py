"""Documents packed into one sample give the losses and gradients of each by itself, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from zerofit.models.build import build, check_forward, forward_logits
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import TextInputs

ROWS = [[5, 9, 3, 1], [11, 4], [18]]  # lengths of documents; what is left is padding
LENGTH = 18
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-tiny": {**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "gpt2": {**GPT2, "attn_pdrop": 0.0},
    "qwen3-0.6b": {**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8},
    "mistral-7b": {**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": 4, "head_dim": 8},
    # windows and full attention in turns
    "gemma-3-1b": {
        **WIDE,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def packed(documents: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of token ids, labels and positions, padding included."""
    inputs, labels = torch.zeros(len(ROWS), LENGTH).long(), torch.full((len(ROWS), LENGTH), -100)
    positions = torch.zeros(len(ROWS), LENGTH).long()
    for row, parts in enumerate(documents):
        at = 0
        for ids in parts:
            place = slice(at, at + len(ids) - 1)
            inputs[row, place], labels[row, place] = ids[:-1], ids[1:]
            positions[row, place] = torch.arange(len(ids) - 1)
            at = place.stop
        positions[row, at:] = torch.arange(LENGTH - at)
    return inputs, labels, positions


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.versions
@pytest.mark.parametrize("name", SHAPES)
def test_packed_is_as_each_alone(name):
    torch.manual_seed(0)
    model: Any = build(find(name), TextInputs(vocab_size=64, seq_len=LENGTH, packed=True), SHAPES[name])
    documents = [[torch.randint(64, (n + 1,)) for n in row] for row in ROWS]
    alone = sum(
        functional.cross_entropy(model(input_ids=ids[None, :-1], use_cache=False).logits[0], ids[1:], reduction="sum")
        for row in documents
        for ids in row
    )
    expected = gradients(model, alone)
    inputs, labels, positions = packed(documents)
    logits, _ = forward_logits(model, inputs, position_ids=positions)
    together = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
    got = gradients(model, together)
    for key, gradient in expected.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=key)
    blurred, _ = forward_logits(model, inputs)
    assert not torch.allclose(blurred[0], logits[0], atol=1e-3)  # without positions, documents see each other


@pytest.mark.parametrize("name", SHAPES)
def test_models_that_keep_documents_apart_are_taken(name):
    inputs = TextInputs(vocab_size=64, seq_len=LENGTH, packed=True)
    with torch.device("meta"):
        model = build(find(name), inputs, SHAPES[name])
    assert check_forward(model, find(name), inputs)


def test_a_model_that_carries_a_state_is_refused():
    inputs, args = TextInputs(vocab_size=64, seq_len=LENGTH, packed=True), {"hidden_size": 32, "vocab_size": 64}
    source, args = find("mamba-130m"), args | {"num_hidden_layers": 2}
    with torch.device("meta"):
        model = build(source, inputs, args)
    with pytest.raises(ModelError) as caught:
        check_forward(model, source, inputs)
    assert caught.value.kind == "model-packing" and "--no-packing" in caught.value.hint
    assert check_forward(model, source, TextInputs(vocab_size=64, seq_len=LENGTH))
