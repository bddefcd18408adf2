"""Which layers few of them can stand for: shown by the built model, whatever its config counts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import CONFIG_MAPPING

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import find
from zerofit.models.depth import with_depths
from zerofit.models.equal_layers import equal_layers, few_layers
from zerofit.models.hf_config import make_config

LAYERS = ("num_hidden_layers",)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
MIXED = {"num_key_value_heads": 2, "num_hidden_layers": 8, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("model_type", "architecture", "values", "expected"),
    [
        ("swin", "SwinForImageClassification", {"num_heads": [2, 2, 2, 2], "embed_dim": 12}, {}),
        ("convnext", "ConvNextForImageClassification", {"hidden_sizes": [8, 16, 24, 32]}, {}),
        ("llama", "LlamaForCausalLM", SMALL | {"num_hidden_layers": 5}, {LAYERS: 5}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", SMALL | {"num_hidden_layers": 5, "mlp_only_layers": [3]}, {}),
        ("gemma2", "Gemma2ForCausalLM", SMALL | {"num_hidden_layers": 4}, {}),  # every second one has a window
        ("smollm3", "SmolLM3ForCausalLM", SMALL | {"num_hidden_layers": 8, "pad_token_id": 0}, {}),  # or no rotation
        ("jamba", "JambaForCausalLM", SMALL | MIXED, {}),
        ("albert", "AlbertForMaskedLM", SMALL | {"num_hidden_layers": 6}, {}),  # one layer, run six times
        (
            "t5",
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 3},
            {("num_layers",): 4, ("num_decoder_layers",): 3},
        ),
    ],
)
def test_layers_are_equal_where_the_built_model_has_them_so(tmp_path, model_type, architecture, values, expected):
    CONFIG_MAPPING[model_type](architectures=[architecture], **values).save_pretrained(tmp_path)
    source = find(str(tmp_path))
    found = equal_layers(source, None, {})
    assert found == expected
    if expected:  # as many parameters as the layers left out have
        config = make_config(source, None, {})
        sizes = []
        for more in (0, 1):
            with torch.device("meta"):
                few = {path: few_layers(config, path) + more for path in found}
                sizes.append(parameter_count(build(source, None, with_depths({}, few))))
        with torch.device("meta"):
            whole = build(source, None, {})
        if len(found) == 1:
            assert parameter_count(whole) == sizes[0] + (sizes[1] - sizes[0]) * (expected[LAYERS] - 2)


def test_a_changed_file_is_looked_at_again(tmp_path):
    path = tmp_path / "config.json"
    for layers in (5, 6):
        path.write_text(json.dumps({"model_type": "llama", **SMALL, "num_hidden_layers": layers}))
        assert equal_layers(find(str(path)), None, {}) == {LAYERS: layers}
