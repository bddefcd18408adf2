"""Names: what they mean, what they count, and what is said to those that mean nothing."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from zerofit.models.build import model_table
from zerofit.models.catalog import ModelError, find, names

# model cards and papers; torchvision's from its own weights' metadata below
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b-16-hf": 86_567_656,
    "vit-l-16-hf": 304_326_632,
    "lenet": 61_706,
    "resnet18-small": 11_173_962,
}
AUXILIARY = {"inception_v3": 3_326_696}  # the training head that we leave out; googlenet's figure is without


@pytest.fixture(scope="module")
def rows():
    seen = []
    rows = model_table(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(rows)) for i in range(len(rows))]
    return {row["name"]: row for row in rows}


def test_published_parameter_counts(rows):
    assert {name: rows[name]["parameters"] for name in PUBLISHED} == PUBLISHED


def test_torchvision_parameter_counts(rows):
    from torchvision.models import get_model_weights

    ours = {row["name"]: row["parameters"] for row in rows.values() if row["source"] == "torchvision"}
    assert len(ours) >= 80
    for name, count in ours.items():
        published = {weights.meta["num_params"] for weights in get_model_weights(name)}  # some for larger images too
        assert count + AUXILIARY.get(name, 0) in published, name


def test_the_table_holds_every_name(rows):
    assert list(rows) == names()
    assert rows["bert-base"] == {
        "name": "bert-base",
        "kind": "masked-lm",
        "parameters": 109_514_298,
        "source": "preset",
    }


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
    "text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "t5"}', '{"model_type": "nonsense"}']
)
def test_a_config_of_no_use(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        find(str(tmp_path))
    assert caught.value.kind == "model-config" and caught.value.hint


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find(str(tmp_path))
