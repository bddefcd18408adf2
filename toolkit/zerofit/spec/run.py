"""The run: everything that a user can ask of `zerofit train`, one field an option and a key of run.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic_core import ErrorDetails

from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.interval import Interval
from zerofit.spec.precision import Precision


def _interval(text: str) -> str:
    Interval.parse(text)
    return text


Every = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_interval)]


class Run(BaseModel):
    """One training run, as asked. `None` means: taken from the DeepSpeed JSON, the model or a default when resolved.

    Immutable. Raises UserError with all unknown names (the nearest ones offered) and all bad values.

    >>> run = Run(model="gpt2", data="pysource", ds_config="zero3", micro_batch=4, precision="bf16")
    >>> run.model_copy(update={"seq_len": 512}).seq_len
    512
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    # what
    model: str = Field(
        default="llama-tiny", description="model name, config.json, pretrained folder or package.module:callable"
    )
    model_args: dict[str, Any] = Field(
        default={}, description="JSON object: overrides of the model's config or arguments"
    )
    loss: Literal["cross-entropy", "mse"] | None = Field(
        default=None, description="loss for a model that has none of its own"
    )
    data: str | None = Field(
        default=None,
        description="digits, mnist, fashion-mnist, cifar10, imagefolder:PATH, pysource, text:GLOB, jsonl:GLOB, "
        "hf:NAME, synthetic",
    )
    data_root: Path | None = Field(default=None, description="folder that holds (or gets) the torchvision data sets")
    download: bool = Field(default=False, description="download a torchvision data set that data_root does not hold")
    text_field: str = Field(default="text", description="the field that holds the text, for jsonl: and hf:")
    tokenizer: str = Field(
        default="bytes", description="bytes, a local tokenizer folder, or a hub name (default: the model folder's own)"
    )
    image_size: PositiveInt | None = Field(
        default=None, description="pixels to which images are resized (height and width)"
    )
    skip_bad: bool = Field(default=False, description="count and skip unreadable images instead of refusing to start")
    data_workers: NonNegativeInt | None = Field(
        default=None, description="loader processes a rank (default: by the data)"
    )

    # how long and how much
    steps: PositiveInt | None = Field(default=None, description="optimizer steps")
    epochs: PositiveFloat | None = Field(
        default=None, description="passes over the training data (rounded up to a whole step)"
    )
    micro_batch: PositiveInt | None = Field(
        default=None, description="samples a rank takes through one forward and backward"
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        default=None, description="micro batches in one optimizer step"
    )
    global_batch: PositiveInt | None = Field(default=None, description="samples in one optimizer step, over all ranks")
    seq_len: PositiveInt | None = Field(default=None, description="tokens in one sample of text")

    # optimization
    optimizer: Literal["adamw", "sgd", "muon"] | None = Field(
        default=None, description="optimizer (default: sgd for a CNN from scratch, else adamw)"
    )
    lr: PositiveFloat | None = Field(
        default=None, description="peak learning rate (default: by model, optimizer and batch, see docs/defaults.md)"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="learning rate after the warm-up"
    )
    warmup_steps: NonNegativeInt | None = Field(
        default=None, description="steps of linear warm-up (default: 5 % of the steps)"
    )
    min_lr: NonNegativeFloat = Field(default=0.0, description="learning rate that cosine and linear come down to")
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="weight decay of matrices (default 0.01, see docs/defaults.md)"
    )
    momentum: NonNegativeFloat | None = Field(default=None, description="momentum of sgd and muon (default 0.9, 0.95)")
    gradient_clipping: NonNegativeFloat | None = Field(
        default=None, description="largest gradient norm; 0 is off (default 1.0)"
    )
    seed: NonNegativeInt = Field(
        default=0, le=2**32 - 1, description="seed of weights, sample order, dropout and augmentation"
    )

    # numbers and memory
    precision: Precision | None = Field(
        default=None, description="fp32, bf16 or fp16 (default: the DeepSpeed JSON's, else fp32)"
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in backward to save memory"
    )
    loss_chunk: PositiveInt | None = Field(
        default=None, description="targets whose logits are in float32 at a time, to save memory (default: all)"
    )
    compile: bool = Field(default=False, description="torch.compile the model through the engine")

    # layout
    ds_config: str | dict[str, Any] | None = Field(
        default=None,
        description="DeepSpeed JSON: a file, or a name from ds_configs/ (default zero2; pipeline with --pipeline)",
    )
    ranks: PositiveInt | None = Field(default=None, description="ranks to start (default: all local devices)")
    tensor_parallel: PositiveInt = Field(default=1, description="tensor parallel degree")
    pipeline: PositiveInt = Field(default=1, description="pipeline parallel degree")
    pipeline_balance: Literal["parameters", "time"] = Field(
        default="parameters", description="what stages are balanced by"
    )
    sequence_parallel: PositiveInt = Field(default=1, description="sequence parallel degree (Ulysses)")

    # saving
    save_every: Every = Field(
        default="30min", description="steps (500) or time (30min) between checkpoints; 0: none are saved"
    )
    save_async: bool = Field(
        default=False, description="write checkpoints while training goes on, from a copy in host memory"
    )
    keep_last: PositiveInt = Field(default=3, description="newest checkpoints that are kept")
    keep_every: NonNegativeInt = Field(
        default=0, description="checkpoints of steps that this divides are kept too; 0: none"
    )
    resume: str = Field(
        default="auto",
        description="auto (go on where the run folder's newest whole checkpoint is), never, or a checkpoint",
    )

    # watching
    eval_every: NonNegativeInt = Field(default=0, description="steps between evaluations; 0: only at the end")
    eval_samples: PositiveInt | None = Field(
        default=None, description="validation samples an evaluation looks at (default: all)"
    )
    heartbeat_timeout: float = Field(
        default=60.0, ge=5, description="seconds without a heartbeat of a rank after which all ranks are stopped"
    )
    log_every: PositiveInt = Field(
        default=10, description="steps between plain progress lines when there is no terminal"
    )
    callbacks: tuple[str, ...] = Field(
        default=(), description="package.module:Class of a zerofit.train.callbacks.Callback; may be repeated"
    )
    tensorboard: bool = Field(default=False, description="write TensorBoard events into the run folder")
    wandb: str | None = Field(default=None, description="Weights & Biases project to log to")
    output: Path | None = Field(default=None, description="run folder (default runs/MODEL-DATA-TIME)")

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(*map(_problem, error.errors())) from None

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Run:
        """Read a run.yaml or run.json, such as a run folder's; `overrides` take the place of its values.

        Raises UserError with all that is wrong, and its lines in the file.
        """
        values, places = read_run_file(Path(path))
        try:
            return cls(**values | overrides)
        except UserError as error:
            places = {key: place for key, place in places.items() if key not in overrides}
            raise UserError(*(replace(p, where=places.get(p.where, p.where)) for p in error.problems)) from None


def _problem(entry: ErrorDetails) -> Problem:
    """One of pydantic's errors, at its field's name."""
    field = str(entry["loc"][0])
    if entry["type"] == "extra_forbidden":
        hint = nearest(field, Run.model_fields)
        return Problem(kind="unknown-key", message=f"unknown key {field!r}", hint=hint, where=field)
    message = f"{field}: got {entry['input']!r}; {entry['msg'][0].lower()}{entry['msg'][1:]}"
    return Problem(kind="bad-value", message=message, hint=Run.model_fields[field].description or "", where=field)


def read_run_file(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a YAML (or JSON) mapping with their values, and the place of each. Raises UserError."""
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise UserError(
            Problem(kind="syntax", message=f"{file} does not parse: {error.problem}", where=where)
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(Problem(kind="unreadable", message=f"cannot read {file}: {error}", where=str(file))) from None
    if not isinstance(values, dict):
        hint = "write it as lines of `key: value`; `zerofit train --help` lists the keys"
        raise UserError(
            Problem(
                kind="syntax",
                message=f"{file} is not a mapping of keys to values",
                hint=hint,
                where=str(file),
            )
        )
    values = {str(key): value for key, value in values.items()}
    return values, {str(k.value): f"{file}:{k.start_mark.line + 1}" for k, _ in node.value}
