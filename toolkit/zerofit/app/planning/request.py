"""The request to plan, checked before any model is traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zerofit.app.job.requests import PACKED, parse_input
from zerofit.app.planning.corrections import MeasuredSpeed, TunedLayouts, read_tuned
from zerofit.app.planning.layout_pins import LayoutPins, fixed_attributes, read_config, refuse_impossible, uncounted
from zerofit.check.dotted import get
from zerofit.config.validate import check_part
from zerofit.features.engines import Engine
from zerofit.features.optimizers import PLANNED
from zerofit.models.catalog import shape_named
from zerofit.models.names import left_out
from zerofit.models.presets import PRESETS
from zerofit.plan.outlook import Work
from zerofit.spec.errors import Problems
from zerofit.spec.hybrid_engine import HYBRID_ENGINE_FAULTS, WITHOUT_HYBRID_ENGINE, hybrid_engine_error
from zerofit.spec.model_facts import gives_loss, is_text
from zerofit.spec.partial_training import PART_FIELDS
from zerofit.spec.profile import Profile, Savings
from zerofit.spec.run import Run, load_run
from zerofit.spec.run_folder import Layout

Maximum = Literal["seq-len", "micro-batch", "layers"]
Minimum = Literal["gpus"]
PLANNED_ONLY = ("liger_kernel", "tensor_sequence_parallel")  # options that `zerofit train` lacks


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """A model, the fixed values of its run, and the goal of the plan.

    Raises UserError with all problems.
    """

    model: str | Run | None = None  # None: the profile's
    pins: LayoutPins
    profile: Path | None = None  # a stored profile, instead of the model
    image: str | None = None  # "image:3x224x224", input of an image model
    maximum: Maximum | None = None
    minimum: Minimum | None = None
    tuned: Path | None = None  # folder of `zerofit tune`; its trials correct step times
    top: int = 10  # layouts to return
    nvme_path: str = "/local_nvme"  # for layouts that offload to disk
    measured: MeasuredSpeed | None = None  # speed of the pinned layout; the search then ignores the pins
    from_trace: Path | None = None  # a trace of real steps, whose kernel times replace the catalog's
    work: Work | None = None  # length and cost of the training
    confirm: int = 0  # number of layouts to simulate
    trust_model_code: bool = False  # import code named in a stored profile or in the run folder of `from_trace`
    notes: tuple[str, ...] = field(init=False, default=())  # on the model's name, and on what the forecasts leave out
    write: bool = False  # a layout will be written; it is simulated first, except with a stored profile
    engines: tuple[Engine, ...] = ("deepspeed",)

    def __post_init__(self) -> None:
        problems = Problems()
        if isinstance(self.model, Run):
            fields = {name: getattr(self.model, name) for name in self.model.model_fields_set}
            pins = {name: fields[name] for name in LayoutPins.__annotations__ if name in fields}
            # An option of the plan wins over the same field of the run.
            object.__setattr__(self, "pins", {**pins, **self.pins})
            object.__setattr__(self, "model", self.model.model)
        if (optimizer := self.pins.get("optimizer")) and optimizer not in PLANNED:
            message = f"--optimizer {optimizer}: plan cannot forecast its states"
            problems.add("usage", message, f"use one of {', '.join(PLANNED)}, or simulate", "--optimizer")
        if kernel := self.pins.get("attn_implementation"):
            # transformers reads the kernel of attention from the config, so it is an argument of the model here
            args = {**(self.pins.get("model_args") or {}), "attn_implementation": kernel}
            object.__setattr__(self, "pins", {**self.pins, "model_args": args})
        of_run = {n: v for n, v in self.pins.items() if v is not None and n in Run.model_fields and n != "ds_config"}
        problems.attempt(lambda: load_run(None, of_run))  # refuses --micro-batch 0 and the like
        if (config := problems.attempt(lambda: self.ds_config)) is not None:
            # The checks below need the JSON. If it is unreadable, its own problem is enough.
            if keys := uncounted(self.pins, config):
                note = f"the forecasts do not include {', '.join(keys)} of the DeepSpeed JSON"
                object.__setattr__(self, "notes", (note,))
            refuse_impossible(self.pins, fixed_attributes(self.pins, config), config, problems)
            partial_run = problems.attempt(lambda: Run(**self.part))
            if partial_run:
                check_part(partial_run, Layout(dp=1, tp=self.pins.get("tensor_parallel") or 1), config, problems)
        if (self.model is None) == (self.profile is None):
            problems.add("usage", "plan needs MODEL or --profile FILE", "use one of them", "MODEL")
        if isinstance(self.model, str):
            # A hub name of the same shape as a preset gets the preset's name: forecasts need only the shape.
            shape = shape_named(self.model)
            object.__setattr__(self, "model", shape.name)
            object.__setattr__(self, "notes", (*self.notes, *filter(None, (shape.note, left_out(shape.name)))))
            self._check_model(self.model, problems)
        batch = self.pins.get("global_batch") or 0
        for name in ("micro_batch", "gradient_accumulation_steps") if batch > 0 else ():
            flag, size = "--" + name.replace("_", "-"), self.pins.get(name) or 0
            if size > 0 and batch % size:
                message = f"{flag} {size} does not divide --global-batch {batch}"
                problems.add("batch-size", message, f"remove {flag}, or use a divisor", flag)
        # --write makes a run for `zerofit train`, and --confirm simulates one.
        for goal in (flag for flag, value in (("--write", self.write), ("--confirm", self.confirm)) if value):
            for flag in (f"--{name.replace('_', '-')}" for name in PLANNED_ONLY if self.pins.get(name)):
                problems.add("usage", f"`zerofit train` does not support {flag} ({goal})", f"remove {flag}", flag)
        if self.maximum and self.minimum:
            problems.add("usage", "--max and --min cannot be combined", "use one of them", "--max, --min")
        if self.tuned and self.measured:
            message = "--from and --measured cannot be combined: each option corrects the step times"
            problems.add("usage", message, "use one of them", "--from, --measured")
        if self.from_trace and (self.tuned or self.measured):
            other = "--from" if self.tuned else "--measured"
            message = f"--from-trace and {other} cannot be combined: each option corrects the step times"
            problems.add("usage", message, "use one", f"--from-trace, {other}")
        if self.engines != ("deepspeed",):
            self._check_engines(problems)
        if self.image:
            problems.attempt(lambda: parse_input(self.image or ""))
        if self.tuned:
            problems.attempt(lambda: self.corrections)
        problems.raise_if_any()

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON with fixed values; {} without one. Raises UserError."""
        return read_config(self.pins.get("ds_config"))

    @cached_property
    def part(self) -> dict[str, Any]:
        """The fields of the run that select which part of the model is trained."""
        return {name: self.pins[name] for name in PART_FIELDS if self.pins.get(name)}

    @cached_property
    def corrections(self) -> TunedLayouts | None:
        """The trials of a tuning. Raises UserError if they cannot be read."""
        return read_tuned(self.tuned) if self.tuned else None

    def refuse_meaningless(self, profile: Profile) -> None:
        """Raise a UserError for flags and JSON keys that do not apply to this kind of model."""
        problems = Problems()
        inputs, size = ("rows of a table", "features:N") if profile.task == "table" else ("images", "image:CxHxW")
        if not is_text(profile.task) and self.pins.get("seq_len"):
            message = f"{profile.model} uses {inputs}, which have no --seq-len"
            problems.add("flag", message, f"remove it; --input {size} sets the size", "--seq-len")
        if profile.seq_len is None and self.work and self.work.tokens:
            message = f"{profile.model} uses {inputs}, but --tokens is for text"
            problems.add("flag", message, "use --samples instead", "--tokens")
        if profile.seq_len is not None and self.image not in (None, PACKED) and not gives_loss(profile.task):
            message = f"{profile.model} uses tokens, but --input is for images"
            problems.add("flag", message, "remove it; --seq-len sets the number of tokens", "--input")
        # DeepSpeed's hybrid engine replaces modules of known models, and is wrong for some of them.
        fault = HYBRID_ENGINE_FAULTS.get(profile.model_type or "")
        if fault and get(self.ds_config, "hybrid_engine.enabled") is True:
            message = hybrid_engine_error(profile.model_type or "", fault)
            problems.add("combination", message, WITHOUT_HYBRID_ENGINE, "--ds-config")
        problems.raise_if_any()

    def _check_engines(self, problems: Problems) -> None:
        """If other engines are planned too, refuse the options that only DeepSpeed's layouts have."""
        options = {"--from": self.tuned, "--measured": self.measured, "--ds-config": self.pins.get("ds_config")}
        options |= {f"--{name.replace('_', '-')}": self.pins.get(name) for name in Savings._fields}
        for flag in (flag for flag, value in options.items() if value):
            message = f"--engine {','.join(self.engines)} with {flag}, which is for DeepSpeed alone"
            problems.add("usage", message, "remove one of them", f"--engine, {flag}")

    def _check_model(self, model: str, problems: Problems) -> None:
        if Path(model).suffix in (".yaml", ".yml"):
            hint = f"name its model; `zerofit simulate {model}` shows what that run needs"
            problems.add("usage", f"plan needs a MODEL, but {model} is a run", hint, "MODEL")
        # Configs of GPT-2's family call the limit n_positions.
        config = {**PRESETS.get(model, {}), **self.pins.get("model_args", {})}
        longest = config.get("n_positions") or config.get("max_position_embeddings")
        seq_len = self.pins.get("seq_len")
        if seq_len and longest and seq_len > longest:
            message = f"--seq-len {seq_len} is more than the {longest} positions of {model}"
            problems.add("seq-len", message, f"use {longest} or fewer", "--seq-len")
