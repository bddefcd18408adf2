"""zerofit.json beside a saved model: which model it is, and what it was fed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import ImageInputs, Inputs, TextInputs
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_json
from zerofit.spec.run import Run
from zerofit.spec.task import Task

NAME = "zerofit.json"
_INPUTS: dict[str, type[TextInputs] | type[ImageInputs]] = {"text": TextInputs, "image": ImageInputs}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What evaluating or using a saved model needs to know of it, beside its weights."""

    model: str  # as the run named it; the architecture of transformers models is in config.json
    model_args: dict[str, Any]
    task: Task
    inputs: Inputs
    loss: str | None  # of a user's own model that has none
    data: str | None
    text_field: str
    tokenizer: str  # "bytes", or one of transformers', whose files then lie beside the model
    seq_len: int | None  # tokens
    image_size: int | None  # pixels
    step: int  # optimizer steps that it was trained for
    dtype: str  # of the saved parameters: "float32", "bfloat16" or "float16"
    seed: int = 0  # of the run, which made-up data are drawn from


def about_run(run: Run, task: Task, inputs: Inputs, step: int, dtype: str) -> ModelInfo:
    """What there is to say of a model that this run has trained for so many steps."""
    same = ("model", "model_args", "loss", "data", "text_field", "tokenizer", "seq_len", "image_size", "seed")
    return ModelInfo(**{name: getattr(run, name) for name in same}, task=task, inputs=inputs, step=step, dtype=dtype)


def write_about(folder: Path, about: ModelInfo) -> None:
    """Write zerofit.json into a model's folder."""
    write_json(folder / NAME, {**asdict(about), "inputs": inputs_json(about.inputs)})


def read_about(folder: Path) -> ModelInfo | None:
    """What zerofit.json in a model's folder says; None where there is none, UserError where it is no such file."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return ModelInfo(**{**read, "inputs": inputs_of(read["inputs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{file} is not what zerofit writes beside a model: {type(error).__name__}: {error}"
        hint = "export the checkpoint again with `zerofit ckpt export`"
        raise UserError(Problem(kind="bad-about", message=message, hint=hint, where=str(file))) from None


def refuse_untrusted_code(source: ModelSource, model_args: dict[str, Any], file: Path, trusted: bool) -> None:
    """Raise UserError "untrusted-model" where `file` names a callable to import and call, unless that is trusted."""
    if source.family != "custom" or trusted:
        return
    module, _, attribute = source.name.partition(":")
    arguments = ", ".join(f"{name}={value!r}" for name, value in model_args.items())
    message = f"{file} asks to import the module {module} and to call {attribute}({arguments}), which runs its code"
    hint = "--trust-model-code, if you know who wrote the folder and that module"
    raise UserError(Problem(kind="untrusted-model", message=message, hint=hint, where=str(file)))


def inputs_json(inputs: Inputs) -> dict[str, Any]:
    """Inputs as JSON: their fields, and "kind", "text" or "image"."""
    kind = next(kind for kind, cls in _INPUTS.items() if isinstance(inputs, cls))
    return {"kind": kind, **asdict(inputs)}


def inputs_of(written: dict[str, Any]) -> Inputs:
    """The inputs that `inputs_json` wrote. Raises KeyError or TypeError on anything else."""
    return _INPUTS[written["kind"]](**{key: value for key, value in written.items() if key != "kind"})
