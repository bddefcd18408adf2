"""How many layers a model has, in each of its parts, and the same model with fewer."""

import pytest
import torch

from tests.models.small import NAMED
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.depth import depths, of_all_layers, with_depths
from zerofit.models.hf_config import make_config

TEXT, VISION = ("text_config", "num_hidden_layers"), ("vision_config", "num_hidden_layers")


def test_values_that_differ_by_layer_are_no_value_of_all_layers():
    from transformers import LevitConfig, SegformerConfig

    assert of_all_layers(SegformerConfig(num_attention_heads=[1, 2, 5, 8]), "num_attention_heads") is None
    assert of_all_layers(LevitConfig(num_attention_heads=[4, 4, 4]), "num_attention_heads") == 4
    assert of_all_layers(LevitConfig(), "num_hidden_experts") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-xl", {("num_hidden_layers",): 48}),
        ("t5-base", {("num_layers",): 12, ("num_decoder_layers",): 12}),
        ("bart-large", {("encoder_layers",): 12, ("decoder_layers",): 12}),
        ("whisper-tiny", {("encoder_layers",): 4, ("decoder_layers",): 4}),
        ("siglip-so400m-patch14-384", {TEXT: 27, VISION: 27}),
        ("llava-1.5-7b", {TEXT: 32}),  # with a shallower encoder another of its layers would be looked at
        ("mamba-130m", {("num_hidden_layers",): 24}),
    ],
)
def test_layers_of_each_part(name, expected):
    assert depths(make_config(find(name), None, {})) == expected


@pytest.mark.parametrize("name", NAMED)
def test_a_model_with_other_numbers_of_layers(name):
    """As many parameters more as a layer of each part has, for each layer more; nothing else changes."""
    paths = depths(make_config(find(name), None, NAMED[name]))

    def parameters(layers):
        with torch.device("meta"):
            model = build(find(name), None, with_depths(NAMED[name], dict.fromkeys(paths, layers)))
        return sum(p.numel() for p in model.parameters())

    few, more, most = (parameters(layers) for layers in (2, 3, 4))
    assert most - more == more - few > 0
    assert depths(make_config(find(name), None, with_depths(NAMED[name], dict.fromkeys(paths, 5)))) == dict.fromkeys(
        paths, 5
    )
