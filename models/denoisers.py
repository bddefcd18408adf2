"""Build diffusers' denoisers with random weights. Define their inputs and their loss."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofit.models.catalog import DENOISERS, ModelError, ModelSource, source_config
from zerofit.models.inputs import Fed, Inputs, NamedInput, NamedInputs
from zerofit.models.presets import Config, ModelArgs
from zerofit.spec.errors import nearest

if TYPE_CHECKING:
    from diffusers.configuration_utils import ConfigMixin

PIXELS = 8  # pixels of an image per latent, in each direction
PACKED = 2  # latents per token of Flux, in each direction
STEPS = 1000  # of the noise schedule
# Two numbers each for the original size, the crop's corner and the target size (`_get_add_time_ids`).
_IDS = 6  # SDXL's numbers about an image's size and crop
# CLIP's 77 tokens; for SD 3 also T5's 256; for Flux T5's 512 (`max_sequence_length` in diffusers' pipelines).
TEXT = {"UNet2DConditionModel": 77, "SD3Transformer2DModel": 333, "FluxTransformer2DModel": 512}  # tokens of a prompt


def denoiser(source: ModelSource, inputs: Inputs | None, args: ModelArgs) -> nn.Module:
    """Build a denoiser on the current default device. Raises ModelError."""
    cls, config = _class_and_config(source, args)
    try:
        return cast(nn.Module, cls.from_config({"_class_name": cls.__name__, **config}))
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        message = f"{source.name} cannot be built from its config: {error}"
        raise ModelError("model-args", message, "correct --model-args or the config") from error


def denoiser_inputs(source: ModelSource, args: ModelArgs, fed: Fed) -> NamedInputs:
    """Return the training inputs: latents, timestep, prompt and noise. Raises ModelError."""
    for name in fed.set_names():
        if name != "image":
            message = f"{source.name} (denoising) has no input {name}"
            raise ModelError("model-inputs", message, "use --input image:3x512x512, the size of images before the VAE")
    cls, config = _class_and_config(source, args)
    flux = cls.__name__ == "FluxTransformer2DModel"
    channels, pixels = fed.image or (3, PIXELS * _side(config.get("sample_size") or 128))
    # latents are cut into patches (a transformer) or halved between the levels of a UNet
    unit = PIXELS * (PACKED if flux else config.get("patch_size") or 2 ** (len(config["block_out_channels"]) - 1))
    if channels != 3 or pixels % unit:
        near = max(1, round(pixels / unit)) * unit
        message = f"{source.name} needs 3 channels and a side that is a multiple of {unit} pixels"
        message += f"; got {channels} channels and {pixels} pixels"
        raise ModelError("model-inputs", message, f"use --input image:3x{near}x{near}")
    side = pixels // PIXELS
    shape = ((side // PACKED) ** 2, config["in_channels"]) if flux else (config["in_channels"], side, side)
    first = "sample" if cls.__name__ == "UNet2DConditionModel" else "hidden_states"
    latents = NamedInput(name=first, shape=shape, image=(3, pixels))
    noise = NamedInput(name="noise", shape=shape)
    return NamedInputs(tensors=(latents, *_conditions(cls.__name__, config), noise), vocab_size=0, seq_len=None)


def _side(size: int | list[int] | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]


def _conditions(kind: str, config: Config) -> list[NamedInput]:
    """Return a denoiser's inputs except the latents: timestep, prompt or class, and sizes."""

    def floats(name: str, *shape: int) -> NamedInput:
        return NamedInput(name=name, shape=shape)

    # FLUX gets its timestep as a number from 0 to 1. The other models get the number of a step.
    flux = kind == "FluxTransformer2DModel"
    conditions = [floats("timestep") if flux else NamedInput(name="timestep", shape=(), ids=STEPS)]
    if kind == "DiTTransformer2DModel":
        return [*conditions, NamedInput(name="class_labels", shape=(), ids=config["num_embeds_ada_norm"])]
    width = config["cross_attention_dim" if kind == "UNet2DConditionModel" else "joint_attention_dim"]
    conditions.append(floats("encoder_hidden_states", TEXT[kind], _side(width)))
    if kind == "UNet2DConditionModel":
        if config.get("addition_embed_type") == "text_time":
            sizes = _IDS * config["addition_time_embed_dim"]
            pooled = config["projection_class_embeddings_input_dim"] - sizes
            conditions += [floats("added_cond_kwargs.text_embeds", pooled), floats("added_cond_kwargs.time_ids", _IDS)]
        return conditions
    conditions.append(floats("pooled_projections", config["pooled_projection_dim"]))
    return [*conditions, floats("guidance")] if flux and config["guidance_embeds"] else conditions


def _class_and_config(source: ModelSource, args: ModelArgs) -> tuple[type[ConfigMixin], Config]:
    """Return the diffusers class of a source, and all arguments of the class. Raises ModelError."""
    published = source_config(source)
    kind = published["_class_name"]
    cls = _class(source.name, kind)
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items() if name != "self"}
    for key in args:
        if key not in defaults:
            raise ModelError("model-args", f"{source.name}: {kind} has no argument {key!r}", nearest(key, defaults))
    known = {name: value for name, value in published.items() if name in defaults}
    config = {**defaults, **known, **args}
    unusual = {"class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim"}
    unsupported = sorted(name for name in unusual if config.get(name))
    if config.get("addition_embed_type") not in (None, "text_time"):
        unsupported.append("addition_embed_type")
    if unsupported:
        message = f"{source.name}: a UNet with {', '.join(unsupported)} is not supported"
        raise ModelError("model-config", message, "simulate your training script (zerofit simulate -- COMMAND)")
    return cls, config


def _class(name: str, kind: str) -> type[ConfigMixin]:
    try:
        import diffusers
    except ImportError:
        message = f"{name} needs diffusers, which is not installed"
        raise ModelError("model-library", message, "pip install 'zerofit[diffusers]'") from None
    assert kind in DENOISERS  # checked by the catalog
    return getattr(diffusers, kind)


def is_denoiser(model: nn.Module) -> bool:
    """Return whether a model is a denoiser of diffusers."""
    return type(model).__name__ in DENOISERS and type(model).__module__.startswith("diffusers.")


# The inputs are noise already, so no noise is added. The loss has no meaning, but memory and time are as in
# training.
def denoising_loss(model: nn.Module, named: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error of a denoiser's predicted noise.

    `named`: the denoiser's inputs, and "noise". If a model also predicts a variance (DiT), the loss is on the noise
    only.
    """
    noise = named.pop("noise")
    arguments: dict[str, Any] = {}  # tensors, or dictionaries of tensors
    for name, tensor in named.items():
        group, dot, inner = name.partition(".")
        if dot:
            arguments.setdefault(group, {})[inner] = tensor
        else:
            arguments[name] = tensor
    latents = next(iter(named.values()))
    if latents.dim() == 3:  # Flux's tokens, which also need their positions
        arguments |= _token_positions(latents, named["encoder_hidden_states"])
    predicted = model(**arguments, return_dict=False)[0]
    if predicted.shape != noise.shape:  # DiT's variance
        predicted = predicted[:, : noise.shape[1]]
    return functional.mse_loss(predicted.float(), noise.float())


def _token_positions(latents: Tensor, text: Tensor) -> dict[str, Tensor]:
    """Return row and column of each token of a square image, and zeros for the prompt's tokens."""
    side = round(latents.shape[1] ** 0.5)
    image = torch.zeros(side, side, 3, device=latents.device, dtype=latents.dtype)
    indices = torch.arange(side, device=latents.device)
    image[..., 1] = indices[:, None]
    image[..., 2] = indices[None, :]
    return {"img_ids": image.flatten(0, 1), "txt_ids": torch.zeros(text.shape[1], 3).to(latents)}
