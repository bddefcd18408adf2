"""What of a model is trained: adapters with the same first weights whatever is kept, and patterns of names."""

from __future__ import annotations

import logging

import pytest
import torch
import torchvision
import transformers
from torch import nn

from zerofit.models.build import build
from zerofit.models.catalog import ModelError, find, source_of
from zerofit.models.deferred import Stored
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.models.partial import differ_by_layer, lora_layers, train_part
from zerofit.spec.run import Run

TEXT, IMAGES = TextInputs(vocab_size=260, seq_len=16), ImageInputs(channels=1, size=8, classes=10)
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TIED = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_adapters_are_the_same_numbers_in_a_stage():
    source, stored = source_of(Run(model="llama-tiny", lora=4)), Stored(dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(0)
    whole = dict(build(source, TEXT, LLAMA).named_parameters())
    keep = {name for name in whole if ".layers.1." in name}
    torch.manual_seed(0)
    stage = dict(build(source, TEXT, LLAMA, stored=stored, keep=keep).named_parameters())
    assert {name for name, p in stage.items() if not p.is_meta} == keep
    assert all(torch.equal(stage[name], whole[name]) for name in keep)
    assert any("lora_A" in name for name in keep)


def test_frozen_weights_are_those_of_the_model_without_adapters():
    torch.manual_seed(0)
    adapted = build(source_of(Run(model="llama-tiny", lora=4)), TEXT, LLAMA)
    torch.manual_seed(0)
    plain = build(find("llama-tiny"), TEXT, LLAMA)
    frozen = {name.replace(".base_layer", ""): p for name, p in adapted.named_parameters() if not p.requires_grad}
    assert {name: p.tolist() for name, p in frozen.items()} == {n: p.tolist() for n, p in plain.named_parameters()}


def test_an_own_kind_of_model_has_adapters_at_its_linear_layers():
    model = build(source_of(Run(model="lenet", lora=2)), IMAGES, {})
    linear = [
        name for name, module in build(find("lenet"), IMAGES, {}).named_modules() if isinstance(module, nn.Linear)
    ]
    assert linear
    assert {name.partition(".lora")[0] for name in trained(model)} == set(linear)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"train": ["*.mlp.up_proj"]}, lambda name: "up_proj" in name),
        ({"train": ["model.layers.1", "lm_head"]}, lambda name: ".layers.1." in name or "lm_head" in name),
        ({"freeze": ["model.embed_tokens"]}, lambda name: "embed_tokens" not in name),
        ({"train": ["*.mlp.*"], "freeze": ["model.layers.0"]}, lambda name: ".layers.1.mlp" in name),
    ],
    ids=["mlps", "a layer and the head", "all but embeddings", "mlps but the first"],
)
def test_patterns(asked, wanted):
    model = build(source_of(Run(model="llama-tiny", **asked)), TEXT, LLAMA)
    assert trained(model) == [name for name, _ in model.named_parameters() if wanted(name)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"train": ["*.mpl.*"]}, "no parameter or module"),
        ({"freeze": ["*"]}, "all parameters of the model are frozen"),
        ({"lora": 2, "lora_targets": "q_prj"}, "--lora-targets q_prj"),
        ({"lora": 2, "lora_targets": "q_proj,v_prj"}, "no linear layer of the model is named v_prj"),
    ],
    ids=str,
)
def test_what_a_model_does_not_have_is_refused(asked, message):
    with pytest.raises(ModelError, match=message), torch.device("meta"):
        build(source_of(Run(model="llama-tiny", **asked)), TEXT, LLAMA)


def test_adapters_of_a_mixture_stand_beside_its_attention():
    """Its experts lie in one tensor, to which peft would add theirs, whole, in every forward."""
    with torch.device("meta"):
        model = build(source_of(Run(model="mixtral-tiny", lora=2)), TEXT, {})
        with pytest.raises(ModelError, match=r"mlp\.experts is not a linear layer") as refused:
            build(source_of(Run(model="mixtral-tiny", lora=2, lora_targets="q_proj,w1,w2,w3")), TEXT, {})
    assert {name.rpartition(".")[2] for name, _ in lora_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert refused.value.hint == "use --lora-targets q_proj"


def test_adapters_beside_all_linear_layers():
    """Of a model whose class token has three dimensions, too; and of a mixture that classifies, but its head."""
    with torch.device("meta"):
        image = build(source_of(Run(model="vit_b_16", lora=2)), None, {})
        plain = torchvision.models.vit_b_16()
        config = transformers.MixtralConfig(hidden_size=32, num_hidden_layers=1, num_labels=3, intermediate_size=32)
        classifier = transformers.MixtralForSequenceClassification(config)
        classifier = train_part(classifier, Run(model="mixtral-tiny", lora=2).partial)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, _ in lora_layers(image)} == linear
    assert {name.rpartition(".")[2] for name, _ in lora_layers(classifier)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert [name for name in trained(classifier) if "lora" not in name] == ["score.weight"]


def test_an_adapter_beside_a_shared_weight_is_refused():
    source = source_of(Run(model="gpt2", lora=2, lora_targets="c_attn,lm_head"))
    with pytest.raises(ModelError, match=r"lm_head shares its weight with transformer\.wte"), torch.device("meta"):
        build(source, TEXT, TIED)


@pytest.mark.parametrize(
    "asked, differ",
    [
        ({"train": ["*.11.*"]}, True),
        ({"freeze": ["*.layer.[0-9].*"]}, True),
        ({"freeze": ["*layers.1*.weight"]}, True),
        ({"train": ["head", "*.*.norm1.*"]}, False),
        ({"train": ["*.w1.*"], "freeze": ["model.embed_tokens"]}, False),
        ({"lora": 4}, False),
    ],
)
def test_layers_differ_where_a_pattern_names_them_by_number(asked, differ):
    assert differ_by_layer(Run(model="bert-base", **asked).partial, 12) == differ


def test_bitsandbytes_does_not_warn_of_a_missing_package():
    """It would on CPUs with AVX-512, wherever peft imports it."""
    ops = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    assert not ops.logger.isEnabledFor(logging.WARNING)
