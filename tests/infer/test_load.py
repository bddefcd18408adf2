"""Weights in memory, on the disk, in other files and types: the same model whatever the way."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.utils import logging

from tests.infer.small import CPU, SAMPLES, data_of, figures, loaded, reference, save, save_small, session
from tests.models.small import TRANSFORMERS
from zerofit.infer.evaluate import EvalSamples, evaluate, figures_of
from zerofit.infer.guards import quiet
from zerofit.infer.saved_model import open_saved
from zerofit.spec.errors import RunFailed, UserError
from zerofit.spec.events import Reporter

OWN = "tests.infer.own"
VISION = ("simplecnn", f"{OWN}:tiny_vit", f"{OWN}:tiny_swin", f"{OWN}:tiny_densenet")
FLAWLESS = {"rel": 1e-6, "abs": 1e-7}


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_afterwards_as_before(shown):
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        with quiet():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() is shown
    finally:
        logging.enable_progress_bar()


@pytest.mark.versions
@pytest.mark.parametrize("key", ["llama tied, scaled rope", "gpt2", "bert", "mixtral", "vit"])
def test_transformers_models_from_the_disk(key, tmp_path):
    model = save_small(tmp_path / "model", key)
    wanted = reference(model, data_of(open_saved(tmp_path / "model", trust_model_code=True)))
    for share in (0.0, 0.6):
        mine, placement = loaded(tmp_path / "model", share, tmp_path)
        assert "disk" in placement.device_map.values()
        got = figures(tmp_path / "model", mine)
        assert (got["loss"], got["accuracy"]) == pytest.approx(wanted[:2], **FLAWLESS)
        assert got["samples"] == SAMPLES
        if key == "vit":
            assert got["top5_accuracy"] == pytest.approx(wanted[2])
        else:
            assert got["perplexity"] == pytest.approx(torch.tensor(wanted[0]).exp().item(), rel=1e-5)


@pytest.mark.parametrize("name", VISION)
def test_other_models_from_the_disk(name, tmp_path):
    model = save(tmp_path / "model", name)
    wanted = reference(model, data_of(open_saved(tmp_path / "model", trust_model_code=True)))
    for share in (0.0, 0.6, 2.0):
        mine, placement = loaded(tmp_path / "model", share, tmp_path)
        assert ("disk" in placement.device_map.values()) == (share < 1)
        got = figures(tmp_path / "model", mine)
        assert (got["loss"], got["accuracy"], got["top5_accuracy"]) == pytest.approx(wanted, **FLAWLESS)


@pytest.mark.parametrize(
    ("key", "share"), [("bert", 0.0), ("mixtral", 0.0), ("lenet", 2.0), (f"{OWN}:tiny_densenet", 0.0)]
)
def test_lower_precision_is_the_model_cast(key, share, tmp_path):
    """A reference that torch has cast; from the disk the weights are first written in that type."""
    model = save_small(tmp_path / "model", key) if key in TRANSFORMERS else save(tmp_path / "model", key)
    if key in TRANSFORMERS:
        model = model.bfloat16()
    else:
        for module in model.modules():
            if not isinstance(module, torch.nn.BatchNorm2d) and next(module.children(), None) is None:
                module.bfloat16()
    mine, placement = loaded(tmp_path / "model", share, tmp_path, torch.bfloat16)
    assert ("disk" in placement.device_map.values()) == (share < 1)
    assert bool(list(tmp_path.glob("*/rewritten/*.safetensors"))) == (share < 1)
    data = data_of(open_saved(tmp_path / "model", trust_model_code=True))
    judged = figures_of(open_saved(tmp_path / "model", trust_model_code=True), mine, torch.bfloat16)
    got = vars(evaluate(mine, judged, data, EvalSamples(at_once=SAMPLES, limit=SAMPLES), CPU, Reporter()))
    assert got["loss"] == pytest.approx(reference(model, data)[0], rel=2e-5)


def test_pickled_weights(tmp_path):
    model = save_small(tmp_path / "model", "gpt2")
    wanted = reference(model, data_of(open_saved(tmp_path / "model", trust_model_code=True)))[0]
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    for share in (0.0, 2.0):
        mine, _ = loaded(tmp_path / "model", share, tmp_path)
        assert figures(tmp_path / "model", mine)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_several_files(tmp_path):
    model = save_small(tmp_path / "model", "llama")
    wanted = reference(model, data_of(open_saved(tmp_path / "model", trust_model_code=True)))[0]
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    mine, _ = loaded(tmp_path / "model", 0.3, tmp_path)
    assert figures(tmp_path / "model", mine)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_weights_of_another_model_are_refused(tmp_path):
    """transformers alone would draw what lacks at random."""
    save_small(tmp_path / "model", "llama")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 5, "layer_types": None}))
    with pytest.raises(UserError, match=r"lacks weights of the model: model\.layers\.4"):
        loaded(tmp_path / "model", 2.0, tmp_path)


def test_other_shapes_are_refused(tmp_path):
    save(tmp_path / "model", "lenet")
    about = tmp_path / "model" / "zerofit.json"
    read = json.loads(about.read_text())
    about.write_text(json.dumps({**read, "inputs": {**read["inputs"], "classes": 9}}))
    with pytest.raises(UserError, match=r"\(8, 84\) in model\.safetensors, \(9, 84\) in the model"):
        loaded(tmp_path / "model", 2.0, tmp_path)


def test_weights_used_outside_of_their_module_are_explained(tmp_path):
    save(tmp_path / "model", f"{OWN}:Borrower")
    whole, _ = loaded(tmp_path / "model", 2.0, tmp_path)
    assert figures(tmp_path / "model", whole)["samples"] == SAMPLES
    spread, _ = loaded(tmp_path / "model", 0.0, tmp_path)
    with pytest.raises(RunFailed, match="uses another module's weights") as failed:
        figures(tmp_path / "model", spread)
    assert "--max-memory" in failed.value.problem.hint


def test_nothing_is_left_in_the_way(tmp_path):
    """A placement without a disk writes nothing."""
    save_small(tmp_path / "model", "llama")
    (tmp_path / "scratch").mkdir()
    session(tmp_path / "model", 2.0, tmp_path / "scratch").load(0, "")
    assert not list((tmp_path / "scratch").rglob("*.*"))
