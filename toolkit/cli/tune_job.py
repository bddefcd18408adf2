"""A run to be tuned: what it is, and every configuration of it that should fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml

from zerofit.cli.plan_hardware import Asked as Hardware
from zerofit.cli.plan_hardware import clusters
from zerofit.cli.plan_json import choice_json
from zerofit.cli.plan_profile import Wanted, get_profile
from zerofit.cli.plan_question import forecast_of, of_size
from zerofit.cli.plan_write import ds_config as planned_config
from zerofit.cli.prepare import decided
from zerofit.data import NullProgress, RichProgress, open_data
from zerofit.launch.machine import this_machine
from zerofit.plan.choice import Choice
from zerofit.plan.search import search
from zerofit.plan.space import Wish
from zerofit.spec.calibration import read_calibration
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.load import Asked
from zerofit.spec.profile import Profile
from zerofit.spec.run import RunSpec
from zerofit.tune.trial import Candidate

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# of the run: what a trial does not need
QUIET = {"save_every": "0", "eval_every": 0, "eval_samples": 1, "tensorboard": False, "wandb": None, "epochs": None}
ENDLESS = 10**9  # steps: a trial is ended when enough is known
KNOBS = (
    *("zero_stage", "offload", "micro_batch", "gradient_accumulation_steps", "tp", "pp", "sp"),
    *("activation_checkpointing", "overlap_comm", "bucket_elements"),
)


@dataclass(frozen=True)
class TuneJob:
    """What stays the same over all trials."""

    asked: Asked
    run: RunSpec  # everything filled in
    ds_source: dict[str, Any]  # the DeepSpeed JSON as the user has it
    profile: Profile
    candidates: tuple[Candidate, ...]
    device: str  # kind

    @classmethod
    def of(cls, asked: Asked, space: Path | None) -> TuneJob:
        """Check the run, trace its model, forecast every configuration. Raises UserError and ModelError."""
        allowed = read_space(space) if space else {}
        job, source = decided(asked, RichProgress(), this_machine(), Problems())
        run = job.run
        (cluster,) = clusters(Hardware())
        if cluster.ranks != job.layout.world_size:
            cluster = of_size(cluster, job.layout.world_size, 1)
        wanted = Wanted(
            model=run.model,
            precision=run.precision or "fp32",
            device="cpu" if cluster.on_cpu else "cuda",
            seq_len=run.seq_len,
            image=_image(job),
            model_args=dict(run.model_args),
        )
        profile, _ = get_profile(wanted, lambda text: click.echo(text, err=True))
        degrees = {"tp": run.tensor_parallel, "pp": run.pipeline, "sp": run.sequence_parallel}
        fixed = {name: degree for name, degree in degrees.items() if degree > 1}
        wish = Wish(precision=wanted.precision, global_batch=job.batch.total, **fixed)
        calibration = read_calibration(cluster.device.kind)
        found = search(profile, cluster, wish, forecast_of(profile, cluster), calibration, top=10**6)
        candidates = [
            Candidate(choice=one.choice, forecast_step_s=one.time.step_s, peak_bytes=one.memory.peak_bytes)
            for one in found.best
            if allows(allowed, one.choice)
        ]
        if not candidates:
            message = f"none of {found.considered} configurations fits" + (f" and is in {space}" if space else "")
            hint = "`zerofit plan` says what lacks" if not space else "allow more values"
            raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where=str(space or "MODEL")))
        return cls(asked, run, source, profile, tuple(candidates), cluster.device.kind)

    def shown(self, candidate: Candidate) -> str:
        """A configuration in a few words."""
        row = choice_json(candidate.choice)
        batch = f"micro batch {row['micro_batch']} x {row['gradient_accumulation_steps']}"
        parts = [f"ZeRO {row['zero_stage']}", batch]
        parts += [f"{name} {row[name]}" for name in ("tp", "pp", "sp") if row[name] > 1]
        parts += [row["offload"]] if row["offload"] != "none" else []
        parts += ["checkpointing"] if row["activation_checkpointing"] else []
        return ", ".join([*parts, *(["overlap"] if row["overlap_comm"] else [])])

    def ds_config(self, choice: Choice) -> dict[str, Any]:
        """The user's DeepSpeed JSON with this configuration in it; batch sizes are the run's."""
        config = copy.deepcopy(self.ds_source)
        for key in (*BATCH_KEYS, "tensor_parallel", "sequence_parallel_size"):
            config.pop(key, None)
        offload = config.get("zero_optimization", {}).get("offload_param", {})
        planned = planned_config(choice, self.profile, offload.get("nvme_path") or "/local_nvme")
        for key in ("zero_optimization", "tensor_parallel", "sequence_parallel_size"):
            if key in planned:
                config[key] = planned[key]
        return config

    def knobs(self, choice: Choice) -> dict[str, Any]:
        """The keys of run.yaml that this configuration sets."""
        degrees = {"tensor_parallel": choice.tp, "pipeline": choice.pp, "sequence_parallel": choice.sp}
        return {
            "ranks": choice.world_size,
            "micro_batch": choice.micro_batch,
            "gradient_accumulation_steps": choice.accumulation,
            "activation_checkpointing": choice.checkpointing,
            **{name: degree for name, degree in degrees.items() if degree > 1},
        }

    def trial_run(self, choice: Choice) -> dict[str, Any]:
        """run.yaml of a trial: the real run, without an end, saving and evaluating nothing."""
        run = self.run.model_dump(mode="json")
        drop = {"output": None, "resume": "never", "steps": ENDLESS, "global_batch": None}
        degrees = {"tensor_parallel": 1, "pipeline": 1, "sequence_parallel": 1}
        return {**run, **QUIET, **drop, **degrees, **self.knobs(choice), "ds_config": self.ds_config(choice)}


def _image(job: Any) -> str | None:
    if job.facts.task != "image":
        return None
    inputs = open_data(job.run, "image", None, NullProgress()).inputs
    return f"image:{inputs.channels}x{inputs.size}x{inputs.size}"


def read_space(path: Path) -> dict[str, list[Any]]:
    """Allowed values by knob. Raises UserError with everything that is wrong in the file."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(Problem(kind="space", message=f"cannot read {path}: {error}", where="--space")) from None
    if not isinstance(found, dict):
        hint = "lines such as `zero_stage: [1, 2]`"
        raise UserError(Problem(kind="space", message=f"{path} holds no mapping", hint=hint, where="--space"))
    problems = Problems()
    for key in found:
        if key not in KNOBS:
            problems.add("unknown-key", f"unknown knob {key!r}", nearest(str(key), KNOBS), str(path))
    problems.raise_if_any()
    return {key: value if isinstance(value, list) else [value] for key, value in found.items()}


def allows(allowed: Mapping[str, list[Any]], choice: Choice) -> bool:
    """Whether a configuration has only values that are allowed."""
    row = choice_json(replace(choice))
    return all(row[knob] in values for knob, values in allowed.items())
