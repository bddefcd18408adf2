"""Names: what they mean, what they count, and what is said to those that mean nothing."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from zerofit.models.build import model_table
from zerofit.models.catalog import ModelError, find, names, shape_named

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
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "deepseek-v2-lite": 15_706_484_224,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b-16-hf": 86_567_656,
    "vit-l-16-hf": 304_326_632,
    "phi-4": 14_659_507_200,
    "gemma-3-1b": 999_885_952,
    "mamba-130m": 129_135_360,
    "mamba-2.8b": 2_768_345_600,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "whisper-large-v3": 1_543_490_560,
    "clip-vit-base-patch32": 151_277_313,
    "clip-vit-base-patch16": 149_620_737,
    "clip-vit-large-patch14": 427_616_513,
    "siglip-base-patch16-224": 203_155_970,
    "llava-1.5-7b": 7_063_427_072,
    "lenet": 61_706,
    "lenet-scratch": 129_068,
    "simplecnn-112": 2_008_842,
    "mlp-table": 1_302,
    "resnet18-small": 11_173_962,
}
AUXILIARY = {"inception_v3": 3_326_696}  # the training head that we leave out; googlenet's figure is without
# a 3x3 convolution of 1024 to 256 channels, batch norm, and 21 classes of each pixel
FCN_HEAD = 9 * 1024 * 256 + 2 * 256 + 21 * 256 + 21
AUXILIARY |= dict.fromkeys(("fcn_resnet50", "fcn_resnet101", "deeplabv3_resnet50", "deeplabv3_resnet101"), FCN_HEAD)
AUXILIARY["deeplabv3_mobilenet_v3_large"] = 9 * 40 * 10 + 2 * 10 + 21 * 10 + 21


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


@pytest.mark.parametrize(
    ("repository", "shape"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.1", None),  # another vocabulary
        ("somebody/Llama-3.1-8B", None),  # whose it is, nobody knows
        ("openai-community/gpt2", "gpt2"),
        ("google-t5/t5-base", "t5-base"),
        ("facebook/bart-base", "bart-base"),
        ("openai/whisper-small", "whisper-small"),
        ("openai/whisper-small.en", None),  # another vocabulary
        ("openai/clip-vit-base-patch32", "clip-vit-base-patch32"),
        ("google/siglip-base-patch16-224", "siglip-base-patch16-224"),
        ("llava-hf/llava-1.5-7b-hf", "llava-1.5-7b"),
        ("state-spaces/mamba-130m-hf", "mamba-130m"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("facebook/dinov2-base", "dinov2-base"),
        ("microsoft/phi-4", "phi-4"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_repositories_have_the_shapes_of_presets(repository, shape, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert shape_named(repository) == (shape or repository)
    with pytest.raises(ModelError, match="not downloaded"):
        find(repository)  # to train it, its weights are needed


def test_a_config_in_the_hubs_cache_is_a_shape(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repository, file: f"/cache/{repository}/{file}"
    )
    assert shape_named("some/model") == "/cache/some/model/config.json"
    assert shape_named("Qwen/Qwen3-8B") == "qwen3-8b"
    assert shape_named("gpt2") == "gpt2" and shape_named("my.package:model") == "my.package:model"


def test_half_a_model_is_refused(tmp_path):
    """Of a model of several parts transformers' causal language model can be the decoder alone."""
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "musicgen", "architectures": ["MusicgenForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="only its decoder is built"):
        find(str(file))
    file.write_text('{"model_type": "whisper", "architectures": ["WhisperForCausalLM"]}')
    assert find(str(file)).task == "causal-lm"
    file.write_text('{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}')
    assert find(str(file)).task == "causal-lm"  # which is the whole of it


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
    "text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "wav2vec2"}', '{"model_type": "nonsense"}']
)
def test_a_config_of_no_use(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        find(str(tmp_path))
    assert caught.value.kind == "model-config" and caught.value.hint


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        find(str(tmp_path))
