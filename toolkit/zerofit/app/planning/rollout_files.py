"""The files that `zerofit plan --method --write` writes for each trainer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from zerofit.app.planning.output_files import start_script
from zerofit.app.planning.plan import PlannedRun
from zerofit.models.presets import NAMED
from zerofit.rollout.methods import METHODS, RolloutSettings
from zerofit.rollout.vllm import EngineMemory
from zerofit.spec.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An arrangement of trainer and engine (`rollouts.Arrangement`) whose config is written."""

    method: str
    planned: PlannedRun
    settings: RolloutSettings  # with the plan's choices filled in
    engine: EngineMemory | None

    @property
    def model(self) -> str:
        """The model's name on the hub, or its folder."""
        name = self.planned.profile.model
        named = NAMED.get(name)
        return named.hub[0] if named and named.hub else name


def trl_config(chosen: Chosen, ds_config: str, colocated: bool) -> dict[str, object]:
    """Return the content of TRL's YAML file. `colocated`: vLLM runs on the training's GPUs."""
    layout, settings, engine = chosen.planned.layout, chosen.settings, chosen.engine
    config: dict[str, object] = {
        "model_name_or_path": chosen.model,
        "dtype": "bfloat16" if layout.precision == "bf16" else "float16",
        "output_dir": "out",
        # A micro batch counts sequences, but TRL counts pairs of them.
        "per_device_train_batch_size": layout.micro_batch // (2 if METHODS[chosen.method].pairs else 1),
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_checkpointing": layout.checkpointing,
        layout.precision: True,
        "deepspeed": ds_config,
    }
    if settings.beta is not None:
        config["beta"] = settings.beta
    pins = chosen.planned.request.pins
    if rank := pins.get("lora"):
        targets = pins.get("lora_targets") or "all-linear"
        config |= {"use_peft": True, "lora_r": rank, "lora_target_modules": targets.split(",")}
        config["lora_alpha"] = pins.get("lora_alpha") or 2 * rank
        config["lora_dropout"] = pins.get("lora_dropout", 0.0)
        config |= {f"use_{name}": True for name in ("dora", "rslora") if pins.get(name)}
    method = METHODS[chosen.method]
    if method.pairs:
        config["max_length"] = chosen.planned.profile.seq_len
    if engine is None:
        return config
    if method.scores_first:
        config["num_generations"] = settings.num_generations
    config["max_new_tokens" if method.pairs else "max_completion_length"] = settings.max_completion_length
    config |= {"use_vllm": True, "vllm_mode": "colocate" if colocated else "server"}
    # TRL passes these on only to an engine that it starts itself; a server gets its own arguments
    of_engine = {
        "vllm_gpu_memory_utilization": engine.settings.gpu_memory_utilization,
        "vllm_tensor_parallel_size": engine.settings.tensor_parallel_size,
        "vllm_enable_sleep_mode": settings.vllm_enable_sleep_mode,
    }
    if not method.pairs:
        of_engine["vllm_max_model_length"] = engine.settings.max_model_len
    return config | of_engine if colocated else config


def verl_script(chosen: Chosen, cluster: Cluster) -> str:
    """Return the script that starts verl with this layout and engine."""
    release = chosen.settings.trainer_release
    lines = [
        "python3 -m verl.trainer.main_ppo",
        'data.train_files="${TRAIN_FILES:?}" data.val_files="${VAL_FILES:?}"',
        *(f"{key}={shlex.quote(str(value))}" for key, value in verl_overrides(chosen, cluster).items()),
        '"$@"',
    ]
    return start_script(f"for verl {release}; set TRAIN_FILES and VAL_FILES, and add your reward as arguments", lines)


def verl_overrides(chosen: Chosen, cluster: Cluster) -> dict[str, object]:
    """Return Hydra's overrides of verl's _generated_ppo_trainer.yaml (verl/trainer/config)."""
    layout, s, engine = chosen.planned.layout, chosen.settings, chosen.engine
    assert engine
    length, pins = chosen.planned.profile.seq_len or 0, chosen.planned.request.pins
    # verl counts batches in prompts; the layout counts completions.
    prompts = layout.global_batch // s.num_generations
    scored = s.log_prob_micro_batch_size_per_gpu or layout.micro_batch
    actor = {
        "strategy": s.strategy,
        "ppo_mini_batch_size": prompts,
        "ppo_micro_batch_size_per_gpu": layout.micro_batch,
        "use_kl_loss": s.needs_reference(METHODS[chosen.method]),
        **({"kl_loss_coef": s.beta} if s.beta else {}),
        "fsdp_config.reshard_after_forward": layout.reshard,
        "fsdp_config.fsdp_size": layout.shard_ranks if layout.replicas > 1 else -1,
        "fsdp_config.offload_policy": layout.offload_param == "cpu",
        "fsdp_config.param_offload": s.param_offload,
        "fsdp_config.optimizer_offload": s.optimizer_offload,
        **({"fsdp_config.use_no_sync_for_gradient_accumulation": True} if layout.keeps_full_gradients else {}),
        **({"fsdp_config.model_dtype": "bf16"} if layout.weight_bytes == 2 else {}),
    }
    model: dict[str, object] = {
        "path": chosen.model,
        "use_remove_padding": True,
        "enable_gradient_checkpointing": bool(layout.checkpointing),
        "use_fused_kernels": s.use_fused_kernels,
    }
    if rank := pins.get("lora"):
        targets = pins.get("lora_targets")
        model |= {"lora_rank": rank, "lora_alpha": pins.get("lora_alpha") or 2 * rank}
        model |= {"target_modules": f"[{targets}]" if targets else "all-linear"}
    rollout = {
        "name": "vllm",
        "n": s.num_generations,
        "gpu_memory_utilization": engine.settings.gpu_memory_utilization,
        "tensor_model_parallel_size": engine.settings.tensor_parallel_size,
        "free_cache_engine": s.vllm_enable_sleep_mode,
        "max_model_len": engine.settings.max_model_len,
        "max_num_seqs": engine.settings.max_num_seqs,
        "log_prob_micro_batch_size_per_gpu": scored,
    }
    if rank:  # the engine needs the frozen weights from the start
        rollout["load_format"] = "safetensors"
    parts = {"model": model, "actor": actor, "rollout": rollout, "ref": {"log_prob_micro_batch_size_per_gpu": scored}}
    return {
        "algorithm.adv_estimator": chosen.method,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": length - s.max_completion_length,
        "data.max_response_length": s.max_completion_length,
        **{f"actor_rollout_ref.{part}.{key}": value for part, keys in parts.items() for key, value in keys.items()},
        "trainer.n_gpus_per_node": cluster.gpus,
        "trainer.nnodes": cluster.nodes,
    }


def openrlhf_script(chosen: Chosen, cluster: Cluster) -> str:
    """Return the script that starts OpenRLHF with this layout and engine."""
    lines = ["python3 -m openrlhf.cli.train_ppo_ray", '--data.prompt_dataset "${DATASET:?}"']
    for flag, value in openrlhf_flags(chosen, cluster).items():
        if value is True:
            lines.append(f"--{flag}")
        elif value is not False:  # a switch that is off has no word
            lines.append(f"--{flag} {shlex.quote(str(value))}")
    return start_script("for OpenRLHF; set DATASET, and add your reward as arguments", [*lines, '"$@"'])


def openrlhf_flags(chosen: Chosen, cluster: Cluster) -> dict[str, object]:
    """Return the flags for openrlhf/cli/train_ppo_ray.py."""
    layout, s, engine = chosen.planned.layout, chosen.settings, chosen.engine
    assert engine
    degree = engine.settings.tensor_parallel_size
    models = ("actor", "ref") if s.needs_reference(METHODS[chosen.method]) else ("actor",)
    return {
        "actor.model_name_or_path": chosen.model,
        **{f"{model}.num_nodes": cluster.nodes for model in models},
        **{f"{model}.num_gpus_per_node": cluster.gpus for model in models},
        "vllm.num_engines": layout.world_size // degree,
        "vllm.tensor_parallel_size": degree,
        "vllm.gpu_memory_utilization": engine.settings.gpu_memory_utilization,
        "vllm.enable_sleep": s.vllm_enable_sleep_mode,
        "train.colocate_all": True,
        "train.batch_size": layout.global_batch,
        "train.micro_batch_size": layout.micro_batch,
        # OpenRLHF counts prompts here, but sequences in train.batch_size.
        "rollout.batch_size": layout.global_batch // s.num_generations,
        "rollout.micro_batch_size": s.log_prob_micro_batch_size_per_gpu or layout.micro_batch,
        "rollout.n_samples_per_prompt": s.num_generations,
        "rollout.max_new_tokens": s.max_completion_length,
        "data.max_len": chosen.planned.profile.seq_len,
        "algo.advantage.estimator": {"grpo": "group_norm"}.get(chosen.method, chosen.method),
        "algo.kl.init_coef": 0.01 if s.beta is None else s.beta,
        "ds.zero_stage": layout.zero_stage,
        "ds.param_dtype": layout.precision,
        "ds.adam_offload": layout.offload_optimizer == "cpu",
        "ds.enable_sleep": bool(s.optimizer_offload),
        "ds.packing_samples": True,
        "ds.overlap_comm": layout.overlap,
        "ref.offload": s.reference_offload,
        "actor.gradient_checkpointing_enable": bool(layout.checkpointing),
    }
