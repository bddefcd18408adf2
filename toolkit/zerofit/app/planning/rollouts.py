"""Plan a trainer with a rollout engine (`zerofit plan --method`): memory and time by phase."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.planning.output_files import for_trainer, write_files
from zerofit.app.planning.plan import PlannedRun
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollout_files import Chosen, openrlhf_script, trl_config, verl_script
from zerofit.app.planning.search_setup import SearchSetup, forecast_of, setup_of
from zerofit.app.planning.serving import SETTINGS, served_model
from zerofit.plan.fit import margin_bytes
from zerofit.plan.result import RankedLayout
from zerofit.plan.search import search, timer_of
from zerofit.plan.time import Timer
from zerofit.rollout.heads import EARLY_VERL, OPENRLHF, VERL, online_dpo, with_fused_head, with_whole_head
from zerofit.rollout.methods import METHODS, WITH_PROCESSES, RolloutSettings
from zerofit.rollout.phases import RolloutMemory, findings
from zerofit.rollout.processes import OpenRlhfMemory, ProcessMemory, VerlMemory
from zerofit.rollout.served import ServedModel
from zerofit.rollout.speed import RolloutTime, generation_s
from zerofit.rollout.vllm import STEP, EngineMemory, EngineSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.overhead import HOST_PROCESS_BYTES, context_figure
from zerofit.spec.run import switch
from zerofit.spec.units import counted

TRIED = 60  # training layouts that are combined with an engine
COLOCATED_TOKENS = 4096  # max_num_batched_tokens of TRL's engine
SERVER_UTILIZATION = 0.9
VERL_TOKENS, VERL_SEQUENCES = 8192, 256  # max_num_batched_tokens, max_num_seqs (trainer/config/rollout/rollout.yaml)
OFFLOADS = ("param_offload", "optimizer_offload")
SAMPLES_OF_RANK = 16  # completions per rank and step, if no batch is given


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A training layout with a rollout engine: memory of each phase, and time.

    The engine runs on the GPUs of the training, or on others.
    """

    name: str
    ranked: RankedLayout
    memory: RolloutMemory
    engine: EngineMemory | None  # on the same or on other GPUs; None: nothing is generated
    time: RolloutTime
    server_gpus: int = 0

    @property
    def fits(self) -> bool:
        """Whether all phases fit. If the engine has GPUs of its own, it has to fit too."""
        return self.memory.fits and (self.memory.engine is not None or self.engine is None or self.engine.fits)

    def to_dict(self) -> dict[str, object]:
        """Return a row of `arrangements` in `zerofit plan --method --json`."""
        engine, memory = self.engine, self.memory
        return {
            "name": self.name,
            "fits": self.fits,
            "layout": self.ranked.layout.to_dict(),
            "server_gpus": self.server_gpus,
            "phases": {phase.name: dict(phase.parts) for phase in memory.phases},
            "highest": memory.highest.name,
            "highest_bytes": memory.highest.bytes,
            "device_total_bytes": memory.fit.device_available_bytes,
            "host_bytes": memory.host_bytes,
            "gpu_memory_utilization": engine.settings.gpu_memory_utilization if engine else None,
            "largest_utilization": memory.largest_utilization if memory.engine else None,
            "sequences": round(engine.sequences, 2) if engine else None,
            "time": self.time.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Arrangements of one method on a cluster, fastest first; those that do not fit are last."""

    name: str  # of the method
    cluster: Cluster
    settings: RolloutSettings
    arrangements: tuple[Arrangement, ...]
    setup: SearchSetup = field(repr=False)
    request: PlanningRequest = field(repr=False)
    written: tuple[Path, ...] = ()

    @property
    def best(self) -> Arrangement:
        """The fastest arrangement that fits; if none fits, the one that lacks the least memory."""
        return self.arrangements[0]

    @cached_property
    def findings(self) -> tuple[tuple[str, str], ...]:
        """Problems and wasted memory in the best arrangement: stable slugs, and messages."""
        return tuple(findings(self.best.memory))

    @property
    def files(self) -> str:
        """The names of the files that `write` writes; "" if the trainer has no command."""
        if self.settings.trainer != "trl":
            return f"{self.settings.trainer}.sh"
        return f"{self.name}.yaml and ds_config.json" if METHODS[self.name].command else ""

    @property
    def command(self) -> str | None:
        """The trainer's command for the written config; None if nothing is written."""
        config = next((path for path in self.written if path.suffix in (".yaml", ".sh")), None)
        if config and self.settings.trainer != "trl":
            data = "TRAIN_FILES=... VAL_FILES=..." if self.settings.trainer == "verl" else "DATASET=..."
            return f"{data} bash {config}"
        return f"{METHODS[self.name].command} --config {config} --dataset_name DATA" if config else None

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit plan --method --json` prints."""
        profile = self.setup.profile
        return {
            "method": self.name,
            "model": profile.model,
            "gpu": self.cluster.device.kind,
            "ranks": self.cluster.ranks,
            "seq_len": profile.seq_len,
            "max_completion_length": self.settings.max_completion_length,
            "fits": self.best.fits,
            "arrangements": [row.to_dict() for row in self.arrangements],
            "findings": [{"slug": slug, "message": message} for slug, message in self.findings],
            **({"written": [str(path) for path in self.written]} if self.written else {}),
        }

    def write(self, folder: Path) -> tuple[Path, ...]:
        """Write the trainer's config for the best arrangement. Raises UserError."""
        method, best = METHODS[self.name], self.best
        if not best.fits:
            message = "nothing fits, so there is nothing to write"
            raise UserError(Problem(kind="nothing-fits", message=message, where="--write"))
        planned = PlannedRun.of(best.ranked, self.setup.profile, self.request)
        chosen = Chosen(method=self.name, planned=planned, settings=best.memory.settings, engine=best.engine)
        if self.settings.trainer == "verl":
            return write_files(folder, {"verl.sh": verl_script(chosen, self.cluster)})
        if self.settings.trainer == "openrlhf":
            return write_files(folder, {"openrlhf.sh": openrlhf_script(chosen, self.cluster)})
        colocated = best.memory.engine is not None
        text = yaml.safe_dump(trl_config(chosen, str(folder / "ds_config.json"), colocated), sort_keys=False)
        comment = f"# {method.command} --config {folder / self.name}.yaml --dataset_name DATA"
        config = for_trainer(planned.ds_config, planned.layout, self.setup.profile)
        content = json.dumps(config, indent=2) + "\n"
        return write_files(folder, {"ds_config.json": content, f"{self.name}.yaml": f"{comment}\n{text}"})


# An arrangement is a layout of the training with an engine. The layouts are those of `zerofit plan`; the engines are:
#
#   trl              on the same GPUs, asleep or awake during the training; on other GPUs of the node (server)
#   verl, openrlhf   on the same GPUs, with each choice of what the trainer offloads while the engine generates
#   no generation    none (offline methods such as dpo)
#
# For each engine, the best of the TRIED fastest layouts becomes a row. Memory is that of the highest phase of a step
# (`rollout.phases`), since phases do not overlap. Time is the sum of all phases.
def plan_rollouts(
    name: str,
    request: PlanningRequest,
    cluster: Cluster,
    values: Mapping[str, object],
    *,
    on_event: OnEvent | None = None,
) -> RolloutPlan:
    """Return the arrangements of method `name` on a cluster. Raises UserError with all problems.

    `values`: settings of --rollout.
    """
    report, method = Reporter(on_event), METHODS[name]
    settings = _checked_settings(name, request, cluster, values)
    assert isinstance(request.model, str)  # the command refuses a stored profile
    # completions that a step cannot separate: all answers to a prompt are scored together, and a pair is compared
    group = settings.num_generations if method.scores_first else 2 if method.pairs else 1
    request = _data_parallel(request, cluster, group)
    request = replace(request, engines=(f"verl-{settings.strategy}",)) if settings.trainer == "verl" else request
    report.note(*request.notes)
    setup = replace(setup_of(cluster, request, report)[0], top=TRIED)
    length = setup.profile.seq_len or 0
    setup = _with_log_probs(setup, settings, name)
    if method.generates and settings.max_completion_length >= length:
        message = (
            f"{settings.own_name('max_completion_length')}={settings.max_completion_length} leaves no prompt tokens "
            f"in --seq-len {length}"
        )
        raise UserError(Problem(kind="seq-len", message=message, hint="raise --seq-len", where=SETTINGS))
    # The trainer sends its weights to the engine in 16 bits, so the format of the published weights does not matter.
    model = replace(served_model(str(request.model), request.pins.get("model_args") or {}), published=None)
    planner = _Planner(name=name, setup=setup, settings=settings, model=model, cluster=cluster)
    rows = sorted(planner.rows(), key=_order)
    if not rows:
        message = f"no layout trains a global batch of {request.pins.get('global_batch')} on {cluster.ranks} GPUs"
        hint = "change --global-batch, or leave out options that fix the layout"
        raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where="--global-batch"))
    return RolloutPlan(
        name=name, cluster=cluster, settings=settings, arrangements=tuple(rows), setup=setup, request=request
    )


def _checked_settings(
    name: str, request: PlanningRequest, cluster: Cluster, values: Mapping[str, object]
) -> RolloutSettings:
    """Return the settings in `values`. Raises UserError with all problems of the request."""
    # All combinations that no trainer supports are refused before a model is traced, which takes seconds.
    problems, method = Problems(), METHODS[name]
    settings = problems.attempt(lambda: RolloutSettings.read(dict(values), SETTINGS))
    if (kind := request.pins.get("activation_checkpointing")) == "selective":
        flag = switch("activation_checkpointing", kind)
        message = "TRL, verl and OpenRLHF (--method) do not support selective checkpointing"
        problems.add("usage", message, f"remove {flag}", f"--method, {flag}")
    if request.engines != ("deepspeed",):
        message = (
            f"--method cannot be combined with --engine {','.join(request.engines)}: the trainer decides the engine"
        )
        hint = f"remove --engine; {SETTINGS} trainer=verl,strategy=fsdp2 plans FSDP2"
        problems.add("usage", message, hint, "--method, --engine")
    if settings and settings.trainer != "trl" and name not in WITH_PROCESSES:
        message = f"--method {name} with trainer={settings.trainer}: zerofit does not forecast a critic or other models"
        problems.add("usage", message, f"use {' or '.join(WITH_PROCESSES)}, or trainer=trl", f"--method, {SETTINGS}")
    if request.write and not method.command:
        named = ", ".join(name for name, other in METHODS.items() if other.command)
        message = f"--write with --method {name}: TRL has no command that reads a config"
        problems.add("usage", message, f"remove --write, or use {named}", "--write")
    if request.pins.get("zero_stage") == 3 and _copies_model(name, bool(request.pins.get("lora"))):
        message = f"--method {name} with --zero-stage 3: TRL copies the model, which ZeRO-3 forbids"
        problems.add("usage", message, "use --zero-stage 2 or --lora", "--method, --zero-stage")
    if settings and "num_generations" in values and not method.scores_first:
        problems.add("usage", f"--method {name} does not use num_generations", "remove num_generations", SETTINGS)
    offloads = any(request.pins.get(pin, "none") != "none" for pin in ("offload", "offload_param"))
    if settings and settings.trainer == "verl" and settings.strategy == "fsdp" and offloads:
        hint = f"use {SETTINGS} param_offload=true,optimizer_offload=true, or strategy=fsdp2"
        problems.add("usage", "FSDP 1 of verl has no offload_policy", hint, f"--offload, {SETTINGS}")
    if settings and settings.trainer == "openrlhf" and request.pins.get("lora"):
        problems.add(
            "usage", "--lora with trainer=openrlhf is not forecast", "remove one of them", f"--lora, {SETTINGS}"
        )
    if settings and cluster.gpus % settings.vllm_tensor_parallel_size:
        own = settings.own_name("vllm_tensor_parallel_size")
        message = f"{own}={settings.vllm_tensor_parallel_size} does not divide the {cluster.gpus} GPUs of a node"
        problems.add("usage", message, "use a divisor", SETTINGS)
    if settings and (server_gpus := settings.server_gpus):
        degree = settings.vllm_tensor_parallel_size
        if server_gpus >= cluster.gpus or server_gpus % degree:
            message = f"server_gpus={server_gpus} with {cluster.gpus} GPUs and vllm_tensor_parallel_size={degree}"
            problems.add("usage", message, f"use a multiple of {degree} below {cluster.gpus}", SETTINGS)
    if cluster.on_cpu:
        problems.add("usage", "--method is for GPUs", "name a kind with --gpu", "--gpu")
    problems.raise_if_any()
    assert settings
    return settings


def _with_log_probs(setup: SearchSetup, settings: RolloutSettings, name: str) -> SearchSetup:
    """Return the setup for the way in which the trainer computes log-probs and adds gradients."""
    profile, element, method = setup.profile, ELEMENT_BYTES[setup.request.precision], METHODS[name]
    if settings.trainer == "verl":
        each = None if settings.use_fused_kernels else EARLY_VERL if settings.is_early else VERL
        # without resharding, the log-probs of verl leave actor and reference gathered (EngineEvalModeCtx.__exit__)
        fixed = {**setup.request.fixed, "sync_each_batch": not settings.defers, "reshard": True}
        return replace(
            setup, profile=with_whole_head(profile, each, element), request=replace(setup.request, fixed=fixed)
        )
    if settings.trainer == "openrlhf":
        return replace(setup, profile=with_whole_head(profile, OPENRLHF, element))
    length, adapts = profile.seq_len or 1, profile.trained < profile.parameters
    # TRL's DPOTrainer requires use_reentrant=True for adapters at ZeRO-3; its OnlineDPOTrainer does not
    within = "within" if method.generates else "reentrant"
    when = "first" if method.scores_first else within if method.reference and adapts else "never"
    if method.head == "whole":
        share = settings.max_completion_length / length
        profile = with_whole_head(profile, online_dpo(share), element, when=when)
    elif method.head:
        scored, teacher = settings.max_completion_length if method.generates else length, method.head == "divergence"
        profile = with_fused_head(profile, scored, element, setup.request.micro_batch, when=when, teacher=teacher)
    return replace(setup, profile=profile)


def _data_parallel(request: PlanningRequest, cluster: Cluster, group: int) -> PlanningRequest:
    """Return the request with data parallelism only, and a global batch of whole groups.

    `group`: completions. Raises UserError if the requested batch is not a multiple of it.
    """
    pins, ranks = request.pins, cluster.ranks
    micro_batch, accumulation = pins.get("micro_batch"), pins.get("gradient_accumulation_steps")
    batch = pins.get("global_batch") or (ranks * micro_batch * accumulation if micro_batch and accumulation else None)
    if batch is None:
        # the largest multiple of the groups and the ranks up to SAMPLES_OF_RANK, at least one such multiple
        batch = math.lcm(group, ranks) * max(1, SAMPLES_OF_RANK * ranks // math.lcm(group, ranks))
    if batch % group:
        message = f"a global batch of {batch} completions is not a multiple of the {group} completions per prompt"
        raise UserError(Problem(kind="batch-size", message=message, hint="change --global-batch", where=SETTINGS))
    degrees = dict.fromkeys(("tensor_parallel", "pipeline", "sequence_parallel", "expert_parallel"), 1)
    return replace(request, pins={**pins, "global_batch": batch, **degrees}, write=False)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """Combine training layouts with engines. The fields are the same for all combinations."""

    name: str
    setup: SearchSetup
    settings: RolloutSettings
    model: ServedModel
    cluster: Cluster

    def rows(self) -> Iterator[Arrangement]:
        if not METHODS[self.name].generates:
            yield from self._best("training", None)
            return
        if self.settings.trainer != "trl":
            first = "hybrid engine" if self.settings.trainer == "verl" else "colocate all"
            for settings in self._shared():
                offloads = [settings.own_name(name) for name in OFFLOADS if getattr(settings, name)]
                yield from self._best(", ".join(offloads) or first, settings)
            return
        if self.settings.vllm_mode != "server":
            sleep_mode = self.settings.vllm_enable_sleep_mode
            for sleeps in (True, False) if sleep_mode is None else (sleep_mode,):
                name = f"colocate, sleep level {self.settings.sleep_level}" if sleeps else "colocate, always awake"
                yield from self._best(name, replace(self.settings, vllm_enable_sleep_mode=sleeps))
        if self.settings.vllm_mode != "colocate" and self.cluster.nodes == 1 and self.cluster.gpus > 1:
            # vLLM's server gets whole engines. One, two and four of them are tried, and the best split counts.
            step = self.settings.vllm_tensor_parallel_size
            sizes = [gpus for gpus in (step, 2 * step, 4 * step) if gpus < self.cluster.gpus]
            if self.settings.server_gpus:
                sizes = [self.settings.server_gpus]
            splits = [self._apart(gpus) for gpus in sizes]
            yield from sorted((row for row in splits if row), key=_order)[:1]

    def _shared(self) -> Iterator[RolloutSettings]:
        """Yield settings of verl or OpenRLHF for each choice of what the actor offloads."""
        sleeps, verl = self.settings.vllm_enable_sleep_mode in (None, True), self.settings.trainer == "verl"
        # A sleeping engine of verl frees its weights (level 2), except with adapters. OpenRLHF's moves them to the
        # host (level 1).
        level = 2 if verl and self.setup.profile.trained == self.setup.profile.parameters else 1
        settings = replace(self.settings, vllm_enable_sleep_mode=sleeps, sleep_level=level)
        settings = settings if verl else replace(settings, param_offload=False)
        choices = [(False, True) if (own := getattr(settings, name)) is None else (own,) for name in OFFLOADS]
        any_given = any(len(choice) == 1 for choice in choices)
        for param, optimizer in product(*choices):
            # Offloaded weights alone save less than the optimizer states, and are moved twice in a step.
            if optimizer or not param or any_given:
                yield replace(settings, param_offload=param, optimizer_offload=optimizer)

    def _best(self, name: str, settings: RolloutSettings | None) -> list[Arrangement]:
        """Return the colocated arrangement that comes first by `_order`; [] if there is no layout."""
        timer = timer_of(self.setup.profile, self.cluster, self.setup.request, self.setup.calibration)
        layouts = self._layouts(self.cluster)
        offloads = settings and (settings.param_offload or settings.optimizer_offload)
        # FSDP's offload policy replaces verl's offloads, and OpenRLHF offloads only Adam.
        if offloads or self.settings.trainer == "openrlhf":
            layouts = tuple(ranked for ranked in layouts if ranked.layout.offload_param == "none")
        arrangements = [self._colocated(name, ranked, timer, settings) for ranked in layouts]
        return sorted(arrangements, key=_order)[:1]

    def _layouts(self, cluster: Cluster) -> tuple[RankedLayout, ...]:
        setup = self.setup
        forecast = forecast_of(setup.profile, cluster)
        result = search(setup.profile, cluster, setup.request, forecast, setup.calibration, setup.top, setup.correct)
        adapts = setup.profile.trained < setup.profile.parameters
        # A pair has to be in one micro batch. TRL cannot copy a model whose parameters ZeRO-3 has split.
        multiple, stages = 2 if METHODS[self.name].pairs else 1, 2 if _copies_model(self.name, adapts) else 3
        rows = (*result.layouts, *result.misfits)
        return tuple(row for row in rows if row.layout.micro_batch % multiple == 0 and row.layout.zero_stage <= stages)

    def _colocated(
        self, name: str, ranked: RankedLayout, timer: Timer, settings: RolloutSettings | None
    ) -> Arrangement:
        """Return an arrangement with an engine on the training's GPUs; no engine without `settings`."""
        layout = ranked.layout
        memory = self._memory(ranked, settings or self.settings)
        if settings is None:
            return Arrangement(
                name=name, ranked=ranked, memory=memory, engine=None, time=self._time(memory, timer, None, 1)
            )
        degree = settings.vllm_tensor_parallel_size
        sequences = layout.micro_batch * layout.accumulation * degree
        if METHODS[self.name].pairs:  # generates for each micro batch, and counts prompts instead of completions
            sequences = layout.micro_batch // 2 * degree
        tokens = COLOCATED_TOKENS
        if settings.trainer == "verl":
            sequences, tokens = min(sequences, VERL_SEQUENCES), VERL_TOKENS
        limits = (None, None) if settings.trainer == "openrlhf" else (sequences, tokens)  # None: vLLM's own
        # An engine of any utilization shows what vLLM needs besides its cache, and so the utilization to choose:
        # as much as all sequences of a step need at once, at most what the training leaves free.
        engine = self._engine(0.3, *limits)
        share = settings.vllm_gpu_memory_utilization
        if share is None:
            safe = replace(memory, engine=engine).largest_utilization
            blocks = sequences * engine.cache.blocks_of_request(engine.need)
            wanted = (engine.counted + blocks * engine.cache.block_bytes) / self.cluster.device.memory_bytes
            share = max(min(safe, math.ceil(STEP * wanted) / STEP), 1 / STEP)
        engine = self._engine(share, *limits)
        return Arrangement(
            name=name,
            ranked=ranked,
            memory=replace(memory, engine=engine),
            engine=engine,
            time=self._time(memory, timer, engine, layout.world_size // degree),
        )

    def _memory(self, ranked: RankedLayout, settings: RolloutSettings) -> RolloutMemory:
        layout, cluster = ranked.layout, self.cluster
        fields: dict[str, Any] = {  # of every trainer
            "method": METHODS[self.name],
            "settings": settings,
            "profile": self.setup.profile,
            "layout": layout,
            "memory": ranked.memory,
            "fit": ranked.fit,
            "engine": None,
        }
        if settings.trainer == "trl":
            return RolloutMemory(**fields)
        # verl and OpenRLHF run trainer and engine in processes of their own: each has a context and communicators.
        process = round(margin_bytes(0, layout, cluster, more_communicators=ranked.memory.more_communicators))
        context = context_figure(cluster.device).high_bytes
        room = (ranked.fit.host_available_bytes - cluster.gpus * 2 * HOST_PROCESS_BYTES) / cluster.gpus
        kind = VerlMemory if settings.trainer == "verl" else OpenRlhfMemory
        return kind(**fields, context_bytes=context, process_bytes=process, host_room=room)

    def _apart(self, gpus: int) -> Arrangement | None:
        """Return the fastest arrangement in which vLLM has `gpus` GPUs of its own.

        Return None if no layout fits the other GPUs.
        """
        # the whole node's host memory stays available to the training
        trainer = replace(self.cluster, gpus=self.cluster.gpus - gpus, host_memory=self.cluster.host_bytes)
        try:
            layouts = [row for row in self._layouts(trainer) if row.fit.exceeded is None]
        except UserError:
            return None
        if not layouts:
            return None
        engine = self._engine(self.settings.vllm_gpu_memory_utilization or SERVER_UTILIZATION, None, None)
        timer = timer_of(self.setup.profile, trainer, self.setup.request, self.setup.calibration)
        rows = [self._colocated("", ranked, timer, None) for ranked in layouts[:10]]
        fastest = min(rows, key=lambda row: (not row.memory.fits, row.ranked.step_s))
        time = self._time(fastest.memory, timer, engine, engines=gpus // engine.settings.tensor_parallel_size)
        return replace(
            fastest, name=f"server, {counted(gpus, 'GPU')} for vLLM", engine=engine, time=time, server_gpus=gpus
        )

    def _engine(self, share: float, sequences: int | None, tokens: int | None) -> EngineMemory:
        length = self.setup.profile.seq_len or 0
        values = {
            "gpu_memory_utilization": share,
            # --seq-len is the length of prompt and answer; methods that train on pairs generate beyond it
            "max_model_len": length + (self.settings.max_completion_length if METHODS[self.name].pairs else 0),
            "max_num_seqs": sequences,
            "max_num_batched_tokens": tokens,
            "tensor_parallel_size": self.settings.vllm_tensor_parallel_size,
            "dtype": self.setup.request.precision,
            "release": self.settings.release,
        }
        settings = EngineSettings.read({name: value for name, value in values.items() if value is not None}, SETTINGS)
        device = self.cluster.device
        return EngineMemory(model=self.model, settings=settings.settled(self.model, device), device=device)

    def _time(self, memory: RolloutMemory, timer: Timer, engine: EngineMemory | None, engines: int) -> RolloutTime:
        settings, method, rates, layout = memory.settings, METHODS[self.name], timer.rates, memory.layout
        completion = settings.max_completion_length
        # Forwards of a step besides the training: the reference's, a reward model's or teacher's, and the actor's.
        forwards = settings.needs_reference(method) + method.scorer + (method.generates and method.scores_first)
        logprobs_s = forwards * layout.accumulation * timer.parts(layout).forward_s
        train_s = timer.step(layout).step_s * (2 if method.critic else 1)
        sent_bytes, sleep_s = layout.element_bytes * self.setup.profile.parameters, 0.0
        if isinstance(memory, ProcessMemory):
            sleep_s = memory.carried_bytes / rates.pcie
            sent_bytes *= layout.weight_bytes // layout.element_bytes if layout.by_layer else 1
        if engine is None:
            return RolloutTime(
                generate_s=0.0, logprobs_s=logprobs_s, train_s=train_s, sync_s=0.0, sleep_s=sleep_s, generated_tokens=0
            )
        if (
            settings.vllm_enable_sleep_mode and settings.sleep_level == 1
        ):  # the engine's weights go to the host and back
            sleep_s += 2 * engine.weights / rates.pcie
        prompt = (self.setup.profile.seq_len or 0) - completion
        return RolloutTime(
            generate_s=generation_s(engine, rates, math.ceil(layout.global_batch / engines), prompt, completion),
            logprobs_s=logprobs_s,
            train_s=train_s,
            # ZeRO-3 gathers the weights over the network before they are copied on the device
            sync_s=sent_bytes / (rates.link if layout.zero_stage == 3 else rates.streaming),
            sleep_s=sleep_s,
            generated_tokens=layout.global_batch * completion,
        )


def _copies_model(name: str, adapts: bool) -> bool:
    """Return whether TRL copies the trained model (create_reference_model in its utils.py)."""
    return METHODS[name].head == "whole" and not adapts


def _order(row: Arrangement) -> tuple[bool, float]:
    """Return a sort key: arrangements that fit, by time; then the others, by missing memory."""
    return not row.fits, row.time.step_s if row.fits else -row.memory.room
