"""Names: what they mean, and what is said to those that mean nothing."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import ModelError, find, shape_named
from zerofit.models.presets import NAMED


def test_a_config_in_the_hubs_cache_is_a_shape(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repository, file: f"/cache/{repository}/{file}"
    )
    assert shape_named("some/model").name == "/cache/some/model/config.json"
    assert shape_named("some/Qwen3-8B-tuned").name == "/cache/some/Qwen3-8B-tuned/config.json"
    assert shape_named("Qwen/Qwen3-8B").name == "qwen3-8b"
    for name in ("gpt2", "my.package:model", "mamba:mamba", "zzzzzz"):
        assert (shape_named(name).name, shape_named(name).note) == (name, "")


def test_a_repository_is_no_model_to_train():
    with pytest.raises(ModelError, match="not in `zerofit models`") as caught:
        find("Qwen/Qwen3-8B-Base")  # its weights are needed
    assert "hub:Qwen/Qwen3-8B-Base" in caught.value.hint and "qwen3-8b" in caught.value.hint


def test_half_a_model_is_refused(tmp_path):
    """Of a model of several parts transformers' causal language model can be the decoder alone."""
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "musicgen", "architectures": ["MusicgenForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="would lose its encoder"):
        find(str(file))
    file.write_text('{"model_type": "whisper", "architectures": ["WhisperForCausalLM"]}')
    assert find(str(file)).task == "causal-lm"
    file.write_text('{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}')
    assert find(str(file)).task == "causal-lm"  # which is the whole of it


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("segformer", "SegformerForSemanticSegmentation"),
        ("beit", "BeitForMaskedImageModeling"),
        ("bert", "BertForQuestionAnswering"),
    ],
)
def test_another_head_is_not_replaced_in_silence(tmp_path, model_type, architecture):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    with pytest.raises(ModelError, match=architecture) as caught:
        find(str(file))
    assert "simulate your training script" in caught.value.hint


def test_the_catalogue_imports_no_torch():
    code = "import sys, zerofit.models.catalog as c; c.find('gpt2'); c.find('lenet'); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("name", "family", "origin", "task"),
    [
        ("simplecnn", "zerofit", "zerofit", "image"),
        ("dcgan", "gan", "zerofit", "gan"),
        ("gpt2", "transformers", "preset", "causal-lm"),
        ("bert-base", "transformers", "preset", "masked-lm"),
        ("vit-b-16-hf", "transformers", "preset", "image"),
        ("resnet50", "torchvision", "torchvision", "image"),
        ("my.package:make", "custom", "package.module:callable", "custom"),
    ],
)
def test_what_a_name_means(name, family, origin, task):
    source = find(name)
    assert (source.family, source.origin, source.task, source.path) == (family, origin, task, None)


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal-lm"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "bert"}, "masked-lm"),
        ({"model_type": "bert", "is_decoder": True}, "causal-lm"),
        ({"model_type": "llama"}, "causal-lm"),
        ({"model_type": "convnext"}, "image"),
        ({"model_type": "t5"}, "seq2seq-lm"),
        ({"model_type": "bart", "architectures": ["BartModel"]}, "seq2seq-lm"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}, "speech"),
        ({"model_type": "clip"}, "image-text-pairs"),
        ({"model_type": "siglip", "architectures": ["SiglipModel"]}, "image-text-pairs"),
        ({"model_type": "clip", "architectures": ["CLIPForImageClassification"]}, "image"),
        ({"model_type": "llava"}, "image-text"),
        ({"model_type": "mamba"}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "dinov2", "architectures": ["Dinov2Model"]}, "image"),
    ],
)
def test_the_task_of_a_config(tmp_path, config, task):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert find(str(file)).task == find(str(tmp_path)).task == task
    assert find(str(tmp_path)).origin == "config.json"
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    source = find(str(tmp_path))
    assert (source.origin, source.path) == ("pretrained folder", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("resnet5", "resnet50"),
        ("simple-cnn", "simplecnn"),
        ("qwen3:7b", "qwen3-8b"),
        ("gpt3-xl", "gpt-3-175b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("./nowhere/config.json", "existing config.json"),
        ("zzzzzz", "zerofit models"),
    ],
)
def test_unknown_names_get_the_nearest(name, hint):
    with pytest.raises(ModelError) as caught:
        find(name)
    assert caught.value.kind == "unknown-model"
    assert name in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "wav2vec2"}', '{"model_type": "nonsense"}']
)
def test_a_config_of_no_use(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        find(str(tmp_path))
    assert caught.value.kind == "model-config" and caught.value.hint


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find(str(tmp_path))


def test_gpt_3_by_its_formula():
    """12 d² + 13 d a layer (attention 4 d² + 4 d, MLP 8 d² + 5 d, two norms 4 d), embeddings, a last norm."""

    def formula(layers: int, width: int = 12288) -> int:
        return layers * (12 * width**2 + 13 * width) + (50257 + 2048) * width + 2 * width

    with torch.device("meta"):
        shallow = build(find("gpt-3-175b"), None, {"n_layer": 2})
    assert parameter_count(shallow) == formula(2)
    assert NAMED["gpt-3-175b"].parameters == formula(96) == 174_604_259_328
