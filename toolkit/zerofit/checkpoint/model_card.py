"""zerofit.json beside a saved model: which model it is, and what it was fed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerofit.models.catalog import ModelSource
from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.files import write_json
from zerofit.spec.run import Run
from zerofit.spec.task import Task

NAME = "zerofit.json"


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

    @classmethod
    def of_run(cls, run: Run, task: Task, inputs: Inputs, step: int, dtype: str) -> ModelInfo:
        """Return what there is to say of a model that this run has trained for so many steps."""
        same = ("model", "model_args", "loss", "data", "text_field", "tokenizer", "seq_len", "image_size", "seed")
        return cls(**{name: getattr(run, name) for name in same}, task=task, inputs=inputs, step=step, dtype=dtype)

    def write(self, folder: Path) -> None:
        """Write zerofit.json into a model's folder."""
        write_json(folder / NAME, {**asdict(self), "inputs": inputs_to_dict(self.inputs)})


def read_model_info(folder: Path) -> ModelInfo | None:
    """Read zerofit.json in a model's folder; None where there is none. Raises UserError where it is not such a file."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return TypeAdapter(ModelInfo).validate_python(content | {"inputs": inputs_from_dict(content["inputs"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"{file} is not what zerofit writes beside a model: {type(error).__name__}: {reason}"
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
