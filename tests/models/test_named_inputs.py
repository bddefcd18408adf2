"""Models that are fed several tensors by name: what they are fed, their loss, their costs by hand."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional
from torch.torch_version import TorchVersion

from tests.models.small import NAMED
from zerofit.app.job.requests import assumed_inputs, input_option, parse_input
from zerofit.data.synthetic import SyntheticNamed
from zerofit.models.build import batch_keys, build, check_forward, empty_batch, forward_named, parameter_count
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import Fed, NamedInputs, inputs_from_dict, inputs_to_dict
from zerofit.models.named_inputs import named_inputs

T5, CLIP, LLAVA = (NAMED[name] for name in ("t5-small", "clip-vit-base-patch32", "llava-1.5-7b"))


@pytest.mark.parametrize(
    ("model_type", "values", "shape"),
    [
        ("deit", {"image_size": 64, "num_channels": 1, "id2label": {"0": "a", "1": "b", "2": "c"}}, (1, 64, 3)),
        ("vit", {"image_size": [96, 96]}, (3, 96, 2)),
        ("resnet", {"num_labels": 5}, (3, 224, 5)),  # its config has no image size
    ],
)
def test_images_are_those_of_the_config(tmp_path, model_type, values, shape):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    source = find(str(tmp_path))
    inputs = assumed_inputs(source, source.task, None, None, {})
    assert (inputs.channels, inputs.size, inputs.classes) == shape
    assert assumed_inputs(source, source.task, None, "image:3x32x32", {}).size == 32


def fed(name, seq_len=16, args=None, **fed) -> NamedInputs:
    return named_inputs(find(name), args or {}, seq_len, Fed(**fed))


def meta(name, inputs, args):
    with torch.device("meta"):
        return build(find(name), inputs, args)


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        (fed("t5-small", 512), {"input_ids": (512,), "labels": (512,)}),
        (fed("t5-small", 512, decoder=64), {"input_ids": (512,), "labels": (64,)}),
        (fed("whisper-small", 448), {"input_features": (80, 3000), "labels": (448,)}),
        (fed("whisper-large-v3", 8, frames=200), {"input_features": (128, 200), "labels": (8,)}),
        (fed("clip-vit-base-patch32", 77), {"pixel_values": (3, 224, 224), "input_ids": (77,)}),
        (fed("siglip-base-patch16-224", 64, image=(3, 512)), {"pixel_values": (3, 512, 512), "input_ids": (64,)}),
        (fed("llava-1.5-7b", 1024), {"input_ids": (1024,), "pixel_values": (3, 336, 336), "labels": (1024,)}),
    ],
)
def test_what_a_model_is_fed(inputs, shapes):
    assert {one.name: one.shape for one in inputs.tensors} == shapes
    assert inputs_from_dict(inputs_to_dict(inputs)) == inputs


def test_a_place_in_the_text_for_each_patch_of_the_image():
    inputs = fed("llava-1.5-7b", 1024)
    assert inputs.tensors[0].first == (32000, (336 // 14) ** 2)
    batch = empty_batch(inputs, 2)
    assert list(batch) == batch_keys(inputs) == ["inputs", "pixel_values", "labels"]
    assert (batch["inputs"] == 32000).sum(dim=1).tolist() == [576, 576]


@pytest.mark.parametrize(
    ("name", "seq_len", "what", "message"),
    [
        ("t5-small", 16, {"image": (3, 224)}, "has no input image"),
        ("whisper-small", 16, {"decoder": 9}, "has no input decoder"),
        ("qwen2.5-vl-7b", 1024, {"image": (3, 450)}, "a multiple of 28 pixels"),
        ("whisper-small", 16, {"frames": 101}, "needs an even number of frames"),
        ("llava-1.5-7b", 512, {}, "needs 576 tokens, but a sample has only 512"),
    ],
)
def test_what_a_model_is_not_fed(name, seq_len, what, message):
    with pytest.raises(ModelError, match=message) as caught:
        fed(name, seq_len, **what)
    assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["t5-small", "whisper-small", "siglip-base-patch16-224", "llava-1.5-7b", "qwen2-vl-7b", "resnet18"]
)
def test_an_option_says_what_is_fed(name):
    """What is told of a run's inputs makes the same inputs again."""
    source = find(name)
    seq_len = {"llava-1.5-7b": 700, "qwen2-vl-7b": 300}.get(name, 32)
    inputs = assumed_inputs(source, source.task, seq_len, None, {})
    assert assumed_inputs(source, source.task, seq_len, input_option(inputs), {}) == inputs


def test_options_of_inputs():
    assert parse_input("image:3x64x64") == Fed(image=(3, 64))
    assert parse_input("decoder:128") == Fed(decoder=128)
    assert parse_input("frames:3000") == Fed(frames=3000)


def test_the_loss_of_an_encoder_decoder():
    inputs = fed("t5-small", 10, T5, decoder=6)
    torch.manual_seed(1)
    model = build(find("t5-small"), inputs, T5).eval()
    tokens, labels = torch.randint(2, 64, (3, 10)), torch.randint(2, 64, (3, 6))
    shifted = torch.cat([torch.zeros(3, 1, dtype=torch.long), labels[:, :-1]], dim=1)
    logits = model(input_ids=tokens, decoder_input_ids=shifted).logits
    loss = forward_named(model, inputs, {"inputs": tokens, "labels": labels}).loss
    torch.testing.assert_close(loss, functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_the_loss_of_pairs():
    """Each image's text is the likeliest of all texts, and the other way round."""
    inputs = fed("clip-vit-base-patch32", 8, CLIP)
    torch.manual_seed(1)
    model = build(find("clip-vit-base-patch32"), inputs, CLIP).eval()
    pixels, tokens = torch.randn(3, 3, 16, 16), torch.randint(2, 64, (3, 8))
    similar = model(pixel_values=pixels, input_ids=tokens).logits_per_text
    own = torch.arange(3)
    expected = (functional.cross_entropy(similar, own) + functional.cross_entropy(similar.t(), own)) / 2
    torch.testing.assert_close(forward_named(model, inputs, {"inputs": pixels, "labels": tokens}).loss, expected)


@pytest.mark.parametrize("name", ["qwen2-vl-2b", "qwen2.5-vl-3b", "qwen3-vl-4b"])
def test_the_loss_of_images_on_grids(name):
    """Places and windows that are known beforehand are those that transformers finds in the grids' values."""
    inputs, args = fed(name, 64, NAMED[name], image=(3, 192 if name.startswith("qwen3") else 168)), NAMED[name]
    torch.manual_seed(1)
    model = build(find(name), inputs, args).eval()
    tokens, labels = torch.randint(20, 90, (2, 64)), torch.randint(20, 90, (2, 64))
    pixels, (image, places) = torch.randn(2, *inputs.tensors[1].shape), inputs.tensors[0].first
    tokens[:, :places] = image
    side = math.isqrt(pixels.shape[1])
    assert places == pixels.shape[1] // 4
    expected = model(
        input_ids=tokens,
        pixel_values=pixels.flatten(0, 1),
        image_grid_thw=torch.tensor([(1, side, side)] * 2),
        mm_token_type_ids=(tokens == image).int(),
        labels=labels,
    ).loss
    batch = {"inputs": tokens, "pixel_values": pixels, "labels": labels}
    torch.testing.assert_close(forward_named(model, inputs, batch).loss, expected, rtol=0, atol=1e-6)
    assert check_forward(meta(name, inputs, args), find(name), inputs)


def test_flops_of_an_encoder_decoder_by_hand():
    """2mnk of each product; attention 4 x queries x keys x width; a decoder's block attends to both texts."""
    source, tokens, out, width, inner, mlp = find("t5-small"), 10, 6, 32, 4 * 8, 48
    inputs = fed("t5-small", tokens, T5, decoder=out)
    model = meta("t5-small", inputs, T5)

    def attention(queries, keys):
        return 2 * 2 * queries * width * inner + 2 * 2 * keys * width * inner + 4 * queries * keys * inner

    encoder = attention(tokens, tokens) + 2 * 2 * tokens * width * mlp
    decoder = attention(out, out) + attention(out, tokens) + 2 * 2 * out * width * mlp
    head = 2 * out * width * 64
    assert check_forward(model, source, inputs) == 2 * encoder + 3 * decoder + head
    matrices = 2 * (4 * width * inner + 2 * width * mlp) + 3 * (8 * width * inner + 2 * width * mlp) + 64 * width
    norms, positions = (2 * 2 + 1 + 3 * 3 + 1) * width, 2 * 32 * 4
    assert parameter_count(model) == matrices + norms + positions


def test_flops_of_an_image_and_its_text_by_hand():
    """The image's features take places of the text: the language model reads no token more."""
    source, length, width, mlp = find("llava-1.5-7b"), 12, 32, 48
    inputs = fed("llava-1.5-7b", length, LLAVA)
    patches, seen = 4, 5  # with the class token

    def block(tokens, products):
        return 2 * tokens * products + 4 * tokens * tokens * width

    vision = 2 * patches * 3 * 8 * 8 * width + 2 * block(seen, 4 * width * width + 2 * width * mlp)
    projector = 2 * patches * 2 * width * width
    text = 2 * block(length, 4 * width * width + 3 * width * mlp) + 2 * length * width * 64
    head = width // LLAVA["text_config"]["num_attention_heads"]
    older = TorchVersion(transformers.__version__) < "5.23"  # which makes angles by a product, once for two samples
    rotary = 2 * length * head // 2 // 2 if older else 0
    counted = check_forward(meta("llava-1.5-7b", inputs, LLAVA), source, inputs)
    assert counted == vision + projector + text + rotary


def test_made_up_samples_depend_on_their_number_alone():
    inputs = fed("llava-1.5-7b", 12, LLAVA)
    data = SyntheticNamed(n=64, first=0, inputs=inputs, seed=3)
    one, many = (data.batch(np.array(rows), np.array(rows)) for rows in ([5], range(10)))
    assert set(one) == set(batch_keys(inputs))
    for key in one:
        assert torch.equal(one[key][0], many[key][5])
    assert (many["inputs"][:, :4] == 7).all() and not (many["inputs"][:, 4:] == 7).any()
    assert int(many["labels"].max()) < 64 and float(many["pixel_values"].abs().max()) <= 1
    assert not torch.equal(many["inputs"][0, 4:], many["inputs"][1, 4:])
