"""List the named input tensors of a model that returns its own loss.

They depend on the model's config. An encoder-decoder gets tokens for both sides. Whisper gets spectrograms, and CLIP
gets images and texts. A model with images in its text gets pixels and placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.hf_config import FRAMES_A_POSITION, make_config
from zerofit.models.inputs import Fed, NamedInput, NamedInputs
from zerofit.models.presets import ModelArgs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PIXELS = 448  # default side of an image, for models that accept any size


def named_inputs(source: ModelSource, args: ModelArgs, seq_len: int, fed: Fed) -> NamedInputs:
    """Return the inputs of a model that returns its own loss, of `seq_len` tokens per sample."""
    if source.task == "denoising":
        from zerofit.models.denoisers import denoiser_inputs

        return denoiser_inputs(source, args, fed)
    setting, make = TASKS[source.task]
    for name in fed.set_names():
        if name != setting:
            message = f"{source.name} ({source.task}) has no input {name}"
            raise ModelError("model-inputs", message, f"use --input {setting}:... and --seq-len")
    config = make_config(source, None, args)
    tensors = make(source.name, config, seq_len, fed)
    return NamedInputs(tensors=tensors, vocab_size=config.get_text_config().vocab_size, seq_len=seq_len)


def _text(name: str, config: PreTrainedConfig, length: int, first: tuple[int, int] | None = None) -> NamedInput:
    return NamedInput(name=name, shape=(length,), ids=config.get_text_config().vocab_size, first=first)


def _seq2seq(name: str, config: PreTrainedConfig, seq_len: int, fed: Fed) -> tuple[NamedInput, ...]:
    """Return the encoder's tokens and the labels, from which the model makes further inputs."""
    return _text("input_ids", config, seq_len), _text("labels", config, fed.decoder or seq_len)


def _speech(name: str, config: PreTrainedConfig, seq_len: int, fed: Fed) -> tuple[NamedInput, ...]:
    frames = fed.frames or FRAMES_A_POSITION * config.max_source_positions
    if frames % FRAMES_A_POSITION:
        message = f"{name} needs an even number of frames, not {frames}"
        raise ModelError("model-inputs", message, f"use --input frames:{frames + 1}")
    spectrogram = NamedInput(name="input_features", shape=(config.num_mel_bins, frames))
    return spectrogram, _text("labels", config, seq_len)


def _pixels(name: str, config: PreTrainedConfig, fed: Fed) -> NamedInput:
    channels, pixels = fed.image or (config.vision_config.num_channels, config.vision_config.image_size)
    return NamedInput(name="pixel_values", shape=(channels, pixels, pixels))


def _pairs(name: str, config: PreTrainedConfig, seq_len: int, fed: Fed) -> tuple[NamedInput, ...]:
    """Return an image and its text. The text is the label."""
    return _pixels(name, config, fed), _text("input_ids", config, seq_len)


def _image_text(name: str, config: PreTrainedConfig, seq_len: int, fed: Fed) -> tuple[NamedInput, ...]:
    """Return an image and a text that begins with a placeholder token for each patch."""
    if hasattr(config.vision_config, "spatial_merge_size"):
        return _patches_text(name, config, seq_len, fed)
    pixels = _pixels(name, config, fed)
    patches = (pixels.shape[1] // config.vision_config.patch_size) ** 2
    patches += config.vision_feature_select_strategy == "full"  # also the class token's
    return _tokens_of_image(name, config, seq_len, patches), pixels, _text("labels", config, seq_len)


def _tokens_of_image(name: str, config: PreTrainedConfig, seq_len: int, patches: int) -> NamedInput:
    if patches >= seq_len:
        message = f"{name}: an image needs {patches} tokens, but a sample has only {seq_len}"
        raise ModelError("model-inputs", message, f"use --seq-len above {patches}, or smaller images with --input")
    return _text("input_ids", config, seq_len, first=(config.image_token_id, patches))


def _patches_text(name: str, config: PreTrainedConfig, seq_len: int, fed: Fed) -> tuple[NamedInput, ...]:
    """Return an image as rows of patches, like Qwen's processors, and a text with image tokens."""
    vision = config.vision_config
    channels, pixels = fed.image or (vision.in_channels, PIXELS)
    # The model joins spatial_merge_size x spatial_merge_size patches into one token.
    side = vision.patch_size * vision.spatial_merge_size
    if pixels % side or channels != vision.in_channels:
        near = max(1, round(pixels / side)) * side
        message = f"{name} needs {vision.in_channels} channels and a side that is a multiple of {side} pixels"
        message += f"; got {channels} channels and {pixels} pixels"
        raise ModelError("model-inputs", message, f"use --input image:{vision.in_channels}x{near}x{near}")
    # A patch covers several frames of a video. The processor repeats an image for each of them.
    patches, numbers = (pixels // vision.patch_size) ** 2, channels * vision.temporal_patch_size * vision.patch_size**2
    tokens = _tokens_of_image(name, config, seq_len, patches // vision.spatial_merge_size**2)
    image = NamedInput(name="pixel_values", shape=(patches, numbers), image=(channels, pixels))
    return tokens, image, _text("labels", config, seq_len)


# by task: the setting of `--input`, and the function that returns the inputs
Maker = Callable[[str, "PreTrainedConfig", int, Fed], tuple[NamedInput, ...]]
TASKS: dict[str, tuple[str, Maker]] = {
    "seq2seq-lm": ("decoder", _seq2seq),
    "speech": ("frames", _speech),
    "image-text-pairs": ("image", _pairs),
    "image-text": ("image", _image_text),
}
