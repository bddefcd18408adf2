"""`zerofit plan --method grpo`: whether trainer and rollout fit, the phase with the most memory, and the speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from zerofit.app.planning.output_files import for_trainer, write_files
from zerofit.app.planning.plan import PlannedRun
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.search_setup import SearchSetup, forecast_of, setup_of
from zerofit.app.planning.serving import SETTINGS, served_model
from zerofit.models.presets import NAMED
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.result import RankedLayout
from zerofit.plan.search import search, timer_of
from zerofit.plan.time import Timer
from zerofit.rollout.fused_head import with_fused_head
from zerofit.rollout.methods import METHODS, RolloutSettings
from zerofit.rollout.phases import RolloutMemory
from zerofit.rollout.served import ServedModel
from zerofit.rollout.speed import RolloutTime, generation_s
from zerofit.rollout.vllm import STEP, EngineMemory, EngineSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.model_facts import ELEMENT_BYTES
from zerofit.spec.run import switch
from zerofit.spec.units import shown_bytes

TRIED = 60  # training layouts that are combined with an engine
COLOCATED_TOKENS = 4096  # max_num_batched_tokens of TRL's engine
SERVER_UTILIZATION = 0.9
SAMPLES_OF_RANK = 16  # completions per rank and step, if no batch is given
LARGE = 0.08  # a part that needs more than this share of the GPU is a finding


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A training layout and an engine on the same or on other GPUs, with the memory by phase and the time."""

    name: str
    ranked: RankedLayout
    memory: RolloutMemory
    engine: EngineMemory | None  # on the same or on other GPUs; None: nothing is generated
    time: RolloutTime
    server_gpus: int = 0

    @property
    def fits(self) -> bool:
        """Whether all phases fit, and also the engine if it has GPUs of its own."""
        return self.memory.fits and (self.memory.engine is not None or self.engine is None or self.engine.fits)

    def to_dict(self) -> dict[str, Any]:
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
    """Arrangements of one method on a cluster, fastest first; arrangements that do not fit are last."""

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
        """Problems and wasted memory in the best arrangement: a stable slug and a message that names the setting."""
        return tuple(_findings(self.best))

    def to_dict(self) -> dict[str, Any]:
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
        """Write TRL's config and the DeepSpeed JSON of the best arrangement. Raises UserError."""
        method, best = METHODS[self.name], self.best
        if not method.trainer or not best.fits:
            message = (
                f"--write with --method {self.name}" if best.fits else "nothing fits, so there is nothing to write"
            )
            named = ", ".join(name for name, other in METHODS.items() if other.trainer)
            raise UserError(Problem(kind="usage", message=message, hint=f"TRL's configs: {named}", where="--write"))
        planned = PlannedRun(ranked=best.ranked, profile=self.setup.profile, request=self.request)
        text = yaml.safe_dump(self._trl(best, str(folder / "ds_config.json")), sort_keys=False)
        comment = f"# trl {self.name} --config {folder / self.name}.yaml --dataset_name DATA"
        config = for_trainer(planned.ds_config, planned.layout, self.setup.profile)
        return write_files(folder, {f"{self.name}.yaml": f"{comment}\n{text}"}, config)

    def _trl(self, best: Arrangement, ds_config: str) -> dict[str, Any]:
        layout, settings, engine = best.ranked.layout, self.settings, best.engine
        method, profile = METHODS[self.name], self.setup.profile
        named = NAMED.get(profile.model)
        found: dict[str, Any] = {
            "model_name_or_path": named.hub[0] if named and named.hub else profile.model,
            "dtype": "bfloat16" if layout.precision == "bf16" else "float16",
            "output_dir": "out",
            "per_device_train_batch_size": layout.micro_batch // (2 if method.pairs else 1),
            "gradient_accumulation_steps": layout.accumulation,
            "gradient_checkpointing": layout.checkpointing,
            layout.precision: True,
            "deepspeed": ds_config,
        }
        if settings.beta is not None:
            found["beta"] = settings.beta
        if rank := self.request.pins.get("lora"):
            targets = self.request.pins.get("lora_targets") or "all-linear"
            found |= {"use_peft": True, "lora_r": rank, "lora_target_modules": targets.split(",")}
        if engine is None:
            return found | {"max_length": profile.seq_len}
        colocated = best.memory.engine is not None
        found |= {
            "num_generations": settings.num_generations,
            "max_completion_length": settings.max_completion_length,
            "use_vllm": True,
            "vllm_mode": "colocate" if colocated else "server",
        }
        own = {
            "vllm_gpu_memory_utilization": engine.settings.gpu_memory_utilization,
            "vllm_tensor_parallel_size": engine.settings.tensor_parallel_size,
            "vllm_enable_sleep_mode": best.memory.settings.vllm_enable_sleep_mode,
            "vllm_max_model_length": engine.settings.max_model_len,
        }
        return found | own if colocated else found


def plan_rollouts(
    name: str, request: PlanningRequest, cluster: Cluster, values: Mapping[str, Any], *, on_event: OnEvent | None = None
) -> RolloutPlan:
    """Return the arrangements of method `name` on a cluster. Raises UserError with all problems.

    `values`: settings of --rollout.
    """
    report, problems, method = Reporter(on_event), Problems(), METHODS[name]
    settings = problems.attempt(lambda: RolloutSettings.read(dict(values), SETTINGS))
    for given, flag in ((request.profile, "--profile"), (request.maximum, "--max"), (request.minimum, "--min")):
        if given:
            problems.add("usage", f"--method with {flag}", "use one of them", f"--method, {flag}")
    if (kind := request.pins.get("activation_checkpointing")) == "selective":
        flag = switch("activation_checkpointing", kind)
        problems.add("usage", f"--method with {flag}, which TRL's configs lack", f"remove {flag}", f"--method, {flag}")
    if cluster.on_cpu:
        problems.add("usage", "--method is for GPUs", "name a kind with --gpu", "--gpu")
    problems.raise_if_any()
    assert settings and isinstance(request.model, str)
    group = 2 if method.pairs else settings.num_generations
    request = _data_parallel(request, cluster, group)
    for note in request.notes:
        report.note(note)
    setup = replace(setup_of(cluster, request, report)[0], top=TRIED)
    length = setup.profile.seq_len or 0
    if method.trainer:
        scored = settings.max_completion_length if method.generates else length
        element = ELEMENT_BYTES[setup.request.precision]
        profile = with_fused_head(setup.profile, scored, element, request.pins.get("micro_batch"))
        setup = replace(setup, profile=profile)
    if method.generates and settings.max_completion_length >= length:
        message = f"max_completion_length={settings.max_completion_length} leaves no prompt in --seq-len {length}"
        raise UserError(Problem(kind="seq-len", message=message, hint="raise --seq-len", where=SETTINGS))
    model = served_model(str(request.model), request.pins.get("model_args") or {})
    planner = _Planner(name=name, setup=setup, settings=settings, model=model, cluster=cluster)
    rows = sorted(planner.rows(), key=_order)
    if not rows:
        message = f"no layout trains a global batch of {request.pins.get('global_batch')} on {cluster.ranks} GPUs"
        hint = "change --global-batch, or leave out options that fix the layout"
        raise UserError(Problem(kind="nothing-fits", message=message, hint=hint, where="--global-batch"))
    return RolloutPlan(
        name=name, cluster=cluster, settings=settings, arrangements=tuple(rows), setup=setup, request=request
    )


def _data_parallel(request: PlanningRequest, cluster: Cluster, group: int) -> PlanningRequest:
    """Return the request for TRL: only data parallelism, and a batch that is a multiple of `group` completions."""
    pins, ranks = request.pins, cluster.ranks
    sizes = pins.get("micro_batch"), pins.get("gradient_accumulation_steps")
    batch = pins.get("global_batch") or (ranks * sizes[0] * sizes[1] if sizes[0] and sizes[1] else None)
    if batch is None:
        batch = math.lcm(group, ranks) * max(1, SAMPLES_OF_RANK * ranks // math.lcm(group, ranks))
    if batch % group:
        message = f"a global batch of {batch} completions is not a multiple of the {group} of one prompt"
        raise UserError(Problem(kind="batch-size", message=message, hint="change --global-batch", where=SETTINGS))
    fixed: Any = {
        **pins,
        "global_batch": batch,
        **dict.fromkeys(("tensor_parallel", "pipeline", "sequence_parallel", "expert_parallel"), 1),
    }
    return replace(request, pins=fixed, model=request.model, write=False)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """Makes arrangements; its fields are the same for all of them."""

    name: str
    setup: SearchSetup
    settings: RolloutSettings
    model: ServedModel
    cluster: Cluster

    def rows(self) -> Iterator[Arrangement]:
        """Yield the best arrangement of each kind that the settings allow."""
        if not METHODS[self.name].generates:
            yield from self._best("training", self.cluster, None)
            return
        if self.settings.vllm_mode != "server":
            chosen = self.settings.vllm_enable_sleep_mode
            for sleeps in (True, False) if chosen is None else (chosen,):
                name = f"colocate, sleep level {self.settings.sleep_level}" if sleeps else "colocate, always awake"
                yield from self._best(name, self.cluster, replace(self.settings, vllm_enable_sleep_mode=sleeps))
        if self.settings.vllm_mode != "colocate" and self.cluster.nodes == 1 and self.cluster.gpus > 1:
            splits = [self._apart(gpus) for gpus in self._splits()]
            yield from sorted((row for row in splits if row), key=_order)[:1]

    def _splits(self) -> list[int]:
        """Return the numbers of GPUs that a server can have."""
        if self.settings.server_gpus:
            return [self.settings.server_gpus]
        step = self.settings.vllm_tensor_parallel_size
        return [gpus for gpus in (step, 2 * step, 4 * step) if gpus < self.cluster.gpus]

    def _best(self, name: str, cluster: Cluster, settings: RolloutSettings | None) -> list[Arrangement]:
        """Return the fastest colocated arrangement that fits; if none fits, the one that lacks the least memory."""
        timer = timer_of(self.setup.profile, cluster, self.setup.request, self.setup.calibration)
        found = [self._colocated(name, ranked, timer, settings) for ranked in self._layouts(cluster)]
        return sorted(found, key=_order)[:1]

    def _layouts(self, cluster: Cluster) -> tuple[RankedLayout, ...]:
        setup = self.setup
        forecast = forecast_of(setup.profile, cluster)
        result = search(setup.profile, cluster, setup.request, forecast, setup.calibration, setup.top, setup.correct)
        pairs = METHODS[self.name].pairs
        return tuple(row for row in (*result.layouts, *result.misfits) if not (pairs and row.layout.micro_batch % 2))

    def _colocated(
        self, name: str, ranked: RankedLayout, timer: Timer, settings: RolloutSettings | None
    ) -> Arrangement:
        """Return an arrangement with the engine on the training's GPUs, or without an engine if `settings` is None."""
        layout = ranked.layout
        memory = RolloutMemory(
            method=METHODS[self.name],
            settings=settings or self.settings,
            profile=self.setup.profile,
            layout=layout,
            memory=ranked.memory,
            fit=ranked.fit,
            engine=None,
        )
        if settings is None:
            return Arrangement(
                name=name, ranked=ranked, memory=memory, engine=None, time=self._time(layout, timer, None, 1)
            )
        degree = settings.vllm_tensor_parallel_size
        sequences = layout.micro_batch * layout.accumulation * degree
        engine = self._engine(0.3, sequences, COLOCATED_TOKENS)
        share = settings.vllm_gpu_memory_utilization
        if share is None:
            safe = replace(memory, engine=engine).largest_utilization
            blocks = sequences * engine.cache.blocks_of_request(engine.need)
            wanted = (engine.counted + blocks * engine.cache.block_bytes) / self.cluster.device.memory_bytes
            share = max(min(safe, math.ceil(STEP * wanted) / STEP), 1 / STEP)
        engine = self._engine(share, sequences, COLOCATED_TOKENS)
        return Arrangement(
            name=name,
            ranked=ranked,
            memory=replace(memory, engine=engine),
            engine=engine,
            time=self._time(layout, timer, engine, layout.world_size // degree),
        )

    def _apart(self, gpus: int) -> Arrangement | None:
        """Return the fastest arrangement with `gpus` GPUs for vLLM alone; None if nothing trains on the others."""
        left = self.cluster.gpus - gpus
        trained = replace(self.cluster, gpus=left, host_memory=self.cluster.host_bytes)
        try:
            layouts = [row for row in self._layouts(trained) if row.fit.exceeded is None]
        except UserError:
            return None
        if not layouts:
            return None
        engine = self._engine(self.settings.vllm_gpu_memory_utilization or SERVER_UTILIZATION, None, None)
        timer = timer_of(self.setup.profile, trained, self.setup.request, self.setup.calibration)
        rows = [self._colocated("", ranked, timer, None) for ranked in layouts[:10]]
        ranked = min(rows, key=lambda row: (not row.memory.fits, row.ranked.step_s))
        engines = gpus // engine.settings.tensor_parallel_size
        time = self._time(ranked.ranked.layout, timer, engine, engines)
        return replace(ranked, name=f"server, {gpus} GPUs for vLLM", engine=engine, time=time, server_gpus=gpus)

    def _engine(self, share: float, sequences: int | None, tokens: int | None) -> EngineMemory:
        values = {
            "gpu_memory_utilization": share,
            "max_model_len": self.setup.profile.seq_len,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": tokens,
            "tensor_parallel_size": self.settings.vllm_tensor_parallel_size,
            "dtype": self.setup.request.precision,
            "release": self.settings.release,
        }
        settings = EngineSettings.read({name: value for name, value in values.items() if value is not None}, SETTINGS)
        device = self.cluster.device
        return EngineMemory(model=self.model, settings=settings.settled(self.model, device), device=device)

    def _time(self, layout: PlannedLayout, timer: Timer, engine: EngineMemory | None, engines: int) -> RolloutTime:
        """Return the time of a step, whose completions are divided among `engines`."""
        settings, method, rates = self.settings, METHODS[self.name], timer.rates
        completion = settings.max_completion_length
        forwards = settings.needs_reference(method) + method.scorer + method.generates  # log-probs of the actor
        moved = layout.element_bytes * self.setup.profile.parameters
        sleeping = settings.sleep_level == 1 and engine is not None
        prompt = (self.setup.profile.seq_len or 0) - completion
        generate_s = 0.0
        if engine:
            generate_s = generation_s(engine, rates, math.ceil(layout.global_batch / engines), prompt, completion)
        return RolloutTime(
            generate_s=generate_s,
            logprobs_s=forwards * layout.accumulation * timer.parts(layout).forward_s,
            train_s=timer.step(layout).step_s * (2 if method.critic else 1),
            sync_s=moved / (rates.link if layout.zero_stage == 3 else rates.streaming) if engine else 0.0,
            sleep_s=2 * engine.weights / rates.pcie if engine and sleeping else 0.0,  # to the host and back
            generated_tokens=layout.global_batch * completion if engine else 0,
        )


def _order(row: Arrangement) -> tuple[bool, float]:
    """Sort arrangements that fit by time, and the others by the memory that they lack."""
    return not row.fits, row.time.step_s if row.fits else -row.memory.room


def _findings(row: Arrangement) -> Iterator[tuple[str, str]]:
    """Yield slug and message of each problem of an arrangement, most urgent first."""
    memory, engine = row.memory, row.memory.engine
    total, highest = memory.fit.device_available_bytes, memory.highest
    if memory.room < 0:
        kind, size = max(highest.parts.items(), key=lambda part: part[1])
        lacks = shown_bytes(-memory.room)
        yield "phase", f"{highest.name} lacks {lacks} on each GPU; its largest part is {kind}, {shown_bytes(size)}"
    if engine and engine.sequences < 1:
        yield (
            "no-cache",
            f"vLLM needs gpu_memory_utilization {engine.smallest_utilization:.2f} or more, but only "
            f"{memory.largest_utilization:.2f} is safe",
        )
    if engine and not memory.settings.vllm_enable_sleep_mode:
        size = shown_bytes(engine.requested)
        yield "cache-awake", f"weights and KV cache of vLLM stay on the GPU during training: sleep mode frees {size}"
    if engine and engine.requested > total - sum(memory.resident.values()):
        yield (
            "budget-of-total",
            "gpu_memory_utilization is a share of the whole GPU: vLLM does not start if the training leaves less free",
        )
    logits = max((phase.parts.get("logits", 0) for phase in memory.phases), default=0)
    if logits > LARGE * total:
        size = shown_bytes(logits)
        yield "logits", f"logits of the log-probs need {size} (twice that in float32): lower the micro batch"
    if frozen := memory.resident.get("reference", 0):
        size = shown_bytes(frozen)
        yield (
            "reference",
            f"the reference needs {size} in 16 bits (twice that if dtype is float32); beta=0 or LoRA avoids it",
        )
    if any(phase.parts.get("gathered parameters", 0) > LARGE * total for phase in memory.phases):
        yield "weights-twice", "to merge adapters, ZeRO-3 gathers all weights next to vLLM's copy: use ZeRO-2"
    if engine and 0 <= memory.room < 0.03 * total:
        yield "fragmentation", f"only {shown_bytes(memory.room)} are left for fragmentation after vLLM wakes up"
