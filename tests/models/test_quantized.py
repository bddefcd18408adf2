"""Quantized base weights: as bitsandbytes makes them, known by the weights that they were made of."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import ModelError, find
from zerofit.models.checksums import part_checksum
from zerofit.models.deferred import Stored
from zerofit.models.inputs import TextInputs
from zerofit.models.layers import as_layers
from zerofit.models.partial import lora_layers
from zerofit.models.quantized import quantized_share, source_of_bits
from zerofit.spec.partial_training import LoraSettings, PartialTraining, Quantization

bnb = pytest.importorskip("bitsandbytes")

INPUTS = TextInputs(vocab_size=260, seq_len=32)
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = LoraSettings(rank=4, alpha=8, dropout=0.0, targets="all-linear", init="default", dora=False, rslora=False)
IN_BF16 = Stored(dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained folder, and its model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    model = build(find("llama-tiny"), INPUTS, LLAMA)
    model.save_pretrained(folder)
    return folder, model


def quantized(source, **how):
    part = PartialTraining(lora=LORA, train=(), freeze=(), seed=0, quantization=Quantization(**how))
    return replace(source, partial=part)


@pytest.mark.versions
@pytest.mark.parametrize("double", [False, True])
def test_backward_takes_the_weight_as_it_is_then(double):
    """As ZeRO-3 gathers it: what forward was given is gone in between, and nothing has kept it."""
    source = quantized(find("llama-tiny"), kind="nf4", double=double)
    ours = build(source, INPUTS, LLAMA, stored=IN_BF16).get_submodule("model.layers.0.mlp.up_proj.base_layer")
    theirs = bnb.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit.from_prequantized(
        ours.weight.data.clone(), ours.weight.quant_state.as_dict(packed=True), device="cpu"
    )
    one, other = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    ours.weight.data = ours.weight.data.clone()
    gathered = weakref.ref(ours.weight.data.untyped_storage())
    out, kept = ours(one), ours.weight.data.clone()
    ours.weight.data = torch.empty(0, dtype=torch.uint8)
    assert gathered() is None
    ours.weight.data = kept
    out.sum().backward()
    expected = theirs(other)
    expected.sum().backward()
    assert torch.equal(out, expected) and torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("how", [{"kind": "nf4"}, {"kind": "nf4", "double": True}, {"kind": "int8"}], ids=str)
@pytest.mark.parametrize("pretrained", [True, False])
def test_weights_are_those_of_bitsandbytes(base, how, pretrained):
    folder, model = base
    source = quantized(find(str(folder)) if pretrained else find("llama-tiny"), **how)
    torch.manual_seed(1)
    made = build(source, INPUTS, {} if pretrained else LLAMA, stored=IN_BF16)
    assert made.training, "a pretrained model begins in evaluation's mode"
    layers = dict(lora_layers(made))
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        kept, original = layer.get_base_layer(), model.get_submodule(name).weight.detach().bfloat16()
        source_of = source_of_bits(kept.weight)
        assert source_of and source_of.shape == original.shape
        assert source_of.checksum == part_checksum(f"{name}.weight", original)
        if how["kind"] == "nf4":
            nested = how.get("double", False)
            theirs, _ = bnb.functional.quantize_4bit(original, quant_type="nf4", compress_statistics=nested)
            state = kept.weight.quant_state
            assert torch.equal(kept.weight, theirs) and state.nested is nested and state.dtype == torch.bfloat16
        else:
            theirs, scales, _ = bnb.functional.int8_vectorwise_quant(original.half())
            assert torch.equal(kept.weight, theirs) and torch.equal(kept.weight.SCB, scales)
    adapters = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert parameter_count(made) == parameter_count(model) + adapters
    assert made.lm_head.weight.dtype == made.model.embed_tokens.weight.dtype == torch.bfloat16


def test_what_is_known_without_memory_is_what_is_there(base):
    source = quantized(find(str(base[0])), kind="nf4", double=True)
    with torch.device("meta"):
        planned = build(source, INPUTS, {})
    made = build(source, INPUTS, {}, stored=IN_BF16)
    assert quantized_share(planned) == quantized_share(made)
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    of_each = (64 * 64, 64 * 96)  # a half byte a number; 1 byte for 64, 4 for 256 of these; tables of 16 and 256; mean
    scales = [n // 64 + 4 * -(-n // 64 // 256) + 4 * 16 + 4 * 256 + 4 for n in of_each]
    assert quantized_share(made) == (weights, weights // 2 + 2 * (4 * scales[0] + 3 * scales[1]))
    for (name, one), (_, other) in zip(planned.named_parameters(), made.named_parameters(), strict=True):
        assert (one.shape, one.requires_grad) == (other.shape, other.requires_grad), name
    layers = [[layer.names for layer in as_layers(one)] for one in (planned, made)]
    assert layers[0] == layers[1] and sum(map(len, layers[0])) == len(list(made.parameters()))


def test_a_model_without_linear_layers_is_refused():
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    with pytest.raises(ModelError, match="no linear layer except its head"):
        build(quantized(find("gpt2"), kind="nf4"), None, gpt2, stored=IN_BF16)
    with pytest.raises(ModelError, match="not a transformers model"), torch.device("meta"):
        build(quantized(find("resnet18"), kind="int8"), None, {})
