"""Methods of reinforcement learning and distillation, and a trainer's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from zerofit.spec.errors import Problems

Mode = Literal["colocate", "server"]
Trainer = Literal["trl", "verl", "openrlhf"]
Strategy = Literal["fsdp", "fsdp2"]
# A trainer's own names of the settings, by zerofit's.
OWN_NAMES: dict[str, dict[str, str]] = {
    # verl/trainer/config/actor/actor.yaml, rollout/rollout.yaml, engine/fsdp.yaml
    "verl": {
        "num_generations": "n",
        "max_completion_length": "response_length",
        "beta": "kl_loss_coef",
        "vllm_gpu_memory_utilization": "gpu_memory_utilization",
        "vllm_tensor_parallel_size": "tensor_model_parallel_size",
        "vllm_enable_sleep_mode": "free_cache_engine",
    },
    # openrlhf/cli/train_ppo_ray.py
    "openrlhf": {
        "num_generations": "rollout.n_samples_per_prompt",
        "max_completion_length": "rollout.max_new_tokens",
        "beta": "algo.kl.init_coef",
        "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
        "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
        "vllm_enable_sleep_mode": "vllm.enable_sleep",
        "optimizer_offload": "ds.enable_sleep",
        "reference_offload": "ref.offload",
        "log_prob_micro_batch_size_per_gpu": "rollout.micro_batch_size",
    },
}
# Settings that only these trainers have.
ONLY: dict[str, tuple[Trainer, ...]] = {
    **dict.fromkeys(("vllm_mode", "server_gpus", "sleep_level"), ("trl",)),
    **dict.fromkeys(("param_offload", "use_fused_kernels", "use_no_sync_for_gradient_accumulation"), ("verl",)),
    **dict.fromkeys(("trainer_release", "strategy"), ("verl",)),
    "reference_offload": ("openrlhf",),
    **dict.fromkeys(("optimizer_offload", "log_prob_micro_batch_size_per_gpu"), ("verl", "openrlhf")),
}
WITH_PROCESSES = ("grpo", "rloo")  # methods of verl and OpenRLHF
COPIES: tuple[int, int] = (0, 9)  # verl's first release that copies the logits to divide them by the temperature


@dataclass(frozen=True, kw_only=True)
class RolloutMethod:
    """A method: the models it needs besides the trained model, and how it uses samples."""

    generates: bool = True
    reference: bool = False  # a frozen copy of the model
    scorer: bool = False  # a frozen reward model or teacher of the same size
    critic: bool = False  # a second trained model of the same size
    pairs: bool = False  # samples are trained two by two
    scores_first: bool = True  # frozen models run before the training, not between its forward and its backward
    head: Literal["fused", "divergence", "whole"] | None = None  # how TRL computes the loss; None: TRL has no trainer
    command: str = ""  # TRL's, for --write


METHODS = {
    "grpo": RolloutMethod(head="fused", command="trl grpo"),
    "rloo": RolloutMethod(reference=True, head="fused", command="trl rloo"),
    "dpo": RolloutMethod(
        generates=False, reference=True, pairs=True, scores_first=False, head="fused", command="trl dpo"
    ),
    "online-dpo": RolloutMethod(
        reference=True,
        scorer=True,
        pairs=True,
        scores_first=False,
        head="whole",
        command="accelerate launch examples/scripts/online_dpo.py --reward_model_path REWARD",
    ),
    "ppo": RolloutMethod(reference=True, scorer=True, critic=True),
    "distill": RolloutMethod(
        scorer=True,
        scores_first=False,
        head="divergence",
        command="trl distillation --teacher_model_name_or_path TEACHER",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The trainer's arguments that decide memory and time, most by TRL's names in GRPOConfig."""

    trainer: Trainer = "trl"
    num_generations: int = 8
    max_completion_length: int = 256
    beta: float | None = None  # weight of the reference; None: the method's default
    vllm_mode: Mode | None = None  # None: the faster mode
    vllm_gpu_memory_utilization: float | None = None  # None: enough for all completions, if that is safe
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool | None = None  # None: the faster choice
    sleep_level: int = 2  # 1 keeps the weights in host memory; TRL uses 2
    server_gpus: int | None = None  # GPUs for vLLM with vllm_mode=server; None: the fastest split
    release: str = "0.27"  # of vLLM
    # of verl and OpenRLHF, with verl's names
    param_offload: bool | None = None  # weights on the host while another model uses the GPU; None: the faster choice
    optimizer_offload: bool | None = None  # moments on the host except in training; None: the faster choice
    use_fused_kernels: bool = False
    reference_offload: bool = False
    log_prob_micro_batch_size_per_gpu: int | None = None  # None: as in training
    use_no_sync_for_gradient_accumulation: bool = False
    trainer_release: str = "0.9"
    strategy: Strategy = "fsdp"

    @classmethod
    def read(cls, values: Mapping[str, object], where: str) -> RolloutSettings:
        """Read settings by zerofit's or the trainer's names. Raises UserError with all problems."""
        trainer = str(values.get("trainer", "trl"))
        problems, own = Problems(), OWN_NAMES.get(trainer, {})
        known = [field.name for field in fields(cls) if trainer in ONLY.get(field.name, (trainer,))]
        ours = {word: name for name, word in own.items()}
        texts = ("release", "trainer_release")
        settings = {ours.get(n, n): str(v) if n in texts else v for n, v in values.items()}
        for word in ours.keys() & values.keys():
            if ours[word] != word and ours[word] in values:
                message = f"{where}: {word} and {ours[word]} name the same setting"
                problems.add("usage", message, "use one of them", where)
        for name in settings.keys() - set(known):
            words = ", ".join(sorted(own.get(other, other) for other in known))
            problems.add("usage", f"{where}: no setting {name!r}", f"settings: {words}", where)
        for name, value in settings.items():
            if hint := _hint(name, value):
                problems.add("bad-value", f"{own.get(name, name)}={value}", hint, where)
        problems.raise_if_any()
        return cls(**cast(dict[str, Any], settings))  # their types were checked

    def own_name(self, name: str) -> str:
        """Return the trainer's own name for the setting `name`."""
        return OWN_NAMES.get(self.trainer, {}).get(name, name)

    def needs_reference(self, method: RolloutMethod) -> bool:
        """Return whether a frozen reference model is needed."""
        if not method.scores_first:  # beta has another meaning
            return method.reference
        if self.beta is not None:
            return self.beta > 0
        return method.reference or self.trainer == "openrlhf"  # whose default is 0.01

    @property
    def is_early(self) -> bool:
        """Whether this is verl before 0.9, which divides logits in place and sends from the GPU."""
        major, minor = map(int, self.trainer_release.split(".")[:2])
        return (major, minor) < COPIES

    @property
    def defers(self) -> bool:
        """Whether gradients are reduced only once per step, as always in verl 0.9.0 (verl#7458)."""
        return self.use_no_sync_for_gradient_accumulation or self.trainer_release == "0.9.0"


def _hint(name: str, value: object) -> str:
    """Return a hint on the allowed values of a setting; "" if `value` is allowed."""
    choices = {"vllm_mode": get_args(Mode), "trainer": get_args(Trainer), "strategy": get_args(Strategy)}
    switches = ("vllm_enable_sleep_mode", "param_offload", "optimizer_offload", "use_fused_kernels")
    switches += ("use_no_sync_for_gradient_accumulation", "reference_offload")
    shares = {"vllm_gpu_memory_utilization": 0.01, "beta": 0.0}
    sizes = ("num_generations", "max_completion_length", "vllm_tensor_parallel_size", "server_gpus", "sleep_level")
    if name in choices:
        return "" if value in choices[name] else f"use {' or '.join(choices[name])}"
    if name in switches:
        return "" if isinstance(value, bool) else "use true or false"
    if name in shares:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and shares[name] <= value <= 1
        return "" if fits else f"use a number from {shares[name]:g} to 1"
    if name in (*sizes, "log_prob_micro_batch_size_per_gpu"):
        most = 2 if name == "sleep_level" else 2**20
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        return "" if fits else f"use an integer from 1 to {most}"
    if name == "trainer_release":
        parts = str(value).split(".")
        fits = len(parts) > 1 and all(part.isdecimal() for part in parts[:2])
        return "" if fits else "use a release of verl, like 0.8"
    return ""
