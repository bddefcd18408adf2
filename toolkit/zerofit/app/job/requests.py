"""Make the request of a run from user input: a `Run`, a run file, a run folder, or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import (
    Fed,
    ImageInputs,
    Inputs,
    LabelledTextInputs,
    NamedInputs,
    TableInputs,
    TextInputs,
    are_packed,
)
from zerofit.spec.errors import Problem, UserError, models_say
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, Task, gives_loss, has_head, is_image
from zerofit.spec.named_code import refuse_foreign_code
from zerofit.spec.run import Run, RunRequest, load_run
from zerofit.spec.run_folder import RunFolder

ADAPTERS = "adapter_config.json"  # peft's
PACKED = "packed"  # `--input` of text whose samples contain several separate documents
LAYOUT = {"ranks", "tensor_parallel", "pipeline", "sequence_parallel", "expert_parallel", "micro_batch"}


def as_request(run: Run | RunRequest | str | Path) -> RunRequest:
    """Return the request for a run, model name, or path of a run file or folder.

    Raises UserError.
    """
    return from_saved(RunRequest.of(run)) if isinstance(run, Run | RunRequest) else read_request(str(run), {})


def from_saved(request: RunRequest, trust_model_code: bool = False) -> RunRequest:
    """If the model is a folder that zerofit saved, replace it with the saved name and weights.

    Other requests are returned unchanged, also those for a transformers model (a folder with config.json). Raises
    UserError, for example if the folder names code and `trust_model_code` is false.
    """
    folder = Path(request.run.model)
    if request.run.pretrained or not folder.is_dir() or (folder / "config.json").is_file():
        return request
    from zerofit.checkpoint.model_folder import CARD, read_model_info  # imports torch

    if not (folder / CARD).is_file():
        return request
    info = read_model_info(folder)
    assert info is not None  # the file exists
    if (folder / ADAPTERS).is_file():
        return request  # the catalog refuses it with a hint
    refuse_foreign_code(folder / CARD, trust_model_code, model=info.model, model_args=info.model_args)
    # arguments of the request win over those with which the model was saved
    model_args = {**info.model_args, **request.run.model_args}
    return request.updated(model=info.model, pretrained=folder, model_args=model_args)


def read_request(target: str | None, flags: Mapping[str, object], trust_model_code: bool = False) -> RunRequest:
    """Return the request for a model's name, a run file or a run folder; flags override values.

    For a run folder, the request resumes its run. Raises UserError, for example if a run folder or a saved model names
    code and `trust_model_code` is false.
    """
    if target and RunFolder(Path(target)).plan.is_file():
        # A new layout gets new batch sizes per rank for the same global batch.
        free = {"micro_batch": None, "gradient_accumulation_steps": None} if LAYOUT & set(flags) else {}
        values = {"output": Path(target), **free, **flags}
        request = load_run(RunFolder(Path(target)).run, values, trust_model_code)
    elif target and is_run_file(target):
        request = load_run(Path(target), dict(flags), trust_model_code)
    else:
        request = load_run(None, {"model": target, **flags} if target else dict(flags))
    return from_saved(request, trust_model_code)


def is_run_file(target: str) -> bool:
    """Return whether `target` is a YAML file, or a JSON file that is not a model's config."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return {"model_type", "_class_name"}.isdisjoint(read_json(path))
    except (Unreadable, OSError):
        return True  # the loader reports what is wrong


def assumed_inputs(
    source: ModelSource, task: Task, seq_len: int | None, image: str | None, model_args: dict[str, Any]
) -> Inputs:
    """Return the inputs of `image` (`--input`), else the model's published inputs.

    Raises UserError.
    """
    if gives_loss(task):
        from zerofit.models.named_inputs import named_inputs

        with models_say("--input"):
            return named_inputs(source, model_args, seq_len or DEFAULT_SEQ_LEN, parse_input(image) if image else Fed())
    from zerofit.models.hf_config import make_config
    from zerofit.models.vision import published_inputs

    # The default inputs are those with which the model was published. A config of the user's own may have others.
    if is_image(task) or task == "table":
        published = published_inputs(source)
        if source.family == "transformers" and source.path and isinstance(published, ImageInputs):
            config = make_config(source, None, model_args)
            size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
            size = max(size) if isinstance(size, list | tuple) else size
            published = replace(
                published,
                size=size or published.size,
                channels=channels or published.channels,
                classes=config.num_labels,
            )
        if image is None:
            return published
        if isinstance(published, TableInputs):
            features = parse_input(image).features
            if features is None:
                message, hint = f"the model needs rows of a table, got {image!r}", "for example features:10"
                raise UserError(Problem(kind="bad-value", message=message, hint=hint, where="--input"))
            return TableInputs(features=features, classes=published.classes)
        channels, size = parse_image(image)
        return replace(published, channels=channels, size=size)
    config: Any = make_config(source, None, model_args) if source.family == "transformers" else None
    if has_head(task):
        assert config  # only models of transformers have task heads
        text = config.get_text_config()
        return LabelledTextInputs(
            vocab_size=text.vocab_size,
            seq_len=seq_len or DEFAULT_SEQ_LEN,
            classes=tuple(str(config.id2label[n]) for n in range(config.num_labels)),
            pad_id=text.pad_token_id or 0,
            tags=task == "tag",
        )
    vocabulary = getattr(config, "vocab_size", None) or model_args.get("vocab_size") or 2
    packed = image is not None and bool(parse_input(image).packed)
    return TextInputs(vocab_size=vocabulary, seq_len=seq_len or DEFAULT_SEQ_LEN, packed=packed)


def input_option(inputs: Inputs | None) -> str | None:
    """Return the `--input` value for inputs, as `parse_input` reads it; None for plain tokens."""
    if are_packed(inputs):
        return PACKED
    if isinstance(inputs, ImageInputs):
        return f"image:{inputs.channels}x{inputs.size}x{inputs.size}"
    if isinstance(inputs, TableInputs):
        return f"features:{inputs.features}"
    # models that compute their own loss have named inputs; the one of images or spectrograms decides the sizes
    for tensor in inputs.tensors if isinstance(inputs, NamedInputs) else ():
        if tensor.name == "pixel_values" or tensor.image:
            channels, size = tensor.image or tensor.shape[:2]
            return f"image:{channels}x{size}x{size}"
        if tensor.name == "input_features":
            return f"frames:{tensor.shape[1]}"
    return f"decoder:{inputs.tensors[-1].shape[0]}" if isinstance(inputs, NamedInputs) else None


def parse_image(text: str) -> tuple[int, int]:
    """Return channels and size of a text such as "image:3x224x224". Raises UserError."""
    fed = parse_input(text)
    if fed.image is None:
        message, hint = f"the model needs images, got {text!r}", "for example image:3x224x224"
        raise UserError(Problem(kind="bad-value", message=message, hint=hint, where="--input"))
    return fed.image


def parse_input(text: str) -> Fed:
    """Read `--input`, for example "image:3x224x224" or "packed". Raises UserError."""
    if text == PACKED:
        return Fed(packed=True)
    kind, _, value = text.rpartition(":")
    parts = value.split("x")
    if all(part.isdigit() and int(part) for part in parts):
        if kind in ("image", "") and len(parts) == 3 and parts[1] == parts[2]:
            return Fed(image=(int(parts[0]), int(parts[1])))
        if kind in ("features", "decoder", "frames") and len(parts) == 1:
            return replace(Fed(), **{kind: int(value)})
    hint = "use channels, height and width of square images (image:3x224x224), a table's features (features:10), a "
    hint += "decoder's tokens (decoder:128), a spectrogram's frames (frames:3000), or packed for text with several "
    hint += "documents per sample"
    raise UserError(Problem(kind="bad-value", message=f"{text!r} is not a valid input", hint=hint, where="--input"))
