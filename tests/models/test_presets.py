"""Entries of models/data: against the schema, transformers' own tables, published figures and the meta device."""

import json
import re
import shutil
from collections import Counter
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from tests.models.small import count_parameters
from zerofit.models import names
from zerofit.models.catalog import config_task, find
from zerofit.models.inputs import inputs_from_dict, inputs_to_dict
from zerofit.models.presets import DATA, NAMED, PRESETS, Preset, read_presets

FIGURE = re.compile(r"(\d+(?:\.(\d+))?)([MBT])")
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
ENTRIES = [
    (path.stem, entry) for path in sorted(DATA.glob("*.json")) for entry in json.loads(path.read_text())["models"]
]
SHAPED = [preset for preset in NAMED.values() if preset.config]

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
    "mlp-table": 2_110,
    "resnet18-small": 11_173_962,
    "resnet18-bias": 11_177_610,
}
AUXILIARY = {"inception_v3": 3_326_696}  # the training head that we leave out; googlenet's figure is without
# a 3x3 convolution of 1024 to 256 channels, batch norm, and 21 classes of each pixel
FCN_HEAD = 9 * 1024 * 256 + 2 * 256 + 21 * 256 + 21
AUXILIARY |= dict.fromkeys(("fcn_resnet50", "fcn_resnet101", "deeplabv3_resnet50", "deeplabv3_resnet101"), FCN_HEAD)
AUXILIARY["deeplabv3_mobilenet_v3_large"] = 9 * 40 * 10 + 2 * 10 + 21 * 10 + 21


def test_every_entry_is_as_the_schema_has_it():
    schema = TypeAdapter(Preset)
    for preset in NAMED.values():
        assert schema.validate_json(json.dumps(asdict(preset)), strict=True) == preset
        assert preset.source and preset.parameters > 0 and bool(preset.config) == (preset.origin == "preset")
    assert {key for _, entry in ENTRIES for key in entry} <= {*Preset.__dataclass_fields__, "template"}
    own = [preset for preset in NAMED.values() if preset.library == "zerofit"]
    assert all(inputs_to_dict(inputs_from_dict(preset.inputs)).items() >= preset.inputs.items() for preset in own)


def test_a_model_is_one_entry(tmp_path, monkeypatch):
    """One more entry in a family's file: it is found by its names, listed, and built with the count of the card."""
    shutil.copytree(DATA, tmp_path / "data")
    family = tmp_path / "data" / "llama.json"
    content = json.loads(family.read_text())
    # TinyLlama-1.1B with half of its layers: the card's 1,100,048,384 less 11 layers
    of_layer = 2048 * 2048 * 2 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
    entry = {"name": "small-llama-0.6b", "template": "llama-2", "parameters": 1_100_048_384 - 11 * of_layer}
    entry |= {"published": "0.6B", "source": "a model card, 2026", "hub": ["someone/Small-Llama-0.6B-Chat"]}
    shape = {"hidden_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 32, "num_key_value_heads": 4}
    content["models"].append({**entry, "config": {**shape, "intermediate_size": 5632}})
    family.write_text(json.dumps(content))
    (name,) = (presets := read_presets(tmp_path / "data")).keys() - NAMED.keys()
    monkeypatch.setitem(NAMED, name, presets[name])
    monkeypatch.setitem(PRESETS, name, presets[name].config)
    for cached in (names._spellings, names._repositories, names._joins):
        cached.cache_clear()
        monkeypatch.setattr(names, cached.__name__, cached.__wrapped__)
    assert names.preset_of("hub:someone/Small-Llama-0.6B-Chat".removeprefix("hub:")) == names.Match(name=name, note="")
    assert names.preset_of("small-llama:0.6b-q4_K_M").name == name
    assert [row["parameters"] for row in names.model_table(("small-llama",))] == [entry["parameters"]]
    assert count_parameters(find(name)) == entry["parameters"]


def test_names_and_repositories_mean_one_model():
    names = Counter(entry["name"] for _, entry in ENTRIES)
    names += Counter(name.lower() for preset in NAMED.values() for name in preset.hub)
    assert [name for name, times in names.items() if times > 1] == []


def test_published_figures():
    """What is counted is the published figure as far as it is given; `differs` says why another one is published."""
    for preset in SHAPED:
        if not preset.published:
            assert preset.source.startswith("of zerofit")
            continue
        figure = FIGURE.fullmatch(preset.published)
        assert figure, preset.name
        off = abs(preset.parameters / UNITS[figure[3]] - float(figure[1]))
        assert (off <= 0.51 * 10 ** -len(figure[2] or "")) != bool(preset.differs), preset.name
        assert off <= 0.5 * float(figure[1]), preset.name


def test_kinds_are_those_of_the_configs():
    from transformers import CONFIG_MAPPING

    for preset in SHAPED:
        if preset.library == "transformers":
            assert preset.config["model_type"] in CONFIG_MAPPING, preset.name
            assert config_task(preset.config, preset.name) == preset.kind, preset.name


def test_exact_counts():
    assert {name: NAMED[name].parameters for name in PUBLISHED} == PUBLISHED


def test_torchvisions_models():
    import torchvision

    ours = {name: preset for name, preset in NAMED.items() if preset.origin == "torchvision"}
    classifiers = torchvision.models.list_models(module=torchvision.models)
    assert [name for name, preset in ours.items() if preset.kind == "image"] == classifiers
    for name, preset in ours.items():
        weights = torchvision.models.get_model_weights(name)
        published = {one.meta["num_params"] for one in weights}  # some for larger images too
        assert preset.parameters + AUXILIARY.get(name, 0) in published, name


def smallest_of_templates() -> list[str]:
    """The smallest model of each template; benchmarks/preset_counts.py counts all."""
    found: dict[str, Preset] = {}
    for _, entry in ENTRIES:
        preset = NAMED[entry["name"]]
        key = entry.get("template") or (preset.name if preset.config else "")
        if key and preset.parameters <= found.get(key, preset).parameters:
            found[key] = preset
    return [preset.name for preset in found.values()]


@pytest.mark.parametrize("name", smallest_of_templates())
def test_counts_on_the_meta_device(name):
    if NAMED[name].library == "diffusers":
        pytest.importorskip("diffusers")
    assert count_parameters(find(name)) == NAMED[name].parameters
