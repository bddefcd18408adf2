"""Files of other programs that are not a DeepSpeed JSON, recognised by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# nearly every DeepSpeed JSON has one of them
MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")

# top-level keys that training programs read from the same file: not misspelt DeepSpeed keys
_OWN = """
seed random_seed manual_seed epoch epochs num_epochs max_epochs num_train_epochs steps max_steps num_steps
total_steps train_iters num_workers dataloader_num_workers lr learning_rate min_lr max_lr warmup
warmup_steps warmup_ratio weight_decay momentum lr_scheduler lr_scheduler_type optim batch_size
eval_batch_size model model_name model_name_or_path model_path model_type model_config pretrained tokenizer
tokenizer_name tokenizer_path vocab_size vocab_file merge_file dataset datasets dataset_name data data_path
data_dir train_file train_data val_data output_dir save_dir log_dir logging_dir checkpoint_dir cache_dir
output_file root run_name project project_name wandb_project entity experiment_name experiment group
max_length max_len max_seq_length max_seq_len seq_len seq_length block_size image_size hidden_size
num_layers num_heads num_attention_heads n_layer n_head n_embd dropout num_classes num_labels task stage
mode debug verbose precision dtype device devices num_gpus num_nodes gpus world_size local_rank rank
master_addr master_port cuda_visible_devices backend dist_backend distributed_backend ddp_backend launcher
log_interval eval_interval save_interval logging_steps eval_steps save_steps log_every save_every eval_every
patience early_stopping resume resume_from_checkpoint checkpoint_path gradient_checkpointing lora lora_r
lora_alpha lora_dropout use_lora temperature beta name description version comment comments notes author
metadata metric metrics
"""
OWN_KEYS = frozenset(_OWN.split())


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program's file, and the keys to recognise it by."""

    name: str
    kind: str  # of `zerofit.check.argument_files`; "": it names no DeepSpeed JSON
    needs: tuple[str, ...] = ()  # all of these keys
    keys: tuple[str, ...]  # and at least `least` of these
    least: int = 1

    def seen(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys that identify the program, or none if the file is not its."""
        found = tuple(key for key in self.keys if key in config)
        return (*self.needs, *found) if len(found) >= self.least and all(k in config for k in self.needs) else ()


PROGRAMS = (
    Program(
        name="Accelerate's configuration",
        kind="accelerate",
        keys=("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "megatron_lm_config"),
    ),
    Program(
        name="axolotl's configuration",
        kind="axolotl",
        needs=("base_model",),
        keys=("datasets", "micro_batch_size", "sequence_len", "adapter", "dataset_prepared_path", "model_type"),
    ),
    Program(
        name="LLaMA-Factory's arguments",
        kind="trainer",
        needs=("model_name_or_path",),
        keys=("finetuning_type", "stage", "template", "dataset", "dataset_dir", "export_dir", "infer_backend"),
    ),
    Program(
        name="a Hugging Face model's config.json", kind="", keys=("architectures", "model_type", "hidden_size"), least=2
    ),
    Program(
        name="training arguments (the Trainer's, TRL's)",
        kind="trainer",
        keys=("output_dir", "model_name_or_path", "num_train_epochs", "per_device_train_batch_size", "report_to"),
        least=2,
    ),
    Program(
        name="FSDP settings",
        kind="",
        keys=(
            "fsdp",
            "fsdp_version",
            "fsdp_sharding_strategy",
            "fsdp_auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
        ),
    ),
)


def program_of(config: Any) -> tuple[Program, tuple[str, ...]] | None:
    """Return the program of a configuration that is not DeepSpeed's, and the keys that identify it."""
    if not isinstance(config, Mapping) or any(key in config for key in MARKS):
        return None
    return next(((program, keys) for program in PROGRAMS if (keys := program.seen(config))), None)


def where_to_look(program: Program, config: Mapping[str, Any], file: str) -> str:
    """Return a hint to check the DeepSpeed JSON that a program's file names, if any, instead of this file."""
    if program.kind == "accelerate":
        kind = config.get("distributed_type")
        if kind in (None, "DEEPSPEED"):
            return f"zerofit check --accelerate-config {file} checks the JSON that Accelerate makes from it"
        return f"its distributed_type is {kind}: Accelerate does not use DeepSpeed with it"
    named = config.get("deepspeed")
    if program.kind and isinstance(named, str):
        return f"zerofit check --training-args {file} checks it together with its DeepSpeed JSON, {named}"
    return f"it names no DeepSpeed JSON{' (key deepspeed)' if program.kind else ''}: give that file"
