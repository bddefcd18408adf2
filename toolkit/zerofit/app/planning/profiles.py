"""Get the profile for a plan: from a file, the cache, or the shipped ones, or by a trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from zerofit.app.job.requests import assumed_inputs
from zerofit.app.job.result_cache import result_file
from zerofit.features.checkpointing import WORDS, Checkpointing, alternatives
from zerofit.features.engines import ENGINES, Engine
from zerofit.models.catalog import ModelError, ModelSource, find, read_config, with_task
from zerofit.models.depth import of_all_layers
from zerofit.models.hf_config import notes_of_config, traced_args
from zerofit.models.inputs import Inputs, are_packed
from zerofit.models.presets import PRESETS
from zerofit.models.shipped_profiles import shipped_profile, shipped_settings
from zerofit.plan.degrees import Degrees, heads_take, settings_of
from zerofit.plan.tensor_split import with_split_sequence
from zerofit.spec.errors import Problem, UserError, models_say
from zerofit.spec.events import Reporter
from zerofit.spec.extras import installed_version, missing_extra
from zerofit.spec.files import write_json
from zerofit.spec.foreign import read_json, refused
from zerofit.spec.model_facts import DEFAULT_SEQ_LEN, EXPERT_TYPES, Task, has_head, is_image
from zerofit.spec.named_code import names_callable
from zerofit.spec.partial_training import PartialTraining
from zerofit.spec.process import deepspeed_quiet
from zerofit.spec.profile import NOTHING_SAVED, LayerCost, Profile, Savings, setting
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job

Costs = tuple[LayerCost, ...]  # the costs of all layers, in one setting
TRACED_RANKS = 8  # largest traced tensor and sequence parallel degree


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A model to profile, and the settings for it."""

    model: str
    precision: str
    device: str  # "cpu" or "cuda"
    seq_len: int | None = None
    image: str | None = None  # "3x224x224"
    model_args: dict[str, object] = field(default_factory=dict)
    checkpointings: tuple[Checkpointing, ...] = (False, True)
    degrees: tuple[Degrees, ...] | None = None  # None: all useful degrees
    savings: Savings = NOTHING_SAVED
    partial: PartialTraining | None = None
    task: str | None = None  # Run.task: the training task, if it differs from the config's
    liger_kernel: bool = False  # with the memory of Liger's kernels
    split_sequence: bool = False  # whether tensor parallel ranks split the sequence between matrix multiplications
    engines: tuple[Engine, ...] = ()  # engines that train their own version of the model: trace it as well
    engine: Engine = "deepspeed"  # whose code of the model is traced

    @classmethod
    def of_run(
        cls, run: Run, precision: str, device: str, image: str | None, degrees: tuple[Degrees, ...] | None
    ) -> ProfileRequest:
        """Return the request for a run's model and settings."""
        return cls(
            model=run.model,
            precision=precision,
            device=device,
            seq_len=run.seq_len,
            image=image,
            model_args=traced_args(run.model_args),
            degrees=degrees,
            checkpointings=alternatives(run.activation_checkpointing),
            savings=Savings.of(run),
            partial=run.partial,
            task=run.task,
        )

    @classmethod
    def of_job(cls, job: Job, device: str, image: str | None) -> ProfileRequest:
        """Return the request for a job's model and settings, at its degrees and without parallelism."""
        layout = job.layout
        degrees = Degrees(layout.tp, layout.pp, layout.sp, layout.ep).beside_plain()
        return cls.of_run(job.run, job.precision, device, image, degrees)


def read_profile(path: Path) -> Profile:
    """Read a stored profile. Raises UserError."""
    with refused(path, kind="profile", hint="`zerofit plan MODEL` stores one and prints its path", where="--profile"):
        return Profile.from_dict(read_json(path))


# A profile is looked for in three places, from fast to slow: the cache of this machine, the profiles that
# ship with zerofit (for named models with usual settings), and a trace on fake tensors, which needs
# torch. A trace is stored in the cache. Its name contains a hash of all that it depends on, so a changed
# config gets another file.
def get_profile(wanted: ProfileRequest, report: Reporter) -> tuple[Profile, Path | None]:
    """Return a stored or shipped profile, or trace the model now; and the profile's file.

    The file is None for a user's own code, since that profile is not stored. Raises ModelError, and UserError, for
    example if the model has to be traced and torch is not installed.
    """
    config = Path(wanted.model)
    with suppress(ModelError):  # a model without a config has no notes
        values = PRESETS.get(wanted.model) or read_config(config / "config.json" if config.is_dir() else config)
        report.note(*notes_of_config(wanted.model, values))
    path = _file_of(wanted)
    profile = stored_profile(wanted)
    if profile is None:
        profile = _shipped(wanted) or _trace_or_refuse(wanted, report)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, profile.as_dict())
    return _as_wanted(profile, wanted, report), path


def _as_wanted(profile: Profile, wanted: ProfileRequest, report: Reporter) -> Profile:
    """Split the sequence, and add the profiles of the engines that train this model with their own code."""
    profile = with_split_sequence(profile) if wanted.split_sequence else profile
    own_models: dict[Engine, Profile] = {}
    for engine in wanted.engines:
        if profile.model_type in ENGINES[engine].own_models and profile.task == "causal-lm" and not wanted.partial:
            of_engine = replace(wanted, engine=engine, engines=(), checkpointings=tuple(WORDS), split_sequence=False)
            own = get_profile(of_engine, report)[0]
            # if the engine's code lacks this variant of the model, the numbers of parameters differ
            own_models |= {engine: own} if own.parameters == profile.parameters else {}
    return replace(profile, own_models=own_models) if own_models else profile


def _shipped(wanted: ProfileRequest) -> Profile | None:
    """Return the shipped profile that matches the request and the installed versions, or None."""
    unusual = (wanted.image, wanted.model_args, wanted.partial, wanted.task, wanted.liger_kernel)
    if any(unusual) or wanted.engine != "deepspeed" or wanted.savings != NOTHING_SAVED:
        return None
    shipped = shipped_profile(wanted.model, wanted.device, wanted.precision, wanted.seq_len)
    # other versions of torch or transformers can run other kernels, so their users get a new trace
    if shipped is None or any(installed_version(name) not in (None, made) for name, made in shipped.versions.items()):
        return None
    settings = [
        setting(wanted.precision, checkpointing, degrees.tp, degrees.sp, degrees.ep)
        for degrees in wanted.degrees or ()
        for checkpointing in wanted.checkpointings
    ]
    return shipped if shipped.costs.keys() >= set(settings) else None


def _trace_or_refuse(wanted: ProfileRequest, report: Reporter) -> Profile:
    report.status(f"tracing {wanted.model} on fake tensors ...")
    try:
        return _trace(wanted, report)
    except ModuleNotFoundError as error:
        # An install without torch can plan models with shipped profiles. Only a trace needs the extra.
        missing = missing_extra(error)
        if missing is None:
            raise
        shipped = ", ".join(shipped_settings(wanted.model))
        message = f"no profile of {wanted.model} ships for these options, and tracing it needs {error.name}, which is "
        message += "not installed"
        hint = f"{missing.hint}; shipped profiles of {wanted.model}: {shipped}" if shipped else missing.hint
        raise UserError(Problem(kind=missing.kind, message=message, hint=hint, where="MODEL")) from error


# A trace with Liger shows the right memory but not the right kernel times. The plan's rates contain the speed-up of
# Liger over the plain kernels, so they need those.
def _with_liger(profile: Profile, wanted: ProfileRequest, report: Reporter) -> Profile:
    """Return a profile traced with Liger, with the kernels of a trace without Liger."""
    if not wanted.liger_kernel:
        return profile
    plain = get_profile(replace(wanted, liger_kernel=False, split_sequence=False), report)[0]

    def with_kernels(costs: Mapping[str, Costs], plain: Mapping[str, Costs]) -> dict[str, Costs]:
        return {
            key: tuple(
                replace(cost, forward_kernels=by.forward_kernels, backward_kernels=by.backward_kernels)
                for cost, by in zip(layers, plain.get(key, layers), strict=True)
            )
            for key, layers in costs.items()
        }

    costs, zero3 = with_kernels(profile.costs, plain.costs), with_kernels(profile.zero3, plain.zero3)
    return replace(profile, costs=costs, zero3=zero3)


def stored_profile(wanted: ProfileRequest) -> Profile | None:
    """Return the stored profile; None if there is none or it is unreadable."""
    path = _file_of(wanted)
    if path is None or not path.is_file():
        return None
    try:
        return read_profile(path)
    except UserError:  # truncated, or from another version
        path.unlink()
        return None


def trace(wanted: ProfileRequest, report: Reporter) -> Profile:
    """Trace the model on fake tensors; report unsupported degrees. Raises UserError, ModelError."""
    return _as_wanted(_trace(wanted, report), wanted, report)


def _trace(wanted: ProfileRequest, report: Reporter) -> Profile:
    with deepspeed_quiet():
        from zerofit.simulate.costs.profile import TraceSetting, profile_model
    from zerofit.train.probe import task_of

    with models_say("MODEL"):
        source = replace(with_task(find(wanted.model), wanted.task), partial=wanted.partial)
    task = task_of(source, Run(model=wanted.model, model_args=wanted.model_args))  # for a user's own model
    if task == "gan":
        message = f"{wanted.model} trains two engines, which plan does not support"
        raise UserError(Problem(kind="model-task", message=message, hint="plan for another model", where="MODEL"))
    with models_say("MODEL"):
        inputs, degrees = _inputs_and_degrees(wanted, source, task)
        checkpointings = wanted.checkpointings
        # A model may turn out not to support a setting only while it is traced. Each round leaves one setting out.
        while True:
            # largest first: a degree that does not divide every layer fails at once
            ordered = sorted(degrees, reverse=True)
            pairs: list[tuple[Degrees, Checkpointing]] = [(degree, c) for degree in ordered for c in checkpointings]
            liger, titan = wanted.liger_kernel, wanted.engine == "torchtitan"
            settings = [
                TraceSetting(wanted.precision, c, d.tp, d.sp, d.ep, wanted.savings, liger=liger, titan=titan)
                for d, c in pairs
            ]
            try:
                profile = profile_model(source, task, inputs, wanted.model_args, settings, wanted.device)
                return _with_liger(profile, wanted, report)
            except ModelError as error:
                if error.kind == "model-checkpointing" and len(checkpointings) > 1:
                    report.note(f"skipped: {error.message}")
                    checkpointings = (False,)
                    continue
                if error.kind != "profile-tp" or wanted.degrees or ordered[0].tp == 1:
                    raise
                report.note(f"skipped: {error.message}")
                degrees.remove(ordered[0])


def _inputs_and_degrees(wanted: ProfileRequest, source: ModelSource, task: Task) -> tuple[Inputs, list[Degrees]]:
    from zerofit.models.hf_config import make_config, max_positions
    from zerofit.train.probe import expert_count

    has_config = source.family == "transformers" and not is_image(task)
    config = make_config(source, None, wanted.model_args) if has_config else None
    seq_len = wanted.seq_len or min(DEFAULT_SEQ_LEN, (config and max_positions(config)) or DEFAULT_SEQ_LEN)
    inputs = assumed_inputs(source, task, seq_len, wanted.image, wanted.model_args)
    attention = of_all_layers(config, "num_attention_heads")
    heads = (attention, of_all_layers(config, "num_key_value_heads") or attention)
    model_type, length = getattr(config, "model_type", None), getattr(inputs, "seq_len", None) or 0
    experts = expert_count(config)
    degrees = wanted.degrees or settings_of(heads, model_type, TRACED_RANKS, experts)
    # Leave out what the engine cannot train: a partly trained model over tensor or expert ranks, experts that the ranks
    # cannot share equally, heads or tokens that they cannot share equally, and a model with a task's head.
    degrees = [d for d in degrees if d.tp * d.ep == 1 or source.partial is None]
    degrees = [d for d in degrees if d.ep == 1 or (model_type in EXPERT_TYPES and (experts or 1) % d.ep == 0)]
    degrees = [d for d in degrees if wanted.engine == "deepspeed" or d == Degrees(tp=d.tp)] or [Degrees()]
    degrees = [Degrees()] if has_head(task) else degrees
    degrees = [d for d in degrees if heads_take(d, heads, model_type) and length % d.sp == 0]
    return inputs, [d for d in degrees if d.sp == 1 or not are_packed(inputs)]  # Ulysses would mix packed documents


def _file_of(wanted: ProfileRequest) -> Path | None:
    """Return the file of the profile, whose name depends on the model's config and all settings.

    None for a user's own code and for a pipeline of diffusers.
    """
    content = _content(wanted.model)
    if content is None:
        return None
    # Without `engines` and `split_sequence`, which are applied to a profile after it is read.
    key = {
        "model": content,
        "args": wanted.model_args,
        "inputs": [wanted.seq_len, wanted.image],
        "settings": [wanted.precision, wanted.checkpointings, wanted.degrees, wanted.savings],
        "device": wanted.device,
        "task": wanted.task,
        "liger": wanted.liger_kernel,
        "engine": wanted.engine,
        "partial": wanted.partial and asdict(wanted.partial),
    }
    stem = "".join(c if c.isalnum() or c in ".-" else "-" for c in Path(wanted.model).name)
    return result_file("profiles", key, f"{stem}-{wanted.precision}-")


def _content(model: str) -> object:
    """Return the config that identifies a named model; None if there is no single config."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    if (path / "model_index.json").is_file():
        return None  # a diffusers pipeline has a config per part
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return None if names_callable(model) else model


def longest_sequence(wanted: ProfileRequest) -> int | None:
    """Return the longest sequence that the model supports; None without a limit.

    Raises UserError.
    """
    from zerofit.app.job.model_facts import max_positions_of

    with models_say("MODEL"):
        source = find(wanted.model)
    return max_positions_of(source, wanted.model_args)
