"""Weights that a model of torchvision's, of ours or of a user's own begins with, out of a file; nothing in it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.inputs import ImageInputs, Inputs

HINT = "a state dict of this model (.pth, .pt, .safetensors), or the folder of a trained one (RUN/model)"
FILES = ("model.safetensors", "pytorch_model.bin")  # of a folder
WRAPPERS = ("state_dict", "model")  # keys under which training scripts keep a model's weights
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "aux_classifier.")  # heads of torchvision's that only training needs
# names of torchvision's published files which its own loading code changes (models/densenet.py, vision_transformer.py)
RENAMED = ((r"(\.denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2."), (r"\.mlp\.linear_1\.", ".mlp.0."))
RENAMED += ((r"\.mlp\.linear_2\.", ".mlp.3."),)
COUNTER = "num_batches_tracked"  # which older files lack
NAMED = 5  # tensors that an error lists


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """A file's tensors by name: their shapes, and a way to read one of them."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True)
class MatchedWeights:
    """A model's tensors in a file."""

    names: dict[str, str]  # the model's names -> the file's
    head: str | None  # the layers (LR-ASPP has two) that have another number of classes in the file, and are drawn anew
    head_classes: int = 0  # of the file
    left_out: tuple[str, ...] = ()  # auxiliary heads of the file


def weight_file(path: Path) -> Path:
    """Return the file of weights that a user means: itself, or a model's in its folder. Raises ModelError."""
    path = path.expanduser()
    for folder in (path, path / "model") if path.is_dir() else ():
        for name in FILES:
            if (folder / name).is_file():
                return folder / name
    if not path.is_file():
        what = "holds no model.safetensors or pytorch_model.bin" if path.is_dir() else "does not exist"
        raise ModelError("model-weights", f"--pretrained {path} {what}", HINT)
    return path


def open_weights(path: Path) -> HeldWeights:
    """Open a file of weights; its tensors stay on the disk until they are read. Raises ModelError."""
    file = weight_file(path)
    try:
        if file.suffix == ".safetensors":
            opened: Any = safe_open(file, framework="pt")
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            return HeldWeights(path=file, shapes=shapes, read=opened.get_tensor)
        held = _load(file)
    except (OSError, SafetensorError) as error:
        raise ModelError("model-weights", f"{file} cannot be read: {error}", "is the download complete?") from None
    for name in WRAPPERS:
        held = held[name] if isinstance(held, dict) and isinstance(held.get(name), dict) else held
    if not isinstance(held, dict) or not held or not all(isinstance(one, Tensor) for one in held.values()):
        raise ModelError("model-weights", f"{file} holds something else than tensors by name", HINT)
    return HeldWeights(path=file, shapes={name: tuple(t.shape) for name, t in held.items()}, read=held.__getitem__)


def _load(file: Path) -> Any:
    """Read a torch file, mapped where its format allows; only tensors and plain values are made."""
    for mapped in (True, False):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except OSError:
            raise
        except RuntimeError as error:  # torch's older format cannot be mapped
            if not mapped or "mmap can only" not in str(error):
                raise ModelError("model-weights", f"{file} is not a whole torch file: {error}", HINT) from None
        except Exception as error:  # a pickle that asks for code, or is damaged
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            message = f"{file} is not a file of weights alone, and nothing in it was run: {reason}"
            raise ModelError("unsafe-file", message, HINT) from None
    raise AssertionError


def match(model: nn.Module, source: ModelSource, inputs: Inputs | None, held: HeldWeights) -> MatchedWeights:
    """Find each of the model's tensors in a file; a head of another number of classes is the only one to differ.

    Raises ModelError with what is missing, superfluous or of another shape.
    """
    ours = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    names = {_renamed(name, ours): name for name in held.shapes}
    auxiliary = {name for name in names if name.startswith(AUXILIARY) and name not in ours}
    missing = [n for n in ours if n not in names and not n.endswith(COUNTER)]
    superfluous = [name for name in names if name not in ours and name not in auxiliary]
    other = [n for n in ours if n in names and held.shapes[names[n]] != ours[n]]
    classes = inputs.classes if isinstance(inputs, ImageInputs) else None
    owners = sorted({name.rpartition(".")[0] for name in other})
    of_head = [n for n in other if ours[n][:1] == (classes,) and held.shapes[names[n]][1:] == ours[n][1:]]
    head = ", ".join(owners) if other and len(of_head) == len(other) else None
    parts = [f"{what} {_listed(found)}" for what, found in (("lacks", missing), ("has", superfluous)) if found]
    if other and head is None:
        shown = [f"{name} {held.shapes[names[name]]} for {ours[name]}" for name in other]
        parts.append(f"has another shape of {_listed(shown)}")
    if parts:
        hint = "only a head may have another number of classes: is it this model, and this --image-size?"
        raise ModelError("model-weights", f"{held.path} does not fit {source.name}: it {'; it '.join(parts)}", hint)
    found = {n: names[n] for n in ours if n in names and n not in other}
    theirs = held.shapes[names[other[0]]][0] if head else 0
    left_out = tuple(sorted({name.partition(".")[0] for name in auxiliary}))
    return MatchedWeights(names=found, head=head, head_classes=theirs, left_out=left_out)


def load_pretrained(model: nn.Module, source: ModelSource, inputs: Inputs | None) -> nn.Module:
    """Put a file's weights into a built model, one tensor at a time; what is on meta is only looked at."""
    assert source.pretrained
    if source.family == "transformers":
        message = f"--pretrained with {source.name}: a transformers model has its weights in its own folder"
        raise ModelError("model-weights", message, "name the folder as MODEL")
    held = open_weights(Path(source.pretrained))
    state = model.state_dict(keep_vars=True)
    for name, theirs in match(model, source, inputs, held).names.items():
        if not state[name].is_meta:
            state[name].data.copy_(held.read(theirs))
    return model


def notes_on(model: nn.Module, source: ModelSource, inputs: Inputs | None) -> list[str]:
    """Return what a user should know of how a file's weights are taken; the model may be on meta."""
    assert source.pretrained
    held = open_weights(Path(source.pretrained))
    found, notes = match(model, source, inputs, held), []
    if found.head is not None and isinstance(inputs, ImageInputs):
        notes.append(drawn_anew(found.head, found.head_classes, str(held.path), inputs))
    if found.left_out:
        notes.append(f"{held.path} has auxiliary heads, which are left out: {', '.join(found.left_out)}")
    return notes


def drawn_anew(head: str, classes: int, where: str, inputs: ImageInputs) -> str:
    """Say that a head begins anew."""
    return f"the head ({head}) is drawn anew: it has {classes} classes in {where}, the data has {inputs.classes}"


def _renamed(name: str, ours: dict[str, Any]) -> str:
    """Return the model's name of a file's tensor."""
    if name in ours:
        return name
    plain = name.removeprefix("module.")  # as DistributedDataParallel saves it
    for pattern, new in RENAMED:
        plain = re.sub(pattern, new, plain)
    return plain


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
