"""Blocks of transformers models as modules of one tensor in and out: masks and positions follow from its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers.models.bert.modeling_bert import BertEmbeddings, BertLMPredictionHead


class RotaryBlock(nn.Module):
    """A decoder block of Llama, Qwen, Mistral or Mixtral; hidden states (batch, seq_len, hidden_size) in and out."""

    def __init__(self, block: nn.Module, rotary: nn.Module, config: Any, index: int):
        super().__init__()
        self.block, self.rotary = block, rotary  # the rotary embedding has no parameters, so every block can hold it
        self.config = config
        kinds = getattr(config, "layer_types", None)
        windowed = getattr(config, "sliding_window", None) is not None
        self.sliding = kinds[index] == "sliding_attention" if kinds else windowed

    def forward(self, x: Tensor) -> Tensor:
        """Run the block; positions count from 0, the mask is causal, in a sliding window where the block has one."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        make_mask = create_sliding_window_causal_mask if self.sliding else create_causal_mask
        return self.block(
            x,
            attention_mask=_mask(make_mask, self.config, x, position_ids=positions),
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )


class GPT2Positions(nn.Module):
    """Adds learned positions to token embeddings (batch, seq_len, hidden_size)."""

    def __init__(self, wpe: nn.Embedding, drop: nn.Module):
        super().__init__()
        self.wpe, self.drop = wpe, drop

    def forward(self, x: Tensor) -> Tensor:
        """Add the embeddings of positions, which count from 0."""
        return self.drop(x + self.wpe(torch.arange(x.shape[1], device=x.device).unsqueeze(0)))


class GPT2Block(nn.Module):
    """A decoder block of GPT-2; hidden states (batch, seq_len, hidden_size) in and out."""

    def __init__(self, block: nn.Module, config: Any):
        super().__init__()
        self.block, self.config = block, config

    def forward(self, x: Tensor) -> Tensor:
        """Run the block under a causal mask."""
        from transformers.masking_utils import create_causal_mask

        return self.block(x, attention_mask=_mask(create_causal_mask, self.config, x))


class EncoderBlock(nn.Module):
    """A block of BERT or ViT; hidden states (batch, length, hidden_size) in and out, every position sees all."""

    def __init__(self, block: nn.Module, config: Any):
        super().__init__()
        self.block, self.config = block, config

    def forward(self, x: Tensor) -> Tensor:
        """Run the block without padding."""
        from transformers.masking_utils import create_bidirectional_mask

        return self.block(x, _mask(create_bidirectional_mask, self.config, x))


class BertEmbeddingSum(nn.Module):
    """The rest of BERT's embedding (batch, seq_len, hidden_size): segment 0, learned positions, a norm."""

    def __init__(self, embeddings: BertEmbeddings):
        super().__init__()
        self.token_type_embeddings = embeddings.token_type_embeddings
        self.position_embeddings = embeddings.position_embeddings
        self.LayerNorm, self.dropout = embeddings.LayerNorm, embeddings.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Sum in the order in which BERT sums."""
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        segments = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        x = x + self.token_type_embeddings(segments) + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(x))


class Matrix(nn.Module):
    """The weight of a linear layer alone.

    DeepSpeed leaves a tied layer's parameters out of the gradient norm on all stages but one, so that a bias in it
    would not count at all.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., in_features) to (..., out_features)."""
        return functional.linear(x, self.weight)


class BertBias(nn.Module):
    """The bias of BERT's output matrix, under both of the names it has when weights are tied."""

    def __init__(self, head: BertLMPredictionHead):
        super().__init__()
        self.decoder_bias, self.bias = head.decoder.bias, head.bias

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias to logits (batch, seq_len, vocab_size)."""
        return x + self.decoder_bias


class FirstToken(nn.Module):
    """ViT's head: hidden states (batch, length, hidden_size) to logits (batch, classes)."""

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Classify from the class token."""
        return self.classifier(x[:, 0, :])


def _mask(make: Callable[..., Tensor | None], config: Any, x: Tensor, **more: Any) -> Tensor | None:
    """A mask for hidden states without padding; None where the attention kernel masks by itself."""
    return make(config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, **more)
