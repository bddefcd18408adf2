"""Build torchtitan's Llama and Qwen 3 as one rank runs them, for traces of memory and time.

References are to torchtitan 0.3. Weights have no values, so the model cannot be trained.

    embedding -> blocks -> norm -> head and loss

The head and the loss process one chunk of the sequence after another. Each chunk has its own backward. Queries, keys
and values come from one matrix. Rotary embeddings are computed in float32, and each block has its own table. Attention
is a fused kernel (flex_attention).

With tensor parallelism the ranks split the vocabulary. Outside of matrix products, they also split the sequence:

    norm (a part of the tokens) -> all-gather -> a part of the heads or columns -> reduce-scatter -> norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, noop_context_fn

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.autograd import Context
from zerofit.models.catalog import ModelError
from zerofit.models.checkpointing import selective_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Collective = Callable[[Tensor, int], Tensor]  # of a rank's tokens and the number of ranks
CHUNKS = 8  # of the sequence, in the loss (components/loss.py, ChunkedLossWrapper)


class TitanModel(nn.Module):
    """A rank's part of the decoder that a transformers config describes.

    `seq_len`: length of the rotary tables. `tp`: number of ranks that divide matrices and tokens. Raises ModelError if
    `tp` does not divide them.
    """

    def __init__(self, config: PreTrainedConfig, checkpointing: Checkpointing, seq_len: int, tp: int):
        super().__init__()
        sizes = (config.vocab_size, config.intermediate_size, config.num_key_value_heads, seq_len)
        if any(size % tp for size in sizes) or seq_len % CHUNKS:
            message = f"{tp} (tensor parallel) does not divide all of {', '.join(map(str, sizes))}"
            message += f", or {CHUNKS} does not divide {seq_len} tokens"
            raise ModelError("profile-tp", message)
        self.config, self.tp = config, tp
        self.tok_embeddings = nn.Embedding(config.vocab_size // tp, config.hidden_size)
        blocks = (_Block(config, seq_len, tp) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(_Checkpointed(block, checkpointing) for block in blocks)
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // tp, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as models of transformers do."""
        return self.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of a rank's part of the tokens (models/common/embedding.py)."""
        if self.tp == 1:
            return self.tok_embeddings(tokens)
        # ids of other ranks get a zero vector here, and their embedding from the sum over ranks
        is_mine = (tokens >= 0) & (tokens < self.tok_embeddings.num_embeddings)
        embedded = self.tok_embeddings(tokens.clamp(0, self.tok_embeddings.num_embeddings - 1))
        return _reduced(embedded * is_mine.unsqueeze(-1).to(embedded.dtype), self.tp)

    def loss(
        self, tokens: Tensor, labels: Tensor, chunks: Callable[[int, int], Iterable[int]], begin: Callable[[], None]
    ) -> Tensor:
        """Return the loss.

        Its backward runs through the blocks only; the head's backward has already run. `tokens`, `labels`: (batch,
        sequence). `chunks`: called with the number of chunks and a step of 1, returns the indices of the chunks to run.
        `begin`: called before the first chunk.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        hidden = self._embedded(tokens)
        for block in self.layers:
            hidden = block(hidden, positions)
        hidden = _gathered(self.norm(hidden), self.tp)
        step = hidden.shape[1] // CHUNKS
        pieces = [part.contiguous().detach().requires_grad_() for part in hidden.split(step, dim=1)]
        targets = [part.contiguous() for part in labels.split(step, dim=1)]
        gradient = torch.zeros_like(hidden, dtype=torch.float32)
        begin()
        starts = list(chunks(CHUNKS, 1))
        for n in starts:
            # only the last chunk completes the gradient; earlier ones are added up in float32 by FSDP2
            weight = self.lm_head.weight if n == starts[-1] else self.lm_head.weight.detach().requires_grad_()
            logits = functional.linear(pieces[n], weight)
            total = self._loss_of(logits.flatten(0, 1).float(), targets[n].flatten())
            total.backward()
            del total, weight  # frees this chunk's graph before the next chunk's forward
            part = pieces[n].grad
            assert part is not None
            gradient[:, n * step : (n + 1) * step] = part.to(torch.float32)
            pieces[n].grad = part = None
        return _BlocksLoss.apply(hidden, gradient.to(hidden.dtype))

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.tp > 1:
            return _DividedLoss.apply(logits)
        return functional.cross_entropy(logits, targets, reduction="sum")


class _DividedLoss(torch.autograd.Function):
    """The loss over a part of the vocabulary (_LossParallelCrossEntropy), without small tensors."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        ctx.save_for_backward(shifted - shifted.exp().sum(-1, keepdim=True).log())
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (logs,) = ctx.saved_tensors
        targets = torch.zeros_like(logs)
        return (targets + logs.exp()) * grad


def _gathered(part: Tensor, tp: int) -> Tensor:
    return _Exchanged.apply(part, tp, _all_gather, _reduce_scatter) if tp > 1 else part


def _reduced(whole: Tensor, tp: int) -> Tensor:
    return _Exchanged.apply(whole, tp, _reduce_scatter, _all_gather) if tp > 1 else whole


def _all_gather(part: Tensor, tp: int) -> Tensor:
    """Return the tokens of all ranks, which arrive in one buffer (spmd_types/_collectives.py)."""
    part = part.contiguous()
    return torch.cat(part.new_empty(tp * len(part), *part.shape[1:]).chunk(tp), dim=1)


def _reduce_scatter(whole: Tensor, tp: int) -> Tensor:
    """Return a rank's part of the tokens. Tokens are the first dimension in the collective."""
    sent = whole.movedim(1, 0).contiguous()
    return sent.new_empty(len(sent) // tp, *sent.shape[1:]).movedim(0, 1)


class _ExchangeContext(Context, Protocol):
    tp: int
    back: Collective


class _Exchanged(torch.autograd.Function):
    """Applies `collective` to tokens in forward, and `back` to their gradient in backward."""

    @staticmethod
    def forward(ctx: _ExchangeContext, tokens: Tensor, tp: int, collective: Collective, back: Collective) -> Tensor:
        ctx.tp, ctx.back = tp, back
        return collective(tokens, tp)

    @staticmethod
    def backward(ctx: _ExchangeContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.tp), None, None, None


class _BlocksLoss(torch.autograd.Function):
    """Begins the blocks' backward (_DecoderOutputGradientBackProp)."""

    @staticmethod
    def forward(ctx: Context, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class _Checkpointed(nn.Module):
    """A block with checkpointing. Backward runs the entire block again, since early_stop is off."""

    def __init__(self, block: nn.Module, checkpointing: Checkpointing):
        super().__init__()
        self.block, self.checkpointing = block, checkpointing

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if not self.checkpointing:
            return self.block(x, positions)
        contexts = selective_contexts if self.checkpointing == "selective" else noop_context_fn
        return checkpoint(self.block, x, positions, use_reentrant=False, early_stop=False, context_fn=contexts)


class _Block(nn.Module):
    def __init__(self, config: PreTrainedConfig, seq_len: int, tp: int):
        super().__init__()
        self.tp, width, inner = tp, config.hidden_size, config.intermediate_size // tp
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _Attention(config, seq_len, tp)
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self._attended(self.attention_norm(x), positions)
        return x + self._feed_forward(self.ffn_norm(x))

    def _attended(self, x: Tensor, positions: Tensor) -> Tensor:
        return _reduced(self.attention(_gathered(x, self.tp), positions), self.tp)

    def _feed_forward(self, x: Tensor) -> Tensor:
        tokens = _gathered(x, self.tp)  # of all ranks; `x` stays alive, as with torchtitan
        return _reduced(self.w2(functional.silu(self.w1(tokens)) * self.w3(tokens)), self.tp)


class _Attention(nn.Module):
    def __init__(self, config: PreTrainedConfig, seq_len: int, tp: int):
        super().__init__()
        heads, kv_heads = config.num_attention_heads // tp, config.num_key_value_heads // tp
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shared = heads // kv_heads  # queries of a key
        self.wqkv = nn.Linear(config.hidden_size, (heads + 2 * kv_heads) * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, config.hidden_size, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.width) for _ in range(2)) if config.model_type == "qwen3" else None
        # Llama rotates pairs as complex numbers; Qwen 3 halves of a head by cosine and sine (models/common/rope.py)
        shape = (seq_len, 2 * self.width) if self.norms else (seq_len, self.width // 2)
        table = torch.empty(shape, dtype=torch.float32 if self.norms else torch.complex64)
        self.wqkv.register_buffer("rotary_table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self._projected(x)
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        rotate = _rotated_halves if self.norms else _rotated_pairs
        query, key = rotate(query, key, self._table_of(positions))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        out = _WithMaxima.apply(out, sums)
        return self.wo(out.transpose(1, 2).contiguous().flatten(2))

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Return contiguous queries, keys and values: (batch, sequence, heads, width)."""
        groups = self.wqkv(x).view(*x.shape[:2], -1, self.shared + 2, self.width)
        parts = groups.split([self.shared, 1, 1], dim=-2)
        return [part.reshape(*x.shape[:2], -1, self.width).contiguous() for part in parts]

    def _table_of(self, positions: Tensor) -> Tensor:
        """Return the table's rows of the positions: (batch, sequence, 1, columns)."""
        table, shape = self.wqkv.get_buffer("rotary_table"), (*positions.shape, 1, -1)
        rows = table[None, :, None, :].expand(len(positions), -1, -1, -1)
        return torch.gather(rows, 1, positions[..., None, None].expand(*shape[:3], table.shape[-1]))


class _WithMaxima(torch.autograd.Function):
    """Saves the maxima of scores, which flex_attention's backward needs, too."""

    @staticmethod
    def forward(ctx: Context, out: Tensor, sums: Tensor) -> Tensor:
        # of the ops that selective checkpointing keeps, this one returns as many elements
        ctx.save_for_backward(torch.bmm(sums.flatten(0, 1)[..., None], sums.new_empty(sums[..., 0].numel(), 1, 1)))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _rotated_pairs(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighboring elements as complex numbers (ComplexRoPE.apply_rotary_emb)."""
    pairs = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (query, key)]
    rotated = [torch.view_as_real(pair * table).flatten(3) for pair in pairs]
    return rotated[0].type_as(query), rotated[1].type_as(key)


def _rotated_halves(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both halves of each head (CosSinRoPE.apply_rotary_emb)."""
    cosine, sine = table.chunk(2, dim=-1)
    in_fp32 = [x.float() for x in (query, key)]
    rotated = [x * cosine + _quarter_turned(x) * sine for x in in_fp32]
    return rotated[0].type_as(query), rotated[1].type_as(key)


def _quarter_turned(x: Tensor) -> Tensor:
    """Return (-b, a) for a head (a, b) of two halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
