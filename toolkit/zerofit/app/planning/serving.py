"""`zerofit plan --serve`: whether vLLM fits the GPUs, and how many sequences run at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerofit.models.catalog import QUANTIZED, ModelSource, find, shape_named, source_config
from zerofit.models.presets import NAMED
from zerofit.rollout.served import (
    BITS,
    EXPERTS_ONLY,
    ServedModel,
    matches,
    published_format,
    refuse_unless,
    unquantized_modules,
)
from zerofit.rollout.vllm import EngineMemory, EngineSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError, models_say
from zerofit.spec.run import Run
from zerofit.spec.units import shown_bytes

SETTINGS = "--rollout"
GENERATING = ("causal-lm", "image-text")  # tasks of models that generate text without an encoder of text
# options of a run that vLLM has as settings
SAME = {
    "seq_len": "max_model_len",
    "tensor_parallel": "tensor_parallel_size",
    "precision": "dtype",
    "quantize": "quantization",
}


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The memory of vLLM on each GPU of a cluster."""

    cluster: Cluster
    engine: EngineMemory

    @property
    def copies(self) -> int:
        """The number of engines that fit side by side on the cluster's GPUs."""
        return self.cluster.ranks // self.engine.settings.tensor_parallel_size

    @property
    def problem(self) -> str:
        """Why vLLM does not start; "" if it starts."""
        engine, s = self.engine, self.engine.settings
        if engine.cache_bytes <= 0:
            counted, requested = shown_bytes(engine.counted), shown_bytes(engine.requested)
            return (
                f"no memory is left for the KV cache: weights and activations need {counted}, "
                f"and gpu_memory_utilization allows {requested}"
            )
        if engine.sequences < 1:
            needed = shown_bytes(engine.cache.blocks_of_request(engine.need) * engine.cache.block_bytes)
            has = shown_bytes(engine.cache_bytes)
            return f"one request of {s.max_model_len:,} tokens needs {needed} of KV cache, but {has} are left"
        if s.gpu_memory_utilization > engine.largest_utilization:
            return "there is no room for memory that vLLM does not count (CUDA graphs, fragmentation)"
        return ""

    @property
    def remedies(self) -> list[str]:
        """Settings with which vLLM starts."""
        engine, s, remedies = self.engine, self.engine.settings, []
        # If low is above high, no utilization has room both for vLLM's own memory and for what it does not count.
        low, high = engine.smallest_utilization, engine.largest_utilization
        if low <= high:
            remedies.append(f"gpu_memory_utilization={max(low, min(s.gpu_memory_utilization, high)):.2f}")
        if engine.sequences < 1 and engine.longest:
            remedies.append(f"max_model_len={engine.longest}")
        if engine.sequences < 1 and self.copies > 1:
            remedies.append(f"tensor_parallel_size={2 * s.tensor_parallel_size}")
        return remedies

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit plan --serve --json` prints."""
        engine, s = self.engine, self.engine.settings
        return {
            "model": engine.model.name,
            "gpu": self.cluster.device.kind,
            "gpus": self.cluster.ranks,
            "copies": self.copies,
            "release": ".".join(map(str, s.release)),
            "settings": {name: getattr(s, name) for name in EngineSettings.__dataclass_fields__ if name != "release"},
            "device_total_bytes": self.cluster.device.memory_bytes,
            "requested_bytes": engine.requested,
            "breakdown": {part.name: part.bytes for part in engine.parts},
            "cache_bytes": engine.cache_bytes,
            "block_bytes": engine.cache.block_bytes,
            "blocks": engine.blocks,
            "cache_tokens": engine.cache.tokens(engine.blocks, engine.need),
            "sequences": round(engine.sequences, 2),
            "largest_utilization": engine.largest_utilization,
            "smallest_utilization": engine.smallest_utilization,
            "longest": engine.longest,
            "fits": engine.fits,
            "problem": self.problem or None,
            "remedies": [] if engine.fits else self.remedies,
        }


def served_model(name: str, model_args: Mapping[str, object]) -> ServedModel:
    """Return the sizes that decide an engine's memory, for a named model or a config.

    Raises UserError.
    """
    from zerofit.app.job.model_facts import facts_of
    from zerofit.models.hf_config import make_config
    from zerofit.train.probe import task_of

    with models_say("MODEL"):
        source = find(shape_named(name).name)
        refuse_unless(source.family == "transformers" and source.task in GENERATING, name)
        args, run = dict(model_args), Run(model=source.name, model_args=dict(model_args))
        facts = facts_of(source, task_of(source, run), None, run)
        published = NAMED[source.name].quantized if source.name in NAMED else None
        quantization = source_config(source).get(QUANTIZED)
        published = published or published_format(quantization)
        served = ServedModel.of(source.name, make_config(source, None, args), facts.parameters, published)
        patterns = () if published == EXPERTS_ONLY else unquantized_modules(quantization)
        return replace(served, unquantized=_unquantized(source, args, patterns))


def _unquantized(source: ModelSource, args: dict[str, object], patterns: tuple[str, ...]) -> int:
    """Return the number of parameters in matrices of modules that match a pattern.

    Embedding and head do not count.
    """
    import torch

    from zerofit.models.build import build

    if not patterns:
        return 0
    # Patterns name modules, so the model is built, without memory for its weights.
    with torch.device("meta"):
        model: Any = build(source, None, args)
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    count = 0
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        if parameter.dim() > 1 and id(parameter) not in tables and any(matches(module, p) for p in patterns):
            count += parameter.numel()
    return count


def settings_of(pins: Mapping[str, object], values: Mapping[str, object]) -> EngineSettings:
    """Return vLLM's settings from --rollout (`values`) and options of a run (`pins`).

    Raises UserError with all problems.
    """
    problems, settings = Problems(), dict(values)
    for name, value in pins.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in (*SAME, "model_args"):
            problems.add("usage", f"--serve with {flag}, which is for training", "remove one of them", flag)
        elif name in SAME and settings.setdefault(SAME[name], value) != value:
            message = f"{flag} {value}, but {SETTINGS} {SAME[name]}={settings[SAME[name]]}"
            problems.add("usage", message, "remove one of them", flag)
    problems.raise_if_any()
    return EngineSettings.read(settings, SETTINGS)


def serve(model: str | None, cluster: Cluster, pins: Mapping[str, Any], values: Mapping[str, object]) -> ServingPlan:
    """Return the memory of vLLM for a model on a cluster. Raises UserError with all problems."""
    problems = Problems()
    settings = problems.attempt(lambda: settings_of(pins, values))
    if model is None:
        problems.add("usage", "--serve needs MODEL", "name a model", "MODEL")
    if cluster.on_cpu:
        problems.add("usage", "--serve is for GPUs", "name a kind with --gpu", "--gpu")
    if settings and cluster.ranks % settings.tensor_parallel_size:
        message = f"tensor_parallel_size={settings.tensor_parallel_size} does not divide {cluster.ranks} GPUs"
        problems.add("usage", message, "use a divisor", SETTINGS)
    problems.raise_if_any()
    assert model and settings
    served = served_model(model, pins.get("model_args") or {})
    # Each format needs other bytes per weight, so an unknown format cannot be forecast as the nearest by itself.
    if served.published not in (None, *BITS) and not settings.quantization:
        message = f"the weights of {served.name} are quantized with {served.published}; their bytes are unknown"
        hint = f"name the nearest format by {SETTINGS} quantization=NAME: {', '.join(BITS)}"
        raise UserError(Problem(kind="model-config", message=message, hint=hint, where="MODEL"))
    length = settings.max_model_len
    if length and served.positions and length > served.positions:
        message = f"max_model_len={length} is more than the {served.positions} positions of {served.name}"
        raise UserError(Problem(kind="seq-len", message=message, hint="use fewer", where=SETTINGS))
    if served.heads % settings.tensor_parallel_size:
        message = f"tensor_parallel_size={settings.tensor_parallel_size} does not divide {served.heads} heads"
        raise UserError(Problem(kind="usage", message=message, hint="use a divisor", where=SETTINGS))
    engine = EngineMemory(model=served, settings=settings.settled(served, cluster.device), device=cluster.device)
    return ServingPlan(cluster=cluster, engine=engine)
