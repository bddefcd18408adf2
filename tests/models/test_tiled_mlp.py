"""MLPs in tiles against the same model without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.train.small import LLAMA_SIZES
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.checkpointing import keep_on_host
from zerofit.models.inputs import TextInputs
from zerofit.models.tiled_mlp import tile_mlps

LENGTH, TILE = 20, 6
TEXT = TextInputs(vocab_size=64, seq_len=LENGTH)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(input_ids=x).logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_give_the_gradients_of_the_whole(checkpointing):
    torch.manual_seed(0)
    plain = build(find("llama-tiny"), TEXT, LLAMA_SIZES, checkpointing=checkpointing).double().train()
    tiled = copy.deepcopy(plain)
    tile_mlps(tiled, TILE)
    if checkpointing:
        keep_on_host(tiled)
    lengths: list[int] = []
    tiled.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    x = torch.randint(64, (2, LENGTH))
    torch.testing.assert_close(gradients(tiled, x), gradients(plain, x), rtol=1e-10, atol=1e-12)
    assert set(lengths) == {TILE, LENGTH % TILE} and len(lengths) > 2 * (LENGTH // TILE)  # each tile more than once
    assert list(tiled.state_dict()) == list(plain.state_dict())


def test_between_forward_and_backward_less_is_kept():
    """Beside the input of each tile nothing of an MLP is kept."""

    def kept(tile: int | None) -> int:
        with torch.device("meta"):
            mlp = build(find("llama-tiny"), TEXT, LLAMA_SIZES).model.layers[0]
            if tile:
                tile_mlps(mlp, tile)
            sizes: dict[int, int] = {}
            own = {p.untyped_storage()._cdata for p in mlp.parameters()}

            def note(saved: torch.Tensor) -> torch.Tensor:
                storage = saved.untyped_storage()
                if storage._cdata not in own:
                    sizes[storage._cdata] = storage.nbytes()
                return saved

            x = torch.empty(1, LENGTH, LLAMA_SIZES["hidden_size"], requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
                held = mlp.mlp(x)
            assert held.shape == x.shape
            return sum(sizes.values())

    assert kept(TILE) <= 4 * LENGTH * LLAMA_SIZES["hidden_size"] < kept(None)
