"""Models for text: their inputs, arguments, files, users' own, and the one way to call them."""

import json

import pytest
import torch
from torch import nn

from tests.models.small import IMAGES, TEXT, TRANSFORMERS, batch_of
from zerofit.models.build import (
    build,
    check_forward,
    forward_logits,
    max_positions,
    parameter_count,
    source_max_positions,
)
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import ImageInputs, TextInputs


def refused(name, inputs, args=None):
    with pytest.raises(ModelError) as caught, torch.device("meta"):
        source = find(name)
        check_forward(build(source, inputs, args or {}), source, inputs)
    return caught.value


def small(case):
    name, args = TRANSFORMERS[case]
    torch.manual_seed(0)
    return build(find(name), TEXT if find(name).task != "image" else IMAGES, args)


class Engine(nn.Module):
    """As DeepSpeed's engine does, passes calls on to `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("case", ["llama", "gpt2", "bert", "vit", "mixtral"])
def test_one_call_for_all_also_through_an_engine(case):
    model = small(case).eval()
    x = batch_of(IMAGES if case == "vit" else TEXT)
    expected = model(x).logits
    for caller in (model, Engine(model)):
        logits, aux = forward_logits(caller, x)
        assert torch.equal(logits, expected) and aux is None


def test_plain_modules_are_called_with_the_tensor():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(forward_logits(model, x)[0], model(x))


def test_positions_reach_the_model():
    model = small("llama").eval()
    x = batch_of(TEXT)
    shifted = torch.arange(TEXT.seq_len).flip(0).expand(len(x), -1)
    assert not torch.allclose(forward_logits(model, x, position_ids=shifted)[0], forward_logits(model, x)[0])


def test_the_router_s_loss_is_added_in_training_only():
    model = small("mixtral")
    x = batch_of(TEXT)
    out = model.train()(x, labels=x)
    own = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    _, aux = forward_logits(model, x)
    torch.testing.assert_close(aux, out.loss - own)
    assert aux.item() > 0 and aux.requires_grad
    assert forward_logits(model.eval(), x)[1] is None


def test_attention_is_sdpa():
    for case in ("llama", "gpt2", "bert", "vit", "mixtral"):
        assert small(case).config._attn_implementation == "sdpa"


def test_tied_parameters_count_once():
    assert parameter_count(small("qwen2 tied")) == parameter_count(small("qwen2")) - 100 * 32
    assert parameter_count(small("qwen2")) == sum(p.numel() for p in small("qwen2").state_dict().values())


def test_arguments_override_the_config():
    model = build(find("llama-tiny"), None, {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16})
    assert len(model.model.layers) == 2 and model.lm_head.in_features == 64
    gpt2 = build(find("gpt2"), None, {**TRANSFORMERS["gpt2"][1], "n_layer": 1})
    also = build(find("gpt2"), None, {**TRANSFORMERS["gpt2"][1], "num_hidden_layers": 1})
    assert len(gpt2.transformer.h) == len(also.transformer.h) == 1


def test_heads_have_a_width():
    """Mixtral's config leaves it None; DeepSpeed's sequence parallel attention allocates tensors of it."""
    assert small("mixtral").config.head_dim == 8


def test_unknown_arguments_get_the_nearest():
    error = refused("llama-tiny", TEXT, {"hiden_size": 64})
    assert error.kind == "model-args" and "hidden_size" in error.hint


@pytest.mark.parametrize("args", [{"hidden_size": 30, "num_attention_heads": 4}, {"hidden_size": "wide"}])
def test_values_the_config_refuses(args):
    assert refused("llama-tiny", TEXT, args).kind == "model-args"


def test_a_tokenizer_larger_than_the_vocabulary():
    error = refused("llama-tiny", TextInputs(vocab_size=50_000, seq_len=16))
    assert error.kind == "model-shape" and "260" in error.message and "50000" in error.message
    assert "vocab_size" in error.hint and "--tokenizer" in error.hint


def test_a_sequence_longer_than_the_positions():
    error = refused("gpt2", TextInputs(vocab_size=300, seq_len=2048))
    assert error.kind == "model-shape" and "1024" in error.message and "--seq-len" in error.hint


def test_data_of_the_wrong_kind():
    assert refused("gpt2", IMAGES).kind == refused("lenet", TEXT).kind == "model-task"


def test_positions_before_anything_is_built(tmp_path):
    assert source_max_positions(find("llama-tiny"), {}) == 1024
    assert source_max_positions(find("gpt2"), {"n_positions": 77}) == 77
    assert source_max_positions(find("lenet"), {}) is None
    from transformers import XLNetConfig

    assert max_positions(XLNetConfig()) is None  # its config says -1
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta", "max_position_embeddings": 514}))
    assert source_max_positions(find(str(tmp_path)), {}) == 512  # positions 0 and 1 are the padding's
    assert max_positions(small("vit").config) is None


def test_a_pretrained_folder_keeps_its_weights(tmp_path):
    saved = small("qwen2 tied")
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = build(find(str(tmp_path)), TEXT, {})
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, p in loaded.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, dict(saved.named_parameters())[name].float()), name
    with pytest.raises(ModelError) as caught:
        build(find(str(tmp_path)), TEXT, {"hidden_size": 64, "intermediate_size": 64})
    assert caught.value.kind == "model-weights"


def test_a_pretrained_classifier_gets_a_head_for_other_classes(tmp_path):
    saved = small("vit")
    saved.save_pretrained(tmp_path)
    loaded = build(find(str(tmp_path)), ImageInputs(channels=3, size=32, classes=9), {})
    assert loaded.classifier.out_features == 9
    assert torch.equal(loaded.vit.layernorm.weight, saved.vit.layernorm.weight)
    assert torch.equal(loaded.vit.embeddings.position_embeddings, saved.vit.embeddings.position_embeddings)
    with pytest.raises(ModelError, match="shape"):
        build(find(str(tmp_path)), IMAGES, {"hidden_size": 64})
    assert "--image-size 32" in refused(str(tmp_path), ImageInputs(channels=3, size=64, classes=9)).hint


def test_a_user_s_own_model(tmp_path, monkeypatch):
    code = "import torch\ndef make(width=2):\n    return torch.nn.Linear(width, 1)\ndef bad():\n    return 3\n"
    (tmp_path / "own_model_xyz.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert build(find("own_model_xyz:make"), None, {"width": 5}).in_features == 5
    for name, args, kind in [
        ("own_model_xyz:make", {"depth": 1}, "model-args"),
        ("own_model_xyz:bad", {}, "model-import"),
        ("own_model_xyz:missing", {}, "model-import"),
        ("no_such_module_xyz:make", {}, "model-import"),
    ]:
        with pytest.raises(ModelError) as caught:
            build(find(name), None, args)
        assert caught.value.kind == kind and caught.value.hint
