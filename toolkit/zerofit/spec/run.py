"""The run: all settings of `zerofit train`. Each field is an option and a key of run.yaml.

A run is loaded from run.yaml or run.json and overridden by flags; all problems are reported together.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

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
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, to_jsonable_python

from zerofit.features.checkpointing import Checkpointing
from zerofit.features.optimizers import ENTRIES, Optimizer
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_yaml import read_own_yaml
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.model_facts import DEFAULT_PRECISION, AttentionKernel, Precision
from zerofit.spec.named_code import in_run_folder, refuse_foreign_code
from zerofit.spec.partial_training import PART_FIELDS, Bits, LoraInit, LoraSettings, PartialTraining, Quantization
from zerofit.spec.profiling import Numbers
from zerofit.spec.units import MOST_RANKS, Interval

PipelineSchedule = Literal["1f1b", "dualpipev"]
_MOMENTA = {entry.name: entry.momentum for entry in ENTRIES if entry.momentum is not None}
LARGEST = 2**32 - 1  # for all integers: NumPy's largest seed, far above any number of steps, samples or ranks
# Without re.ASCII, \d matches the digits of every script, and float() reads them.
_DECIMAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
AUTO = "auto"
_WORDS = ("true", "false", "yes", "no", "on", "off")


def _checked_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator that checks a text with `parse` and keeps it as written, for run.json."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _option(default: object, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, **limits)


def micro_batches_of(text: str) -> tuple[int, ...]:
    """Return the micro batch of each rank in `--micro-batch-by-rank`; () for "auto".

    Raises ValueError.
    """
    if text == "auto":
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= LARGEST for word in words):
        raise ValueError("neither auto nor a positive integer for each rank, like 4,2")
    return tuple(map(int, words))


def _listed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _stages(value: object) -> object:
    number = float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value
    if number == AUTO:
        return number
    # Not isinstance, since true is an int in Python.
    if (type(number) is int or type(number) is float) and 0 < number <= LARGEST and number == int(number):
        return int(number)
    raise ValueError("neither auto nor a positive integer")


Stages = Annotated[int | Literal["auto"], BeforeValidator(_stages)]
# YAML gives numbers for 500 or 3, which are texts here
_AsText = BeforeValidator(lambda value: str(value))
ByRank = Annotated[str, BeforeValidator(_listed), _checked_by(micro_batches_of)]
Every = Annotated[str, _AsText, _checked_by(Interval.parse)]
Chosen = Annotated[str, _AsText, _checked_by(Numbers.parse)]
Sizes = Annotated[str, _AsText, _checked_by(ImageSizes.parse)]


def plain_type(annotation: object) -> object:
    """Return a field's type without Optional and Annotated; str if one of its types is str."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [plain_type(kind) for kind in get_args(annotation) if kind is not type(None)]
        mixed = len(kinds) > 1 and get_origin(kinds[-1]) is Literal  # a number or a word
        return str if str in kinds else annotation if mixed else kinds[0]
    return annotation


def switch(field: str, value: bool | str) -> str:
    """Return the flag that sets a field to `value`: on (True), off (False), or a word."""
    name = field.replace("_", "-")
    return f"--{name}" if value is True else f"--{value or 'no'}-{name}"


def is_switch(field: str) -> bool:
    """Return whether a field's flags have no value: it is on, off, or one of a few words."""
    kind = plain_type(Run.model_fields[field].annotation)
    return kind is bool or bool in get_args(kind)


class Run(BaseModel):
    """One training run, as requested. A field that is None gets its value later.

    That value comes from the DeepSpeed JSON, the model or a default. Runs are immutable. Raises UserError with all
    unknown names (and the nearest known names) and all bad values.

    >>> run = Run(model="gpt2", data="pysource", ds_config="zero3", micro_batch=4, precision="bf16")
    >>> run.model_copy(update={"seq_len": 512}).seq_len
    512
    """

    # protected_namespaces: pydantic 2.9 warns about fields that begin with `model_`, such as `model_args`.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    # what
    model: str = _option(
        "llama-tiny", "model name, config.json, pretrained folder, hub:ORG/NAME or package.module:callable"
    )
    model_args: dict[str, Any] = _option({}, "JSON object that overrides the model's config or arguments")
    pretrained: Path | None = _option(
        None, "initial weights: a state dict (.pth, .safetensors), or a trained model's folder (RUN/model)"
    )
    task: Literal["classify", "tag", "seq2seq"] | None = _option(
        None,
        "task of a transformers model: classify texts, tag words, or write texts (default: from the model's config)",
    )
    loss: Literal["cross-entropy", "mse"] | None = _option(None, "loss for a model without its own loss")
    data: str | None = _option(
        None,
        "digits, mnist-5k, mnist, fashion-mnist, cifar10, imagefolder:PATH, segmentation:PATH, csv:FILE[:COLUMN], "
        "npy:FILE[:COLUMN], pysource, text:GLOB, jsonl:GLOB, hf:NAME, synthetic",
    )
    data_root: Path | None = _option(None, "folder of the torchvision data sets")
    download: bool = _option(False, "download the torchvision data set if --data-root does not have it")
    text_field: str = _option("text", "field of the text (or words, or source), for jsonl: and hf:")
    pair_field: str | None = _option(None, "field of a second text (default: text_pair if rows have it)")
    label_field: str | None = _option(None, "field of the target (default: label, tags or target, depending on --task)")
    target_len: PositiveInt | None = _option(None, "tokens per target text of seq2seq (default: --seq-len)")
    generate_samples: NonNegativeInt = _option(32, "with seq2seq: texts to generate and score at validation (ROUGE)")
    tokenizer: str = _option(
        "bytes", "bytes, a local tokenizer folder, or a hub name (default for a model folder: its tokenizer)"
    )
    stream: bool = _option(
        False, "with --data hf:NAME: read the data set over the network while training, for data larger than the disk"
    )
    chat_template: Path | None = _option(
        None,
        "chat template: chatml, qwen, llama2, llama3, mistral, gemma, phi3, phi4, zephyr, vicuna, alpaca, or a "
        "Jinja file (default: the tokenizer's)",
    )
    packing: bool = _option(True, "pack several conversations into a sample, without attention between them")
    image_size: PositiveInt | None = _option(None, "resize images to this height and width, in pixels")
    skip_bad: bool = _option(False, "skip and count unreadable images or rows instead of refusing to start")
    data_workers: NonNegativeInt | None = _option(None, "data loader processes per rank (default: depends on the data)")

    # the trained part of the model
    lora: PositiveInt | None = _option(None, "freeze the model and train adapters of this LoRA rank (peft)")
    lora_alpha: PositiveInt | None = _option(None, "scale adapters by alpha / rank (default alpha: twice the rank)")
    lora_dropout: float = _option(0.0, "dropout of the adapters' input", ge=0, lt=1)
    lora_targets: str = _option(
        "all-linear", "layers with adapters: comma-separated names, or all-linear (without the head)"
    )
    lora_init: LoraInit = _option("default", "initialization of the adapters, as in peft")
    dora: bool = _option(False, "also train magnitudes (weight-decomposed LoRA)")
    rslora: bool = _option(False, "scale adapters by alpha / sqrt(rank) (rank-stabilized LoRA)")
    train: tuple[str, ...] = _option((), "train only these parameters or modules, like '*.mlp.*'; may be repeated")
    freeze: tuple[str, ...] = _option((), "freeze these parameters or modules, like wte; may be repeated")
    quantize: Bits | None = _option(
        None, "quantize the frozen linear layers of --lora to 4 bits (nf4) or 8 bits (int8), with bitsandbytes"
    )
    double_quant: bool = _option(False, "also quantize the scales of nf4: saves 0.4 bits per weight")

    # training on images
    label_smoothing: float = _option(
        0.0, "label smoothing: share of each target that is spread over all classes", ge=0, lt=1
    )
    mixup: PositiveFloat | None = _option(
        None, "mix pairs of images and labels (MixUp); the ratio is drawn from Beta(A, A)"
    )
    cutmix: PositiveFloat | None = _option(
        None, "paste part of an image into another (CutMix); the area is drawn from Beta(A, A)"
    )
    random_erasing: float = _option(0.0, "probability of erasing a rectangle of an image", ge=0, le=1)
    image_sizes: Sizes | None = _option(
        None, "image sizes that grow during training; 128:0.5,160 uses size 128 for half of the steps, then 160"
    )
    sync_batch_norm: bool = _option(False, "synchronize batch norm over all ranks")
    ema: float | None = _option(
        None, "also evaluate and save a moving average of the weights with this decay", gt=0, lt=1
    )

    # length of the training and batch sizes
    steps: PositiveInt | None = _option(None, "optimizer steps")
    epochs: PositiveFloat | None = _option(None, "passes over the training data (rounded up to a whole step)")
    micro_batch: PositiveInt | None = _option(None, "samples per rank in one forward and backward")
    micro_batch_by_rank: ByRank | None = _option(
        None,
        "micro batch of each data parallel rank, like 4,2; auto: by the measured speed of the ranks",
    )
    gradient_accumulation_steps: PositiveInt | None = _option(None, "micro batches per optimizer step")
    global_batch: PositiveInt | None = _option(None, "samples per optimizer step, over all ranks")
    seq_len: PositiveInt | None = _option(None, "tokens per sample of text")

    # optimization
    optimizer: Optimizer | None = _option(
        None, "optimizer (default: sgd for a CNN from scratch, else adamw); 8-bit optimizers are from bitsandbytes"
    )
    lr: PositiveFloat | None = _option(
        None, "peak learning rate (default: depends on model, optimizer and batch; see docs/defaults.md)"
    )
    schedule: Literal["cosine", "linear", "constant"] = _option("cosine", "learning rate schedule after the warm-up")
    warmup_steps: NonNegativeInt | None = _option(None, "steps of linear warm-up (default: 5 % of the steps)")
    min_lr: NonNegativeFloat = _option(0.0, "final learning rate of the cosine and linear schedules")
    weight_decay: NonNegativeFloat | None = _option(
        None, "weight decay of matrices (default 0.01; see docs/defaults.md)"
    )
    momentum: NonNegativeFloat | None = _option(
        None, f"momentum of {' and '.join(_MOMENTA)} (default {', '.join(map(str, _MOMENTA.values()))})"
    )
    gradient_clipping: NonNegativeFloat | None = _option(None, "largest gradient norm; 0 is off (default 1.0)")
    seed: NonNegativeInt = _option(0, "seed of weights, sample order, dropout and augmentation")

    # numbers and memory
    precision: Precision | None = _option(
        None, f"fp32, bf16 or fp16 (default: as in the DeepSpeed JSON, else {DEFAULT_PRECISION})"
    )
    activation_checkpointing: Checkpointing = _option(False, "recompute activations in backward to save memory")
    activation_offload: bool = _option(
        False, "recompute activations, and keep the activation checkpoints in host memory"
    )
    loss_chunk: PositiveInt | None = _option(
        None, "compute logits for this many targets at a time, to save memory (default: all)"
    )
    mlp_chunk: PositiveInt | None = _option(
        None, "run MLPs on this many tokens at a time, to save memory (default: all)"
    )
    compile: bool = _option(False, "torch.compile the model through the engine")
    attn_implementation: AttentionKernel | None = _option(
        None, "attention kernel of a transformers model, as in --model-args (default: sdpa)"
    )

    # layout
    ds_config: str | dict[str, Any] | None = _option(
        None, "DeepSpeed JSON: a file, or a name from ds_configs/ (default: zero2, or pipeline if --pipeline is set)"
    )
    fit: bool = _option(
        False,
        "choose every setting that is not given: the fastest layout, batch split and DeepSpeed JSON that fit",
    )
    ranks: PositiveInt | None = _option(None, "ranks to start (default: all local devices)", le=MOST_RANKS)
    tensor_parallel: PositiveInt = _option(1, "tensor parallel degree")
    pipeline: Stages = _option(
        1, "pipeline parallel degree; auto: the ranks divided by the other degrees, or the fastest degree with --fit"
    )
    pipeline_balance: Literal["parameters", "time"] = _option("parameters", "quantity that is balanced between stages")
    pipeline_schedule: PipelineSchedule = _option(
        "1f1b", "schedule of a pipeline's micro batches; dualpipev: each stage has two parts of the layers"
    )
    sequence_parallel: PositiveInt = _option(1, "sequence parallel degree (Ulysses)")
    expert_parallel: PositiveInt = _option(1, "number of data ranks that split the experts (AutoEP)")

    # saving
    save_every: Every = _option("30min", "steps (500) or time (30min) between checkpoints; 0: never")
    save_async: bool = _option(False, "write checkpoints in the background, from a copy in host memory")
    keep_last: PositiveInt = _option(3, "number of newest checkpoints to keep")
    keep_every: NonNegativeInt = _option(0, "also keep the checkpoint of every Nth step; 0: none")
    resume: str = _option(
        "auto",
        "checkpoint to resume from; auto: the newest complete checkpoint of the run folder; never: start from scratch",
    )

    # watching
    eval_every: NonNegativeInt = _option(0, "steps between evaluations; 0: only at the end")
    eval_samples: PositiveInt | None = _option(None, "validation samples per evaluation (default: all)")
    check_loss: bool = _option(
        False, "stop before an optimizer step if its loss or gradient norm is not finite, to protect the weights"
    )
    record_memory: bool = _option(
        False,
        "record the last allocations of GPU ranks; if a rank runs out of memory, `zerofit explain RUN` reads them",
    )
    heartbeat_timeout: float = _option(
        60.0, "stop all ranks after this many seconds without a heartbeat of a rank", ge=5, le=1e6
    )
    log_every: PositiveInt = _option(10, "if the output is not a terminal: steps between progress lines")
    callbacks: tuple[str, ...] = _option(
        (), "callback as package.module:Class (a zerofit.train.callbacks.Callback); may be repeated"
    )
    profile: Chosen | None = _option(
        None, "steps to trace with torch.profiler, like 3-5 (the first steps are slower); traces go to the run folder"
    )
    profile_ranks: Chosen = _option("0", "ranks to trace with --profile, like 0,8 or 0-3")
    tensorboard: bool = _option(False, "write TensorBoard events into the run folder")
    wandb: str | None = _option(None, "Weights & Biases project to log to")
    output: Path | None = _option(None, "run folder (default runs/MODEL-DATA-TIME)")

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: object, info: ValidationInfo) -> object:
        """Refuse values that pydantic would convert to something unintended. Raises ValueError."""
        kind = plain_type(cls.model_fields[info.field_name or ""].annotation)
        if kind in (int, float):
            if isinstance(value, bool) or (isinstance(value, str) and not _DECIMAL.fullmatch(value)):
                raise ValueError(f"not a {'whole ' if kind is int else ''}number in decimal digits")
            number = float(value) if isinstance(value, str) else value
            if kind is int and isinstance(number, int | float) and number > LARGEST:
                raise ValueError(f"at most {LARGEST:,}")
        if bool in (kind, *get_args(kind)) and not isinstance(value, bool) and value is not None:
            words = [word for part in get_args(kind) for word in get_args(part)]
            if str(value).lower() not in (*_WORDS, *words):
                raise ValueError(", ".join(("neither true nor false", *(f"nor {word}" for word in words))))
        if isinstance(value, dict):
            try:
                json.dumps(to_jsonable_python(value), allow_nan=False)
            except ValueError as error:  # nan, or a Python object
                raise ValueError(f"it cannot be stored as JSON in the run folder: {error}") from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _with_attention(cls, values: object) -> object:
        """Copy `attn_implementation` into `model_args`, since models are built from `model_args`."""
        if not isinstance(values, dict):  # a damaged file; pydantic then says what it expects
            return values
        kernel, args = (values.get(name) for name in ("attn_implementation", "model_args"))
        if kernel is None or not isinstance(args or {}, dict):
            return values
        return {**values, "model_args": {**(args or {}), "attn_implementation": kernel}}

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(*map(_problem, error.errors())) from None

    @property
    def stages(self) -> int:
        """The number of pipeline stages; 1 before "auto" is settled."""
        return 1 if self.pipeline == AUTO else self.pipeline

    @property
    def partial(self) -> PartialTraining | None:
        """The trained part of the model; None if all parameters are trained."""
        if self.lora is None and not self.train and not self.freeze:
            return None
        lora = self.lora and LoraSettings(
            rank=self.lora,
            alpha=self.lora_alpha or 2 * self.lora,
            dropout=self.lora_dropout,
            targets=self.lora_targets,
            init=self.lora_init,
            dora=self.dora,
            rslora=self.rslora,
        )
        quantized = self.quantize and Quantization(kind=self.quantize, double=self.double_quant)
        return PartialTraining(
            lora=lora or None, train=self.train, freeze=self.freeze, seed=self.seed, quantization=quantized or None
        )

    @classmethod
    def load(cls, path: str | Path, *, trust_model_code: bool = False, **overrides: Any) -> Run:
        """Read a run.yaml or run.json, such as a run folder's; `overrides` replace its values.

        If a run folder's file names code (package.module:callable) as model or callback, the file is refused unless
        `trust_model_code`. Raises UserError with all problems and their lines.
        """
        values, places, faults = _read_run_file(Path(path))
        places = {key: place for key, place in places.items() if key not in overrides}
        run = _checked_run(values | overrides, places, faults)
        _refuse_foreign_code(Path(path), run, overrides, trust_model_code)
        return run


# `train` and `launch` have a flag for each field of a run, `simulate`, `plan` and `check` for these.
_FLAGS = {
    "simulate plan check": (
        *("model_args", "micro_batch", "gradient_accumulation_steps", "global_batch", "seq_len", "optimizer"),
        *("tensor_parallel", "pipeline", "pipeline_schedule", "sequence_parallel", "expert_parallel", *PART_FIELDS),
    ),
    "simulate plan": (
        *("task", "micro_batch_by_rank", "activation_checkpointing", "activation_offload", "loss_chunk", "mlp_chunk"),
        *("attn_implementation", "ds_config", "ema"),
    ),
    "simulate": (
        *("loss", "data", "data_root", "text_field", "pair_field", "label_field", "target_len", "tokenizer"),
        *("image_size", "pretrained", "label_smoothing", "mixup", "cutmix", "image_sizes", "sync_batch_norm"),
    ),
    "simulate check": ("steps", "gradient_clipping", "precision", "ranks"),
    "plan": ("compile",),  # others, such as lr, change neither memory nor step time
    "check": ("lr", "schedule", "warmup_steps", "min_lr", "weight_decay", "momentum"),
}
# field of a run -> dotted key of the DeepSpeed JSON with the same value. A switch, such as activation_offload, is on if
# the run or the JSON has it on, so the two cannot differ: `config.decide` reads both.
DS_KEYS = {
    "micro_batch": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
    "gradient_clipping": "gradient_clipping",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "momentum": "optimizer.params.momentum",
    "tensor_parallel": "tensor_parallel.autotp_size",
    "sequence_parallel": "sequence_parallel_size",
    "expert_parallel": "expert_parallel.autoep_size",
}


def fields_of(command: str) -> tuple[str, ...]:
    """Return the fields of a run with a flag of `simulate`, `plan` or `check`."""
    return tuple(field for commands, fields in _FLAGS.items() if command in commands.split() for field in fields)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as requested, and the place of each explicit value (for messages)."""

    run: Run
    places: Mapping[str, str]  # field -> "--micro-batch" or "run.yaml:3"

    @classmethod
    def of(cls, run: Run | RunRequest) -> RunRequest:
        """Return the request for a run that was created in Python. The place of a field is its name.

        >>> RunRequest.of(Run(model="mlp", micro_batch=4)).place("micro_batch")
        'micro_batch'
        """
        if isinstance(run, RunRequest):
            return run
        return cls(run=run, places={name: name for name in run.model_fields_set})

    def place(self, field: str) -> str:
        """Return the place where the user set this field, or else its flag."""
        return self.places.get(field, flag(field))

    def updated(self, **fields: object) -> RunRequest:
        """Return the request with these fields of the run replaced. The places do not change."""
        return replace(self, run=self.run.model_copy(update=fields))


def flag(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.replace("_", "-") if field != "model" else "MODEL"


def load_run(file: Path | None, flags: Mapping[str, object], trust_model_code: bool = False) -> RunRequest:
    """Return the run from a file and flags; flags override the file.

    Raises UserError with all unknown keys (and the nearest known keys) and all bad values. If a run folder's file
    names code, raises UserError unless `trust_model_code`.
    """
    values, places, faults = _read_run_file(file) if file else ({}, {}, [])
    values |= flags
    places |= {field: flag(field) for field in flags}
    run = _checked_run(values, places, faults, name_flags=True)
    if file:
        _refuse_foreign_code(file, run, flags, trust_model_code)
    # A null in a file means that zerofit chooses the value, so it counts as not given.
    return RunRequest(run=run, places={k: p for k, p in places.items() if k in flags or values[k] is not None})


def _refuse_foreign_code(file: Path, run: Run, typed: Collection[str], trusted: bool) -> None:
    """Refuse code that a run folder's run file names. `typed`: the fields that the user gave."""
    if in_run_folder(file):
        own = {"model": run.model, "model_args": run.model_args, "callbacks": run.callbacks}
        refuse_foreign_code(file, trusted, **{name: value for name, value in own.items() if name not in typed})


def _checked_run(
    values: Mapping[Any, Any], places: Mapping[Any, str], faults: Sequence[Problem], *, name_flags: bool = False
) -> Run:
    """Return the run with these `values`, whose keys may be of any YAML type.

    Raises UserError with all problems at their `places`, and the file's `faults`. `name_flags`: hints name the flag
    of the field.
    """

    def placed(problem: Problem) -> Problem:
        field, hint = problem.where, problem.hint
        if name_flags and field in Run.model_fields:
            hint = f"{flag(field)}: {hint}"
        return replace(problem, hint=hint, where=places.get(field, field))

    problems = Problems()
    problems.extend(faults)
    problems.extend(replace(_unknown_key(key), where=places[key]) for key in values if not isinstance(key, str))
    faulty = {fault.where.rpartition(":")[0] for fault in faults}  # places without the column
    try:
        run = Run(**{key: value for key, value in values.items() if isinstance(key, str)})
    except UserError as error:
        problems.extend(problem for problem in map(placed, error.problems) if problem.where not in faulty)
        raise UserError(*problems) from None
    problems.raise_if_any()
    return run


def _unknown_key(key: object) -> Problem:
    shown = repr(key) if isinstance(key, str) else str(key)
    return Problem(
        kind="unknown-key", message=f"unknown key {shown}", hint=nearest(str(key), Run.model_fields), where=str(key)
    )


def _problem(entry: ErrorDetails) -> Problem:
    field = str(entry["loc"][0])
    if entry["type"] == "extra_forbidden":
        return _unknown_key(field)
    shown, fault = repr(entry["input"]), entry["msg"].removeprefix("Value error, ")
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    message = f"{field}: got {shown}; {fault[0].lower()}{fault[1:]}"
    return Problem(kind="bad-value", message=message, hint=Run.model_fields[field].description or "", where=field)


def _read_run_file(file: Path) -> tuple[dict[Any, Any], dict[Any, str], list[Problem]]:
    """Return a YAML or JSON mapping, the places of its keys, and its faults. Raises UserError.

    If `ds_config` names a file next to the run file, its value becomes that file's path.
    """
    hint = "write it as lines of `key: value`; `zerofit train --help` lists the keys"

    def problem(fault: Unreadable, message: str) -> Problem:
        place = f"{file}:{fault.line}:{fault.column}" if fault.line else str(file)
        return Problem(kind="syntax", message=message, hint="" if fault.line else hint, where=place)

    try:
        values, lines, faults = read_own_yaml(file)
    except Unreadable as fault:
        raise UserError(problem(fault, f"{file} is not a run file: {fault.reason}")) from None
    except OSError as error:
        message = f"cannot read {file}: {error}"
        raise UserError(Problem(kind="unreadable", message=message, where=str(file))) from None
    places = {key: f"{file}:{lines[key]}" if key in lines else str(file) for key in values}
    config = values.get("ds_config")
    # the file beside it, wherever the folder is; a run folder's own ds_config.json is the filled-in one
    if isinstance(config, str) and not in_run_folder(file) and (file.parent / config).is_file():
        values["ds_config"] = str(file.parent / config)
    return values, places, [problem(fault, fault.reason) for fault in faults]
