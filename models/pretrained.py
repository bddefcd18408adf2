"""Load initial weights from a file into a model of zerofit, torchvision or a user.

Code in the file is never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.inputs import ImageInputs, Inputs

HINT = "give a state dict of this model (.pth, .pt, .safetensors), or the folder of a trained model (RUN/model)"
FILES = ("model.safetensors", "pytorch_model.bin")  # in a folder
WRAPPERS = ("state_dict", "model")  # keys that training scripts save a model's weights under
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "aux_classifier.")  # torchvision's heads that are only for training
# old names in torchvision's published files, which its loading code changes (models/densenet.py, vision_transformer.py)
RENAMED = ((r"(\.denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2."), (r"\.mlp\.linear_1\.", ".mlp.0."))
RENAMED += ((r"\.mlp\.linear_2\.", ".mlp.3."),)
COUNTER = "num_batches_tracked"  # missing in older files
NAMED = 5  # tensors that an error lists


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """The shapes of a file's tensors by name, and a function that reads a tensor."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True)
class MatchedWeights:
    """The mapping from a model's tensors to the tensors of a file."""

    names: dict[str, str]  # the model's names -> the file's
    head: str | None  # layers (LR-ASPP has two) with another number of classes in the file, which stay random
    head_classes: int = 0  # in the file
    left_out: tuple[str, ...] = ()  # auxiliary heads in the file


def weight_file(path: Path) -> Path:
    """Return the file of weights: `path`, or a file in this folder. Raises ModelError."""
    path = path.expanduser()
    for folder in (path, path / "model") if path.is_dir() else ():
        for name in FILES:
            if (folder / name).is_file():
                return folder / name
    if not path.is_file():
        what = "has no model.safetensors or pytorch_model.bin" if path.is_dir() else "does not exist"
        raise ModelError("model-weights", f"--pretrained {path} {what}", HINT)
    return path


def open_weights(path: Path) -> HeldWeights:
    """Open a file of weights without reading its tensors. Raises ModelError."""
    file = weight_file(path)
    try:
        if file.suffix == ".safetensors":
            opened = safe_open(file, framework="pt")
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            return HeldWeights(path=file, shapes=shapes, read=opened.get_tensor)
        content = _load(file)
    except (OSError, SafetensorError) as error:
        raise ModelError("model-weights", f"{file} cannot be read: {error}", "is the download complete?") from None
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise ModelError("model-weights", f"{file} is not a dictionary of tensors", HINT)
    shapes = {name: tuple(t.shape) for name, t in content.items()}
    return HeldWeights(path=file, shapes=shapes, read=content.__getitem__)


def _load(file: Path) -> object:
    """Read a torch file, memory-mapped if possible. Only tensors and plain values are loaded."""
    for mapped in (True, False):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except OSError:
            raise
        except RuntimeError as error:  # torch's older format cannot be memory-mapped
            if not mapped or "mmap can only" not in str(error):
                raise ModelError("model-weights", f"{file} is damaged or not a torch file: {error}", HINT) from None
        except Exception as error:  # a pickle with code, or a damaged pickle
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            message = f"{file} contains more than weights (nothing in it was run): {reason}"
            raise ModelError("unsafe-file", message, HINT) from None
    raise AssertionError


# A file fits if each tensor of the model is in it with the same shape, with three exceptions:
#
# - torchvision's auxiliary heads, which are only for training and which zerofit leaves out
# - counters of batch norms, which files of older versions of torch lack
# - a head with another number of classes: it starts at random, and a note informs the user
def match(model: nn.Module, source: ModelSource, inputs: Inputs | None, weights: HeldWeights) -> MatchedWeights:
    """Find each of the model's tensors in a file.

    Only a head may have another number of classes. Raises ModelError with all missing tensors, superfluous tensors and
    wrong shapes.
    """
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    names = {_renamed(name, shapes): name for name in weights.shapes}
    auxiliary = {name for name in names if name.startswith(AUXILIARY) and name not in shapes}
    missing = [n for n in shapes if n not in names and not n.endswith(COUNTER)]
    superfluous = [name for name in names if name not in shapes and name not in auxiliary]
    differing = [n for n in shapes if n in names and weights.shapes[names[n]] != shapes[n]]
    classes = inputs.classes if isinstance(inputs, ImageInputs) else None
    owners = sorted({name.rpartition(".")[0] for name in differing})
    # Another number of classes changes only the first dimension of the head's weight and bias.
    of_head = [n for n in differing if shapes[n][:1] == (classes,) and weights.shapes[names[n]][1:] == shapes[n][1:]]
    head = ", ".join(owners) if differing and len(of_head) == len(differing) else None
    parts = [f"{what} {_listed(tensors)}" for what, tensors in (("lacks", missing), ("has", superfluous)) if tensors]
    if differing and head is None:
        shown = [f"{name} {weights.shapes[names[name]]} instead of {shapes[name]}" for name in differing]
        parts.append(f"has different shapes: {_listed(shown)}")
    if parts:
        hint = "check the model and --image-size; only a head may have another number of classes"
        message = f"{weights.path} does not match {source.name}: it {'; it '.join(parts)}"
        raise ModelError("model-weights", message, hint)
    matched = {n: names[n] for n in shapes if n in names and n not in differing}
    head_classes = weights.shapes[names[differing[0]]][0] if head else 0
    left_out = tuple(sorted({name.partition(".")[0] for name in auxiliary}))
    return MatchedWeights(names=matched, head=head, head_classes=head_classes, left_out=left_out)


def load_pretrained(model: nn.Module, source: ModelSource, inputs: Inputs | None) -> nn.Module:
    """Load a file's weights one tensor at a time. Tensors on meta are only checked."""
    assert source.pretrained
    if source.family == "transformers":
        message = f"--pretrained does not apply to the transformers model {source.name}"
        raise ModelError("model-weights", message, "give its folder as MODEL")
    weights = open_weights(Path(source.pretrained))
    state = model.state_dict(keep_vars=True)
    for name, name_in_file in match(model, source, inputs, weights).names.items():
        if not state[name].is_meta:
            state[name].data.copy_(weights.read(name_in_file))
    return model


def _renamed(name: str, shapes: Container[str]) -> str:
    if name in shapes:
        return name
    plain = name.removeprefix("module.")  # added by DistributedDataParallel
    for pattern, new in RENAMED:
        plain = re.sub(pattern, new, plain)
    return plain


def _listed(names: list[str]) -> str:
    unnamed = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + unnamed
