"""Initial weights are a function of the seed: whole, in parts, on meta first, partitioned by ZeRO-3."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForZeroShotImageClassification,
)
from transformers.initialization import no_init_weights

from tests.models.small import NAMED, TRANSFORMERS, inputs_of
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.hf import IN_FP32, _initialize
from zerofit.models.hf_config import make_config
from zerofit.models.layers import as_layers

AUTO = {
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "image": AutoModelForImageClassification,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "speech": AutoModelForSpeechSeq2Seq,
    "image-text-pairs": AutoModelForZeroShotImageClassification,
    "image-text": AutoModelForImageTextToText,
}


def meta(case):
    name, args = TRANSFORMERS[case]
    source = find(name)
    with torch.device("meta"):
        return build(source, inputs_of(source.task), args)


def reference(case):
    """transformers' own initialize_weights on a whole model, with nothing drawn before it."""
    name, args = TRANSFORMERS[case]
    source = find(name)
    config = make_config(source, inputs_of(source.task), args)
    with no_init_weights():
        model = AUTO[source.task].from_config(config, dtype=torch.float32)
    torch.manual_seed(21)
    model.initialize_weights()
    model.tie_weights()
    return model


def same(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def materialize(model, seed, keep=None):
    torch.manual_seed(seed)
    return _initialize(model, keep, IN_FP32)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_the_whole_model(case):
    expected = reference(case)
    name, args = TRANSFORMERS[case]
    torch.manual_seed(21)
    built = build(find(name), inputs_of(find(name).task), args)
    for model in (built, materialize(meta(case), 21), materialize(meta(case), 21, set(expected.state_dict()))):
        same(dict(model.named_parameters()), dict(expected.named_parameters()))
        same(dict(model.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("name", NAMED)
def test_models_that_give_their_own_loss(name):
    source, args = find(name), NAMED[name]
    with no_init_weights():
        expected = AUTO[source.task].from_config(make_config(source, None, args), dtype=torch.float32)
    torch.manual_seed(21)
    expected.initialize_weights()
    expected.tie_weights()
    torch.manual_seed(21)
    built = build(source, None, args)
    same(dict(built.named_parameters()), dict(expected.named_parameters()))
    same(dict(built.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("case", TRANSFORMERS)
@pytest.mark.parametrize("half", [0, 1])
def test_half_of_the_layers(case, half):
    expected = dict(reference(case).named_parameters(remove_duplicate=False))
    model = meta(case)
    layers = as_layers(model)
    mine = layers[: len(layers) // 2] if half == 0 else layers[len(layers) // 2 :]
    materialize(model, 21, keep={name for layer in mine for name in layer.names.values()})
    kept = {id(p) for layer in mine for p in layer_again(model, layer).module.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in kept:
            assert torch.equal(parameter, expected[name]), name
        else:
            assert parameter.is_meta, name
    assert not any(buffer.is_meta for buffer in model.buffers())


def layer_again(model, layer):
    return next(other for other in as_layers(model) if other.name == layer.name)


def test_another_seed_gives_other_weights():
    first, second = (materialize(meta("llama"), seed).lm_head.weight for seed in (0, 1))
    assert not torch.equal(first, second)


def test_rotary_frequencies_survive_a_cast():
    model = materialize(meta("llama"), 0).to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.to("meta").model.rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_zero3_starts_from_the_same_weights(one_rank, precision):
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    cases = ("llama", "qwen2 tied", "gpt2", "bert", "vit", "mixtral")
    expected = {case: reference(case) for case in cases}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config |= {"bf16": {"enabled": True}} if precision == torch.bfloat16 else {}
    alive = HfDeepSpeedConfig(config)
    for case in cases:
        name, args = TRANSFORMERS[case]
        torch.manual_seed(21)
        model = build(find(name), inputs_of(find(name).task), args)
        assert all(hasattr(p, "ds_numel") for p in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            got = {name: p.detach().clone() for name, p in model.named_parameters()}
        same(got, {name: p.to(precision) for name, p in expected[case].named_parameters()})
        same(dict(model.named_buffers()), dict(expected[case].named_buffers()))
    unset_hf_deepspeed_config()
    del alive


@pytest.fixture
def one_rank(monkeypatch, tmp_path):
    """A process group of this process alone."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # zero.Init replaces it for good
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    import deepspeed
    import deepspeed.ops
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile for one rank
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    yield
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
