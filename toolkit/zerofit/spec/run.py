"""The run: everything that a user can ask of `zerofit train`, one field an option and a key of run.yaml.

It is loaded from run.yaml or run.json, overridden by flags, with every problem found at once.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
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
)
from pydantic_core import ErrorDetails, to_jsonable_python

from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.foreign import Unreadable
from zerofit.spec.foreign_yaml import read_own_yaml
from zerofit.spec.image_sizes import ImageSizes
from zerofit.spec.model_facts import Precision
from zerofit.spec.named_code import in_run_folder, refuse_foreign_code
from zerofit.spec.optimizers import Optimizer
from zerofit.spec.partial_training import Bits, LoraInit, LoraSettings, PartialTraining, Quantization
from zerofit.spec.profiling import Numbers
from zerofit.spec.units import MOST_RANKS, Interval

PipelineSchedule = Literal["1f1b", "dualpipev"]
LARGEST = 2**32 - 1  # of any whole number here: what NumPy takes as a seed, and far above any step, sample or rank
_DECIMAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
AUTO = "auto"
_WORDS = ("true", "false", "yes", "no", "on", "off")


def _interval(text: str) -> str:
    Interval.parse(text)
    return text


def _option(default: Any, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, **limits)


def _numbers(text: str) -> str:
    Numbers.parse(text)
    return text


def _sizes(text: str) -> str:
    ImageSizes.parse(text)
    return text


def _by_rank(text: str) -> str:
    micro_batches_of(text)
    return text


def micro_batches_of(text: str) -> tuple[int, ...]:
    """Return the micro batch of each rank that `--micro-batch-by-rank` names; () for "auto". Raises ValueError."""
    if text == "auto":
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= LARGEST for word in words):
        raise ValueError("not auto, and not a whole number above 0 for each rank, like 4,2")
    return tuple(map(int, words))


def _listed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _stages(value: Any) -> Any:
    """Return "auto" or the whole number above 0 that is meant. Raises ValueError."""
    number: Any = float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value
    if number == AUTO:
        return number
    if type(number) in (int, float) and 0 < number <= LARGEST and number == int(number):
        return int(number)
    raise ValueError("neither auto nor a whole number above 0")


Stages = Annotated[int | Literal["auto"], BeforeValidator(_stages)]
ByRank = Annotated[str, BeforeValidator(_listed), AfterValidator(_by_rank)]
Every = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_interval)]
Chosen = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_numbers)]
Sizes = Annotated[str, BeforeValidator(lambda value: str(value)), AfterValidator(_sizes)]


def plain_type(annotation: Any) -> Any:
    """Return the type that a field's value is written as: without Optional and Annotated, str where it may be one."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [plain_type(kind) for kind in get_args(annotation) if kind is not type(None)]
        mixed = len(kinds) > 1 and get_origin(kinds[-1]) is Literal  # a number, or a word in its place
        return str if str in kinds else annotation if mixed else kinds[0]
    return annotation


class Run(BaseModel):
    """One training run, as asked. `None` means: taken from the DeepSpeed JSON, the model or a default when resolved.

    Immutable. Raises UserError with all unknown names (the nearest ones offered) and all bad values.

    >>> run = Run(model="gpt2", data="pysource", ds_config="zero3", micro_batch=4, precision="bf16")
    >>> run.model_copy(update={"seq_len": 512}).seq_len
    512
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    # what
    model: str = _option(
        "llama-tiny", "model name, config.json, pretrained folder, hub:ORG/NAME or package.module:callable"
    )
    model_args: dict[str, Any] = _option({}, "JSON object: overrides of the model's config or arguments")
    pretrained: Path | None = _option(
        None, "weights to begin with: a state dict (.pth, .safetensors), or a trained model's folder (RUN/model)"
    )
    task: Literal["classify", "tag", "seq2seq"] | None = _option(
        None, "what a transformers model is trained to do with a text (default: what its config says)"
    )
    loss: Literal["cross-entropy", "mse"] | None = _option(None, "loss for a model that has none of its own")
    data: str | None = _option(
        None,
        "digits, mnist-5k, mnist, fashion-mnist, cifar10, imagefolder:PATH, segmentation:PATH, csv:FILE[:COLUMN], "
        "npy:FILE[:COLUMN], pysource, text:GLOB, jsonl:GLOB, hf:NAME, synthetic",
    )
    data_root: Path | None = _option(None, "folder that holds (or gets) the torchvision data sets")
    download: bool = _option(False, "download a torchvision data set that data_root does not hold")
    text_field: str = _option("text", "the field that holds the text (or words, or source), for jsonl: and hf:")
    pair_field: str | None = _option(None, "the field of a second text (default: text_pair where rows have it)")
    label_field: str | None = _option(
        None, "the field that holds what is learned (default: label, tags or target, by --task)"
    )
    target_len: PositiveInt | None = _option(None, "tokens in one target text of seq2seq (default: seq_len)")
    generate_samples: NonNegativeInt = _option(
        32, "validation samples of seq2seq whose targets are generated and held against theirs (ROUGE)"
    )
    tokenizer: str = _option(
        "bytes", "bytes, a local tokenizer folder, or a hub name (default: the model folder's own)"
    )
    stream: bool = _option(False, "read hf: as it comes, a part at a time, for data larger than the disk")
    chat_template: Path | None = _option(
        None,
        "what turns conversations into text: chatml, qwen, llama2, llama3, mistral, gemma, phi3, phi4, zephyr, "
        "vicuna, alpaca, or a jinja file (default: the tokenizer's own)",
    )
    packing: bool = _option(True, "put several conversations into a sample, none of which sees another")
    image_size: PositiveInt | None = _option(None, "pixels to which images are resized (height and width)")
    skip_bad: bool = _option(False, "count and skip unreadable images or rows instead of refusing to start")
    data_workers: NonNegativeInt | None = _option(None, "loader processes a rank (default: by the data)")

    # what of it is trained
    lora: PositiveInt | None = _option(None, "train LoRA adapters of this rank (peft's) beside the frozen model")
    lora_alpha: PositiveInt | None = _option(None, "the adapters' scale is alpha / rank (default: twice the rank)")
    lora_dropout: float = _option(0.0, "dropout of what the adapters read", ge=0, lt=1)
    lora_targets: str = _option(
        "all-linear", "layers with adapters: names with commas between, or all-linear (without the head)"
    )
    lora_init: LoraInit = _option("default", "how adapters begin, as peft has it; the frozen weights stay as they are")
    dora: bool = _option(False, "train magnitudes beside the adapters (weight-decomposed LoRA)")
    rslora: bool = _option(False, "scale adapters by alpha / sqrt(rank) (rank-stabilised LoRA)")
    train: tuple[str, ...] = _option(
        (), "parameters or modules that alone are trained, like '*.mlp.*'; may be repeated"
    )
    freeze: tuple[str, ...] = _option((), "parameters or modules that stay as they are, like wte; may be repeated")
    quantize: Bits | None = _option(
        None, "keep the frozen linear layers beside --lora in 4 bits (nf4) or 8 (int8), by bitsandbytes"
    )
    double_quant: bool = _option(False, "quantise the scales of nf4, too: 0.4 bits less a weight")

    # how images are trained on
    label_smoothing: float = _option(0.0, "share of each target that is spread over all classes", ge=0, lt=1)
    mixup: PositiveFloat | None = _option(None, "mix pairs of images and their labels, by Beta(A, A) (MixUp)")
    cutmix: PositiveFloat | None = _option(None, "paste a part of one image into another, by Beta(A, A) (CutMix)")
    random_erasing: float = _option(0.0, "odds that a rectangle of an image is erased", ge=0, le=1)
    image_sizes: Sizes | None = _option(
        None, "sizes that grow while it trains, by share of the steps: 128:0.5,160:0.75,192"
    )
    sync_batch_norm: bool = _option(False, "let batch norms see the micro batches of all ranks together")
    ema: float | None = _option(None, "average the weights with this decay; evaluated and saved, too", gt=0, lt=1)

    # how long and how much
    steps: PositiveInt | None = _option(None, "optimizer steps")
    epochs: PositiveFloat | None = _option(None, "passes over the training data (rounded up to a whole step)")
    micro_batch: PositiveInt | None = _option(None, "samples a rank takes through one forward and backward")
    micro_batch_by_rank: ByRank | None = _option(
        None, "auto (slower ranks take fewer samples, as measured at the start), or each data parallel rank's, like 4,2"
    )
    gradient_accumulation_steps: PositiveInt | None = _option(None, "micro batches in one optimizer step")
    global_batch: PositiveInt | None = _option(None, "samples in one optimizer step, over all ranks")
    seq_len: PositiveInt | None = _option(None, "tokens in one sample of text")

    # optimization
    optimizer: Optimizer | None = _option(
        None, "optimizer (default: sgd for a CNN from scratch, else adamw); those of 8 bits are bitsandbytes'"
    )
    lr: PositiveFloat | None = _option(
        None, "peak learning rate (default: by model, optimizer and batch, see docs/defaults.md)"
    )
    schedule: Literal["cosine", "linear", "constant"] = _option("cosine", "learning rate after the warm-up")
    warmup_steps: NonNegativeInt | None = _option(None, "steps of linear warm-up (default: 5 % of the steps)")
    min_lr: NonNegativeFloat = _option(0.0, "learning rate that cosine and linear come down to")
    weight_decay: NonNegativeFloat | None = _option(
        None, "weight decay of matrices (default 0.01, see docs/defaults.md)"
    )
    momentum: NonNegativeFloat | None = _option(None, "momentum of sgd and muon (default 0.9, 0.95)")
    gradient_clipping: NonNegativeFloat | None = _option(None, "largest gradient norm; 0 is off (default 1.0)")
    seed: NonNegativeInt = _option(0, "seed of weights, sample order, dropout and augmentation")

    # numbers and memory
    precision: Precision | None = _option(None, "fp32, bf16 or fp16 (default: the DeepSpeed JSON's, else fp32)")
    activation_checkpointing: bool = _option(False, "recompute activations in backward to save memory")
    activation_offload: bool = _option(
        False, "recompute activations, and keep what that needs in host memory until backward"
    )
    loss_chunk: PositiveInt | None = _option(
        None, "targets whose logits exist at a time, to save memory (default: all)"
    )
    mlp_chunk: PositiveInt | None = _option(
        None, "tokens of a sequence that an MLP takes at a time, and again in backward, to save memory (default: all)"
    )
    compile: bool = _option(False, "torch.compile the model through the engine")

    # layout
    ds_config: str | dict[str, Any] | None = _option(
        None, "DeepSpeed JSON: a file, or a name from ds_configs/ (default zero2; pipeline with --pipeline)"
    )
    fit: bool = _option(
        False, "choose what is not given: the fastest layout, batch split and DeepSpeed JSON that fit what is free"
    )
    ranks: PositiveInt | None = _option(None, "ranks to start (default: all local devices)", le=MOST_RANKS)
    tensor_parallel: PositiveInt = _option(1, "tensor parallel degree")
    pipeline: Stages = _option(
        1, "pipeline parallel degree; auto: as many stages as ranks that no other degree takes (--fit: the fastest)"
    )
    pipeline_balance: Literal["parameters", "time"] = _option("parameters", "what stages are balanced by")
    pipeline_schedule: PipelineSchedule = _option(
        "1f1b", "order of a pipeline's micro batches; dualpipev: each stage holds two parts of the layers"
    )
    sequence_parallel: PositiveInt = _option(1, "sequence parallel degree (Ulysses)")
    expert_parallel: PositiveInt = _option(1, "data ranks that hold a mixture's experts together (AutoEP)")

    # saving
    save_every: Every = _option("30min", "steps (500) or time (30min) between checkpoints; 0: none are saved")
    save_async: bool = _option(False, "write checkpoints while training goes on, from a copy in host memory")
    keep_last: PositiveInt = _option(3, "newest checkpoints that are kept")
    keep_every: NonNegativeInt = _option(0, "checkpoints of steps that this divides are kept too; 0: none")
    resume: str = _option(
        "auto", "auto (go on where the run folder's newest whole checkpoint is), never, or a checkpoint"
    )

    # watching
    eval_every: NonNegativeInt = _option(0, "steps between evaluations; 0: only at the end")
    eval_samples: PositiveInt | None = _option(None, "validation samples an evaluation looks at (default: all)")
    heartbeat_timeout: float = _option(
        60.0, "seconds without a heartbeat of a rank after which all ranks are stopped", ge=5, le=1e6
    )
    log_every: PositiveInt = _option(10, "steps between plain progress lines when there is no terminal")
    callbacks: tuple[str, ...] = _option(
        (), "package.module:Class of a zerofit.train.callbacks.Callback; may be repeated"
    )
    profile: Chosen | None = _option(
        None, "steps that torch.profiler traces into the run folder, like 3-5; the first steps are slower than the rest"
    )
    profile_ranks: Chosen = _option("0", "ranks that --profile traces, like 0,8 or 0-3")
    tensorboard: bool = _option(False, "write TensorBoard events into the run folder")
    wandb: str | None = _option(None, "Weights & Biases project to log to")
    output: Path | None = _option(None, "run folder (default runs/MODEL-DATA-TIME)")

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would turn into another value than the one that is meant. Raises ValueError."""
        kind = plain_type(cls.model_fields[info.field_name or ""].annotation)
        if kind in (int, float):
            if isinstance(value, bool) or (isinstance(value, str) and not _DECIMAL.fullmatch(value)):
                raise ValueError(f"not a {'whole ' if kind is int else ''}number in decimal digits")
            number = float(value) if isinstance(value, str) else value
            if kind is int and isinstance(number, int | float) and number > LARGEST:
                raise ValueError(f"{LARGEST:,} is the most")
        if kind is bool and not isinstance(value, bool) and str(value).lower() not in _WORDS and value is not None:
            raise ValueError("neither true nor false")
        if isinstance(value, dict):
            try:
                json.dumps(to_jsonable_python(value), allow_nan=False)
            except ValueError as error:  # nan, or an object of Python's
                raise ValueError(f"the run folder keeps it as JSON, which does not hold that: {error}") from None
        return value

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(*map(_problem, error.errors())) from None

    @property
    def stages(self) -> int:
        """The pipeline stages; 1 while "auto" is not settled."""
        return 1 if self.pipeline == AUTO else self.pipeline

    @property
    def partial(self) -> PartialTraining | None:
        """What of the model is trained, where that is not all of it."""
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
        """Read a run.yaml or run.json, such as a run folder's; `overrides` take the place of its values.

        A run folder's file that names a model or callback of the form package.module:callable is refused unless
        `trust_model_code`. Raises UserError with all that is wrong, and its lines in the file.
        """
        values, places, faults = _read_run_file(Path(path))
        places = {key: place for key, place in places.items() if key not in overrides}
        run = _made(values | overrides, places, faults)
        _refuse_foreign_code(Path(path), run, overrides, trust_model_code)
        return run


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run as asked, and where each explicit value stands (for messages that name both places)."""

    run: Run
    places: Mapping[str, str]  # field -> "--micro-batch" or "run.yaml:3"

    @classmethod
    def of(cls, run: Run | RunRequest) -> RunRequest:
        """Return the request of a run that was made in Python: a field that was set stands at its own name.

        >>> RunRequest.of(Run(model="mlp", micro_batch=4)).place("micro_batch")
        'micro_batch'
        """
        if isinstance(run, RunRequest):
            return run
        return cls(run=run, places={name: name for name in run.model_fields_set})

    def place(self, field: str) -> str:
        """Return where the user set this field, or the flag that would set it."""
        return self.places.get(field, flag(field))


def flag(field: str) -> str:
    """Return the command line's word for a field of the run."""
    return "--" + field.replace("_", "-") if field != "model" else "MODEL"


def load_run(file: Path | None, flags: Mapping[str, Any], trust_model_code: bool = False) -> RunRequest:
    """Return the run that a file and flags ask for; a flag overrides the file.

    Raises UserError with all unknown keys (nearest names offered) and all bad values, and for code that a run folder's
    file names unless `trust_model_code`.
    """
    values, places, faults = _read_run_file(file) if file else ({}, {}, [])
    values |= flags
    places |= {field: flag(field) for field in flags}
    run = _made(values, places, faults, name_flags=True)
    if file:
        _refuse_foreign_code(file, run, flags, trust_model_code)
    return RunRequest(run=run, places={k: p for k, p in places.items() if k in flags or values[k] is not None})


def _refuse_foreign_code(file: Path, run: Run, typed: Collection[str], trusted: bool) -> None:
    """Refuse what a run folder's file names, but for fields that the user gave (`typed`). Raises UserError."""
    if in_run_folder(file):
        own = {"model": run.model, "model_args": run.model_args, "callbacks": run.callbacks}
        refuse_foreign_code(file, trusted, **{name: value for name, value in own.items() if name not in typed})


def _made(
    values: Mapping[Any, Any], places: Mapping[Any, str], faults: Sequence[Problem], *, name_flags: bool = False
) -> Run:
    """Return the run of these values, whose keys are as YAML gives them: `1: 2` has a number.

    Raises UserError with all problems at their `places`, and the file's own `faults`; `name_flags`: their hints name
    the field's flag.
    """

    def placed(problem: Problem) -> Problem:
        field, hint = problem.where, problem.hint
        if name_flags and field in Run.model_fields:
            hint = f"{flag(field)} is: {hint}"
        return replace(problem, hint=hint, where=places.get(field, field))

    problems = Problems()
    problems.extend(faults)
    problems.extend(replace(_unknown_key(key), where=places[key]) for key in values if not isinstance(key, str))
    said = {fault.where.rpartition(":")[0] for fault in faults}
    try:
        run = Run(**{key: value for key, value in values.items() if isinstance(key, str)})
    except UserError as error:
        problems.extend(problem for problem in map(placed, error.problems) if problem.where not in said)
        raise UserError(*problems) from None
    problems.raise_if_any()
    return run


def _unknown_key(key: Any) -> Problem:
    shown = repr(key) if isinstance(key, str) else str(key)
    return Problem(
        kind="unknown-key", message=f"unknown key {shown}", hint=nearest(str(key), Run.model_fields), where=str(key)
    )


def _problem(entry: ErrorDetails) -> Problem:
    """Return one of pydantic's errors, at its field's name."""
    field = str(entry["loc"][0])
    if entry["type"] == "extra_forbidden":
        return _unknown_key(field)
    shown, fault = repr(entry["input"]), entry["msg"].removeprefix("Value error, ")
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    message = f"{field}: got {shown}; {fault[0].lower()}{fault[1:]}"
    return Problem(kind="bad-value", message=message, hint=Run.model_fields[field].description or "", where=field)


def _read_run_file(file: Path) -> tuple[dict[Any, Any], dict[Any, str], list[Problem]]:
    """Return the values of a YAML (or JSON) mapping, the places of its keys, and its faults. Raises UserError."""
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
    return values, places, [problem(fault, fault.reason) for fault in faults]
