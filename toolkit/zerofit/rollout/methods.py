"""Methods of reinforcement learning and distillation: the models that a step needs, and TRL's settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from zerofit.spec.errors import Problems

Mode = Literal["colocate", "server"]


@dataclass(frozen=True, kw_only=True)
class RolloutMethod:
    """What a step of a method keeps on the GPUs besides the trained model."""

    generates: bool = True
    reference: bool = False  # a frozen copy of the model
    scorer: bool = False  # a frozen reward model or teacher of the same size
    critic: bool = False  # a second trained model of the same size
    pairs: bool = False  # samples are trained two by two
    trainer: str | None = None  # TRL's config class, for --write


METHODS = {
    "grpo": RolloutMethod(trainer="GRPOConfig"),
    "rloo": RolloutMethod(reference=True, trainer="RLOOConfig"),
    "dpo": RolloutMethod(generates=False, reference=True, pairs=True, trainer="DPOConfig"),
    "online-dpo": RolloutMethod(reference=True, scorer=True, pairs=True),
    "ppo": RolloutMethod(reference=True, scorer=True, critic=True),
    "distill": RolloutMethod(scorer=True),
}


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """TRL's arguments that decide the rollout's memory and time. The names are those of GRPOConfig."""

    num_generations: int = 8
    max_completion_length: int = 256
    beta: float | None = None  # weight of the reference; None: the method's default
    vllm_mode: Mode | None = None  # None: the faster mode
    vllm_gpu_memory_utilization: float | None = None  # None: enough for all completions, if that is safe
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool | None = None  # None: the faster choice
    sleep_level: int = 2  # 1 keeps the weights in host memory; TRL uses 2
    server_gpus: int | None = None  # GPUs for vLLM with vllm_mode=server; None: the fastest split
    release: str = "0.27"

    @classmethod
    def read(cls, values: dict[str, Any], where: str) -> RolloutSettings:
        """Return the settings of `name=value` pairs. Raises UserError with all problems."""
        problems, known = Problems(), {field.name: field for field in fields(cls)}
        found: dict[str, Any] = {n: str(value) if n == "release" else value for n, value in values.items()}
        for name in found.keys() - known.keys():
            problems.add("usage", f"{where}: no setting {name!r}", f"settings: {', '.join(sorted(known))}", where)
        sizes = ("num_generations", "max_completion_length", "vllm_tensor_parallel_size", "server_gpus", "sleep_level")
        for name in (name for name in sizes if name in found):
            size, most = found[name], 2 if name == "sleep_level" else 2**20
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
                problems.add("bad-value", f"{name}={size}", f"use a whole number from 1 to {most}", where)
        for name, least in (("vllm_gpu_memory_utilization", 0.01), ("beta", 0.0)):
            share = found.get(name, 0.5)
            if isinstance(share, bool) or not isinstance(share, int | float) or not least <= share <= 1:
                problems.add("bad-value", f"{name}={share}", f"use a number from {least:g} to 1", where)
        if found.get("vllm_mode", "server") not in get_args(Mode):
            problems.add("bad-value", f"vllm_mode={found['vllm_mode']}", f"use {' or '.join(get_args(Mode))}", where)
        if not isinstance(found.get("vllm_enable_sleep_mode", True), bool):
            problems.add("bad-value", "vllm_enable_sleep_mode is not true or false", "use true or false", where)
        problems.raise_if_any()
        return cls(**found)

    def needs_reference(self, method: RolloutMethod) -> bool:
        """Return whether a frozen copy of the model is kept."""
        return method.reference if self.beta is None else self.beta > 0
