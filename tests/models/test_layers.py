"""A model cut into layers computes what the whole model computes."""

import json
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import nn

from tests.models.small import CNNS, TEXT, TRANSFORMERS, batch_of, inputs_of
from zerofit.models.build import build, forward_logits
from zerofit.models.catalog import ModelError, find
from zerofit.models.layers import as_layers

EVERY = {**TRANSFORMERS, **{name: (name, {}) for name in [*CNNS, "mlp-table"]}}


@cache
def original(case: str) -> nn.Module:
    name, args = EVERY[case]
    source = find(name)
    torch.manual_seed(5)
    model = build(source, inputs_of(source.task), args)
    if name.startswith("vgg"):  # its first linear layer alone would be most of the test's time
        model.classifier = nn.Sequential(nn.Linear(512 * 49, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 5))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def made(case: str):
    """Two equal models, with dropout off, and a batch."""
    return deepcopy(original(case)), deepcopy(original(case)), batch_of(inputs_of(find(EVERY[case][0]).task))


def run(layers, x):
    for layer in layers:
        x = layer.module(x)
    return x


def tolerance(case: str) -> dict:
    # BERT's layers add the output bias in a step of its own
    return {"rtol": 1e-5, "atol": 1e-6} if case.startswith("bert") else {"rtol": 0.0, "atol": 0.0}


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_and_gradients_are_the_whole_models(case, checkpointing):
    whole, cut, x = made(case)
    layers = as_layers(cut, checkpointing=checkpointing)
    for layer in layers:
        layer.module.train()
    expected, _ = forward_logits(whole.train(), x)
    got = run(layers, x)
    torch.testing.assert_close(got, expected, **tolerance(case))
    torch.manual_seed(1)
    pull = torch.randn_like(expected)
    (expected * pull).sum().backward()
    (got * pull).sum().backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        if grads[name] is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(cut.named_buffers())[name], buffer), name


@pytest.mark.parametrize("case", EVERY)
def test_eval_logits(case):
    whole, cut, x = made(case)
    with torch.no_grad():
        got, expected = run(as_layers(cut.eval()), x), forward_logits(whole.eval(), x)[0]
    torch.testing.assert_close(got, expected, **tolerance(case))


@pytest.mark.parametrize("case", EVERY)
def test_stages_make_up_the_whole_state_dict(case):
    whole, cut, _ = made(case)
    joined = {}
    for layer in as_layers(cut):
        own = layer.module.state_dict()
        assert set(own) == set(layer.names)
        joined |= {layer.names[key]: tensor for key, tensor in own.items()}
    assert set(joined) == set(whole.state_dict())
    for key, tensor in whole.state_dict().items():
        assert torch.equal(joined[key], tensor), key


@pytest.mark.parametrize("case", ["llama tied, scaled rope", "qwen2 tied", "gpt2", "bert"])
def test_tied_layers_share_their_only_parameter(case):
    _, cut, _ = made(case)
    tied = [layer for layer in as_layers(cut) if layer.tied]
    assert len(tied) == 2 and tied[0].tied == tied[1].tied
    first, second = (layer.module.get_parameter(layer.tied_attr) for layer in tied)
    assert first is second
    assert all(len(list(layer.module.parameters())) == 1 for layer in tied)


@pytest.mark.parametrize("case", ["llama", "gpt2 untied", "bert untied", "mixtral"])
def test_untied_models_tie_nothing(case):
    _, cut, _ = made(case)
    assert not [layer.name for layer in as_layers(cut) if layer.tied]


@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_families_without_a_preset(tmp_path, model_type):
    shape = {key: value for key, value in TRANSFORMERS["qwen2"][1].items() if not key.startswith(("bos", "eos"))}
    config = {"model_type": model_type, "head_dim": 8, "sliding_window": 4, **shape}
    if model_type == "qwen3":
        config |= {"use_sliding_window": True, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find(str(tmp_path / "config.json"))
    model = build(source, TEXT, {}).eval()
    x = batch_of(TEXT)
    with torch.no_grad():
        torch.testing.assert_close(run(as_layers(model), x), forward_logits(model, x)[0], rtol=0, atol=0)


def test_layers_of_a_model_without_memory():
    source = find("llama-3.1-405b")
    with torch.device("meta"):
        layers = as_layers(build(source, None, {}))
    assert len(layers) == 126 + 3
    assert sum(p.numel() for layer in layers for p in layer.module.parameters()) == 405_853_388_800


def test_a_model_that_cannot_be_cut():
    with torch.device("meta"):
        model = build(find("swin_t"), None, {})
    with pytest.raises(ModelError) as caught:
        as_layers(model)
    assert caught.value.kind == "pipeline-model"
    assert "SwinTransformer" in caught.value.message and "llama" in caught.value.message
    assert "--pipeline" in caught.value.hint
