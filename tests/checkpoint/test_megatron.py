"""Shares of Megatron's tensor parallel ranks are joined to the weights with which one rank computes the same."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, silu

from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.full_state import FullState
from zerofit.spec.errors import UserError
from zerofit.spec.run_folder import Layout

HIDDEN, HEADS, VOCAB, LENGTH = 16, 4, 24, 5
EMBED = "tied_modules.embed"


def full_weights(gated: bool, inner: int) -> dict[str, torch.Tensor]:
    """A GPT of one layer with the names of Megatron-DeepSpeed's pipeline."""
    torch.manual_seed(1)
    shapes = {
        f"{EMBED}.word_embeddings.weight": (VOCAB, HIDDEN),
        f"{EMBED}.position_embeddings.weight": (LENGTH, HIDDEN),
        "2.input_layernorm.weight": (HIDDEN,),
        "2.input_layernorm.bias": (HIDDEN,),
        "2.self_attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
        "2.self_attention.query_key_value.bias": (3 * HIDDEN,),
        "2.self_attention.dense.weight": (HIDDEN, HIDDEN),
        "2.self_attention.dense.bias": (HIDDEN,),
        "2.mlp.dense_h_to_4h.weight": ((1 + gated) * inner, HIDDEN),
        "2.mlp.dense_h_to_4h.bias": ((1 + gated) * inner,),
        "2.mlp.dense_4h_to_h.weight": (HIDDEN, inner),
        "2.mlp.dense_4h_to_h.bias": (HIDDEN,),
        "3.weight": (HIDDEN,),
        "3.bias": (HIDDEN,),
        "4.lm_head.weight": (VOCAB, HIDDEN),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def rank_weights(weights: dict[str, torch.Tensor], rank: int, ranks: int, gated: bool) -> dict[str, torch.Tensor]:
    """A rank's shares, as Megatron's layers initialize them."""
    own = dict(weights)
    for name, tensor in weights.items():
        if any(part in name for part in ("word_embeddings", "query_key_value", "lm_head")):
            own[name] = tensor.chunk(ranks)[rank]  # an attention head's query, key and value are neighbors
        elif "h_to_4h" in name:
            halves = tensor.chunk(1 + gated)
            own[name] = torch.cat([half.chunk(ranks)[rank] for half in halves])
        elif name.endswith(("self_attention.dense.weight", "4h_to_h.weight")):
            own[name] = tensor.chunk(ranks, dim=1)[rank]
    return {name: tensor.clone() for name, tensor in own.items()}


def logits(shares: list[dict[str, torch.Tensor]], gated: bool) -> torch.Tensor:
    """What the ranks compute together, (LENGTH, VOCAB): sums stand for Megatron's all-reduces."""
    first, tokens = shares[0], torch.arange(LENGTH) * 4 % VOCAB
    rows = VOCAB // len(shares)
    x = first[f"{EMBED}.position_embeddings.weight"].clone()
    for rank, own in enumerate(shares):
        mine = (tokens // rows == rank)[:, None]
        x += own[f"{EMBED}.word_embeddings.weight"][tokens % rows] * mine
    normed = layer_norm(x, (HIDDEN,), first["2.input_layernorm.weight"], first["2.input_layernorm.bias"])
    x = x + first["2.self_attention.dense.bias"] + sum(attention(own, normed) for own in shares)
    x = x + first["2.mlp.dense_4h_to_h.bias"] + sum(feed_forward(own, x, gated) for own in shares)
    x = layer_norm(x, (HIDDEN,), first["3.weight"], first["3.bias"])
    return torch.cat([x @ own["4.lm_head.weight"].T for own in shares], dim=-1)


def attention(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    mixed = x @ own["2.self_attention.query_key_value.weight"].T + own["2.self_attention.query_key_value.bias"]
    query, key, value = mixed.view(LENGTH, -1, 3, HIDDEN // HEADS).unbind(2)
    scores = torch.einsum("qhd,khd->hqk", query, key).softmax(-1)
    return torch.einsum("hqk,khd->qhd", scores, value).flatten(1) @ own["2.self_attention.dense.weight"].T


def feed_forward(own: dict[str, torch.Tensor], x: torch.Tensor, gated: bool) -> torch.Tensor:
    inner = x @ own["2.mlp.dense_h_to_4h.weight"].T + own["2.mlp.dense_h_to_4h.bias"]
    if gated:
        gate, up = inner.chunk(2, dim=-1)
        return silu(gate) * up @ own["2.mlp.dense_4h_to_h.weight"].T
    return gelu(inner) @ own["2.mlp.dense_4h_to_h.weight"].T


def saved(folder, shares):
    for rank, own in enumerate(shares):
        state = {
            "module": {name: tensor.float() for name, tensor in own.items()},
            "buffer_names": [],
            "optimizer": None,
        }
        state |= {"global_steps": 3, "dp_world_size": 1, "mp_world_size": len(shares)}
        (folder / "global_step3").mkdir(exist_ok=True)
        torch.save(state, folder / "global_step3" / f"mp_rank_{rank:02}_model_states.pt")
    (folder / "latest").write_text("global_step3")
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("gated", "inner"), [(False, 4 * HIDDEN), (True, 4 * HIDDEN), (True, 24)])
def test_shares_are_joined(tmp_path, ranks, gated, inner):
    weights = full_weights(gated, inner)
    shares = [rank_weights(weights, rank, ranks, gated) for rank in range(ranks)]
    assert torch.allclose(logits(shares, gated), logits([weights], gated))
    state = FullState(saved(tmp_path, shares))
    assert Checkpoint(tmp_path).describe().layout == Layout(dp=1, tp=ranks)
    assert {name: state.shape(name) for name in state.names} == {n: tuple(t.shape) for n, t in weights.items()}
    assert [name for name, tensor in weights.items() if not torch.equal(state.read(name), tensor.float())] == []


def test_unknown_names_are_refused(tmp_path):
    shares = [rank_weights(full_weights(False, 64), rank, 2, False) for rank in range(2)]
    for own in shares:
        own["2.mlp.w3.weight"] = torch.ones(HIDDEN, 8)
    with pytest.raises(UserError, match=r"without rules to join 2\.mlp\.w3\.weight"):
        FullState(saved(tmp_path, shares))
