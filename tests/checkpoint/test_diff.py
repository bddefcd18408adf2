"""Differences that are put there on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.made import Made, make
from zerofit.checkpoint.diff import compare, diff
from zerofit.checkpoint.export import export
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run

INPUTS = TextInputs(vocab_size=260, seq_len=8)
ARGS = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 260, "bos_token_id": None, "eos_token_id": None}


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of a tiny GPT-2, whose tensors a function may change before."""

    def make_one(name, change=lambda name, kind, tensor: tensor, ranks=2):
        torch.manual_seed(0)
        model = build(find("gpt2"), INPUTS, ARGS)
        state = model.state_dict()
        run = Run(model="gpt2", model_args=ARGS)
        what = Made(model=model, run=run, task="causal-lm", inputs=INPUTS, ranks=ranks)
        return make(tmp_path / name, what, lambda n, kind, _: change(n, kind, state[n].clone()))

    return make_one


def test_the_same_in_other_pieces_is_equal(checkpoint):
    found = diff(checkpoint("a"), checkpoint("b", ranks=3), states=True)
    assert found.equal and {row.kind for row in found.rows} == {"fp32", "exp_avg", "exp_avg_sq"}
    assert len(found.rows) == 3 * 16  # a block's 12, two embeddings, the last norm's two


def test_every_kind_of_difference_is_found(checkpoint, tmp_path):
    def change(name, kind, tensor):
        if name == "transformer.h.0.mlp.c_fc.weight" and kind == "exp_avg":
            tensor[2, 3] += 0.5
        if name == "transformer.wpe.weight" and kind == "fp32":
            tensor[1, 1] *= 1 + 1e-3
        return tensor

    a, b = checkpoint("a"), checkpoint("b", change)
    assert [r.name for r in diff(a, b).rows if r.apart] == ["transformer.wpe.weight"]
    found = diff(a, b, states=True)
    one, two = (row for row in found.rows if row.apart)
    assert (one.name, one.kind, one.apart) == ("transformer.wpe.weight", "fp32", 1)
    assert one.max_rel == pytest.approx(1e-3, rel=1e-3) and one.elements == 1024 * 8
    assert (two.kind, two.apart, two.max_abs) == ("exp_avg", 1, pytest.approx(0.5))


def test_a_checkpoint_against_what_was_exported_from_it(checkpoint, tmp_path):
    a = checkpoint("a")
    export(a, tmp_path / "full")
    assert diff(a, tmp_path / "full").equal  # the tied output matrix is not missed
    export(a, tmp_path / "half", "bf16")
    found = diff(tmp_path / "full", tmp_path / "half")
    assert not found.equal and not found.only_in_a and 0 < max(r.max_rel for r in found.rows) <= 2**-8
    with pytest.raises(UserError, match="no optimizer states"):
        diff(a, tmp_path / "full", states=True)


def test_the_optimizers_file_next_to_safetensors_is_compared(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    model(torch.ones(1, 3)).sum().backward()
    for name in ("a", "b"):
        optimizer.step()
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / name / "model.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / name / "optimizer.pt")
    found = diff(tmp_path / "a", tmp_path / "b", states=True)
    assert {(row.name, row.kind) for row in found.apart} == {
        (name, kind) for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")
    }


def test_names_and_shapes(tmp_path):
    for name, tensors in {
        "a": {"x": torch.ones(2), "y": torch.ones(3)},
        "b": {"y": torch.ones(4), "z": torch.ones(1)},
    }.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.only_in_a, found.only_in_b, found.shapes) == (["x"], ["z"], [("y", (3,), (4,))]) and not found.equal


def test_numbers_that_are_none_or_signed_zeros():
    a = torch.tensor([math.nan, math.inf, 0.0, 1.0])
    assert compare("x", "fp32", a, a.clone()).apart == 0
    row = compare("x", "fp32", a, torch.tensor([math.nan, math.inf, -0.0, 1.0]))
    assert (row.apart, row.max_abs, row.max_rel) == (1, 0.0, 0.0)
    assert compare("x", "fp32", a, torch.tensor([0.0, math.inf, 0.0, 1.0])).max_abs == math.inf
    row = compare("n", "fp32", torch.tensor(5), torch.tensor(4))
    assert (row.apart, row.elements, row.max_abs) == (1, 1, 1.0)
    row = compare("c", "fp32", torch.tensor([1 + 2j]), torch.tensor([1 + 5j]))
    assert (row.apart, row.max_abs) == (1, 3.0)
