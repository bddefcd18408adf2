"""Denoisers of diffusers: what they are fed, their loss, their parameters and FLOPs by hand."""

import json

import pytest
import torch
from torch.nn import functional

from zerofit.app.job.requests import assumed_inputs, input_option
from zerofit.models import denoisers
from zerofit.models.build import batch_keys, build, check_forward, empty_batch, forward_named, parameter_count
from zerofit.models.catalog import ModelError, find, shape_named
from zerofit.models.inputs import Fed, NamedInputs
from zerofit.models.named_inputs import named_inputs

DIT = {
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "sample_size": 16,
    "num_embeds_ada_norm": 10,
}
FLUX = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16}
FLUX |= {"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]}
UNET = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 48,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
}


@pytest.fixture(scope="module", autouse=True)
def installed():
    """diffusers takes seconds to import, which workers that only collect these tests save."""
    pytest.importorskip("diffusers")


def fed(name, args=None, **fed) -> NamedInputs:
    return named_inputs(find(name), args or {}, 0, Fed(**fed))


def shapes(inputs) -> dict:
    return {one.name: one.shape for one in inputs.tensors}


def test_what_a_denoiser_is_fed():
    """As the pipelines' own training scripts have it: an eighth of the image's side, prompts of their encoders."""
    latents = {"sample": (4, 64, 64), "noise": (4, 64, 64)}
    words = {"timestep": (), "encoder_hidden_states": (77, 768)}
    assert shapes(fed("stable-diffusion-1.5")) == latents | words
    sdxl = shapes(fed("sdxl", image=(3, 512)))
    assert sdxl["sample"] == (4, 64, 64) and sdxl["encoder_hidden_states"] == (77, 2048)
    assert sdxl["added_cond_kwargs.text_embeds"] == (1280,) and sdxl["added_cond_kwargs.time_ids"] == (6,)
    assert shapes(fed("dit-xl-2"))["class_labels"] == ()
    flux = shapes(fed("flux.1-dev"))
    assert flux["hidden_states"] == flux["noise"] == (4096, 64) and flux["encoder_hidden_states"] == (512, 4096)
    assert "guidance" in flux and "guidance" not in shapes(fed("flux.1-schnell"))
    inputs = fed("flux.1-dev", image=(3, 512))
    assert assumed_inputs(find("flux.1-dev"), "denoising", None, input_option(inputs), {}) == inputs


def test_published_sizes_and_names():
    """Parameters of the weights on the hub."""
    known = {"stabilityai/stable-diffusion-xl-base-1.0": 2_567_463_684, "black-forest-labs/FLUX.1-dev": 11_901_408_320}
    known |= {"runwayml/stable-diffusion-v1-5": 859_520_964, "stabilityai/stable-diffusion-3.5-large": 8_056_627_520}
    for repository, parameters in known.items():
        source = find(shape_named(repository).name)
        with torch.device("meta"):
            assert parameter_count(build(source, None, {})) == parameters


def test_flops_of_dit_by_hand():
    """2mnk of each product; modulations are of one token, and each block embeds the step and the class by itself."""
    inputs, width, tokens = fed("dit-xl-2", DIT), 64, (16 // 2) ** 2
    with torch.device("meta"):
        model = build(find("dit-xl-2"), inputs, DIT)
    embedding = 2 * (256 * width + width * width)
    block = 2 * tokens * (4 + 8) * width**2 + 4 * tokens * tokens * width + embedding + 2 * 6 * width**2
    patches, head = 2 * tokens * 4 * 4 * width, embedding + 2 * 2 * width**2 + 2 * tokens * width * 4 * 8
    assert check_forward(model, find("dit-xl-2"), inputs) == 3 * block + patches + head


@pytest.mark.parametrize(("name", "args"), [("dit-xl-2", DIT), ("flux.1-dev", FLUX), ("stable-diffusion-1.5", UNET)])
def test_the_loss_is_against_noise(name, args):
    inputs = fed(name, args, image=(3, 128))
    torch.manual_seed(1)
    model = build(find(name), inputs, args).eval()
    batch = empty_batch(inputs, 2, lambda *shape, dtype: torch.randn(shape).to(dtype).abs())
    assert list(batch) == batch_keys(inputs)
    given = {one.name: batch[key] for key, one in zip(batch_keys(inputs), inputs.tensors, strict=True)}
    noise = given.pop("noise")
    if name.startswith("flux"):
        rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        given["img_ids"] = torch.stack([torch.zeros(8, 8), rows, columns], dim=-1).flatten(0, 1)
        given["txt_ids"] = torch.zeros(512, 3)
    predicted = model(**given).sample[:, : noise.shape[1]]
    torch.testing.assert_close(forward_named(model, inputs, batch).loss, functional.mse_loss(predicted, noise))


def test_configs_and_what_is_refused(tmp_path, monkeypatch):
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    file = tmp_path / "unet" / "config.json"
    file.write_text(json.dumps({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 32}))
    source = find(str(tmp_path))
    assert source.family == "diffusers" and shapes(named_inputs(source, UNET, 0, Fed(image=(3, 64))))["sample"][0] == 4
    for name, args, given, message in (
        ("dit-xl-2", {}, {"decoder": 3}, "has no input decoder"),
        ("flux.1-dev", {}, {"image": (3, 1000)}, "a multiple of 16 pixels"),
        ("dit-xl-2", {"num_layer": 3}, {}, "DiTTransformer2DModel has no argument"),
        ("stable-diffusion-1.5", {"class_embed_type": "timestep"}, {}, "UNet with class_embed_type"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            fed(name, args, **given)
        assert caught.value.hint
    file.write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(ModelError, match="supported: UNet2DConditionModel"):
        find(str(file))
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(ModelError, match="not installed") as caught:
        denoisers.denoiser(find("sdxl"), None, {})
    assert "zerofit[diffusers]" in caught.value.hint
