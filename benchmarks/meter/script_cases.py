"""Scripts to be measured and simulated: the commands that users would type, with tiny models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .script_task import ScriptTask

SCRIPTS = Path(__file__).parents[1] / "scripts"
BUCKET = 500_000
STAGES = ("zero2", "zero3", "offload")
CHECKPOINTING = ("--gradient_checkpointing", "True")
TRL = ("sft", "lora", "dpo", "reward")
KINDS = ("plain", "trainer", "peft", "seq2seq", "image", "accelerate", "gan", *TRL, "qlora")
ALONE = ("autocast zero2", "pipeline zero1", "cnn zero2", "json zero3", "launched zero2", "liger zero2", "liger zero3")
ALONE += (
    "reentrant zero3",
    "torch plain",
    "torch ddp",
    "torch unused",
    "torch static",
    "torch views",
    "torch fsdp",
    "trainer ddp",
)
DDP = {
    "ddp": (),
    "unused": ("find_unused_parameters", "--unused"),
    "static": ("static_graph", "--unused"),
    "views": ("gradient_as_bucket_view",),
}
FLAT = {
    "full": (),
    "half": ("--strategy", "SHARD_GRAD_OP"),
    "mixed": ("--mixed",),
    "originals": ("--originals",),
    "hybrid": ("--strategy", "HYBRID_SHARD", "--together", "2"),
    "copies": ("--strategy", "HYBRID_SHARD"),  # a node has one CPU: each rank holds the whole model
}
MESHES = {
    "fsdp": (),
    "fsdp-tp": ("--tp", "2"),
    "fsdp-cp": ("--cp", "2"),
    "tp-cp": ("--tp", "2", "--cp", "2"),
    "replicas": ("--replicas", "2", "--fp32"),
    "offload": ("--offload",),
}
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
FOUR = ("mesh", "stages", "experts")  # kinds of scripts that run on four ranks; the others on two
_TRAINING = ("--output_dir", "out", "--report_to", "none", "--logging_steps", "1", "--save_strategy", "no")
_TRAINING += ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_steps", "10")
RL = tuple(f"{kind} {stage}" for kind in ("grpo", "grpo-reference", "grpo-lora") for stage in ("zero2", "zero3"))
IMPOSSIBLE = (("gan", "zero3"), ("qlora", "zero3"))
Words = Callable[[Path, str], tuple[str, ...]]


def names() -> list[str]:
    """All cases: a kind of script and how DeepSpeed divides its state."""
    divided = [f"{kind} {stage}" for kind in KINDS for stage in STAGES if (kind, stage) not in IMPOSSIBLE]
    flat, meshes = (f"fsdp1 {how}" for how in FLAT), (f"mesh {name}" for name in MESHES)
    stages = ("stages fsdp", *(f"stages {schedule}" for schedule in SCHEDULES))
    sharded = ("sharded fsdp2", "sharded tp")
    return ["plain zero1", *divided, *ALONE, *RL, *flat, *sharded, *meshes, *stages, "experts even"]


def with_cases(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. `--cases` becomes the names with all its words; none is an error."""
    parser.add_argument("--cases", nargs="*", default=[], help="only those with all these words, e.g. trainer zero3")
    asked = parser.parse_args()
    words = asked.cases
    asked.cases = [name for name in names() if set(words) <= set(name.split())]
    if not asked.cases:
        parser.error(f"--cases {' '.join(words)}: no case has all these words; the cases are {', '.join(names())}")
    return asked


def task(name: str, folder: Path) -> ScriptTask:
    """The command of a case, with its files in this folder."""
    kind, stage = name.split()
    folder.mkdir(parents=True, exist_ok=True)
    words = _WORDS[kind](folder, stage)
    launcher = () if words[0] == "accelerate" else ("python",)
    return ScriptTask(command=(*launcher, *words), folder=str(folder), ranks=4 if kind in FOUR else 2)


def _zero(stage: str) -> dict[str, Any]:
    sizes = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == "offload":
        return {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, **sizes}
    return {"stage": int(stage[-1]), **sizes}


def _json(folder: Path, name: str, content: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(content))
    return name


def _config(folder: Path, stage: str, **more: Any) -> str:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    written = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": optimizer}
    written |= {"bf16": {"enabled": True}, "zero_optimization": _zero(stage), "gradient_clipping": 1.0}
    return _json(folder, "ds.json", {**written, **more})


def _automatic(folder: Path, stage: str) -> str:
    """A JSON that is filled by the Trainer."""
    autos = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    written = {**dict.fromkeys(autos, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": _zero(stage)}
    return _json(folder, "auto.json", {**written, "zero_allow_untested_optimizer": True})


def _plain(**precision: Any) -> Words:
    """A loop of one's own in the precision that a JSON says; bf16 by default."""

    def words(folder: Path, stage: str) -> tuple[str, ...]:
        return (str(SCRIPTS / "plain.py"), "--deepspeed", "--deepspeed_config", _config(folder, stage, **precision))

    return words


def _pipeline(folder: Path, stage: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "pipeline.py"), "--deepspeed", "--deepspeed_config", _config(folder, stage))


def _seq2seq(folder: Path, stage: str) -> tuple[str, ...]:
    return _on_cpu("seq2seq.py", "--tokenizer", _llama(folder), *_arguments(folder, stage))


def _image(*options: str) -> Words:
    def words(folder: Path, stage: str) -> tuple[str, ...]:
        return _on_cpu("image.py", *_arguments(folder, stage), "--remove_unused_columns", "False", *options)

    return words


def _of_llama(*script: str) -> Words:
    """Trainers of transformers and TRL on a pretrained folder, with the options of their own that the script has."""

    def words(folder: Path, stage: str) -> tuple[str, ...]:
        return _on_cpu(*script, "--model", _llama(folder), *_arguments(folder, stage), *CHECKPOINTING)

    return words


def _grpo(*options: str) -> Words:
    """GRPO that generates for two steps at a time, so that it computes the actor's log-probs before it trains."""
    sizes = ("--num_generations", "4", "--max_completion_length", "64", "--steps_per_generation", "4")
    return _of_llama("grpo.py", *sizes, *options)


def _trainer(folder: Path, stage: str) -> tuple[str, ...]:
    """The Trainer under DeepSpeed, or with its default: DistributedDataParallel that looks for unused parameters."""
    if stage != "ddp":
        return _of_llama("trainer.py")(folder, stage)
    options = ("--model", _llama(folder), "--from_config", "True", *_TRAINING, "--use_cpu")
    return (str(SCRIPTS / "trainer.py"), *options)


def _reentrant(folder: Path, stage: str) -> tuple[str, ...]:
    """LoRA with checkpoints that DeepSpeed recomputes before it knows their module; nothing is kept for reuse."""
    options = ("--lora", "True", "--gradient_checkpointing_kwargs", '{"use_reentrant": true}')
    words = _of_llama("trainer.py", *options)(folder, stage)
    config = json.loads((folder / "auto.json").read_text())
    config["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    _json(folder, "auto.json", config)
    return words


def _liger(folder: Path, stage: str) -> tuple[str, ...]:
    """In fp32: of bf16, Liger adds up gradients on a CPU in another way than on a GPU."""
    options = ("--use_liger_kernel", "True", "--from_config", "True")
    return (*_of_llama("trainer.py", *options)(folder, stage), "--bf16", "False")


def _on_cpu(script: str, *words: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "on_cpu.py"), str(SCRIPTS / script), *words)


def _arguments(folder: Path, stage: str) -> tuple[str, ...]:
    """TrainingArguments, two of which are for CPUs only."""
    on_cpu = ("--use_cpu", "--accelerator_config", '{"use_configured_state": true}')
    return ("--deepspeed", _automatic(folder, stage), *_TRAINING, "--bf16", "True", *on_cpu)


def _accelerate(folder: Path, stage: str) -> tuple[str, ...]:
    flags = ("--offload",) if stage == "offload" else ()
    words = ("--model", _llama(folder), "--plugin", "--stage", "3" if stage == "zero3" else "2", *flags)
    return _on_cpu("accelerate_loop.py", *words)


def _json_plugin(folder: Path, stage: str) -> tuple[str, ...]:
    """Accelerate with a plugin that reads a JSON, which has no optimizer: the script makes one."""
    zero = {"zero_optimization": _zero(stage), "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    words = ("--model", _llama(folder), "--plugin", "--json", _json(folder, "plugin.json", {**zero, **sizes}))
    return _on_cpu("accelerate_loop.py", *words)


def _launched(folder: Path, stage: str) -> tuple[str, ...]:
    """Accelerate with the file of `accelerate config`, by its launcher."""
    zero = {"zero_stage": int(stage[-1]), "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    file = {"distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1, "use_cpu": False}
    file |= {"mixed_precision": "bf16", "deepspeed_config": zero}
    options = ("accelerate", "launch", "--config_file", _json(folder, "acc.json", file))
    return (*options, *_on_cpu("accelerate_loop.py", "--model", _llama(folder)))


def _gan(folder: Path, stage: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "gan.py"), "--config", _config(folder, stage, gradient_accumulation_steps=1))


def _torch(folder: Path, stage: str) -> tuple[str, ...]:
    options = ("--ddp", *DDP[stage]) if stage in DDP else () if stage == "plain" else (f"--{stage}",)
    return (str(SCRIPTS / "plain_torch.py"), *options)


def _fsdp1(folder: Path, how: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "flat_fsdp.py"), *FLAT[how])


def _sharded(folder: Path, how: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "sharded.py"), _llama(folder), "--tp_size", "2" if how == "tp" else "1")


def _mesh(folder: Path, how: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "parallel.py"), *MESHES[how])


def _stages(folder: Path, schedule: str) -> tuple[str, ...]:
    """Four stages, or two that FSDP2 shards."""
    options = ("--pp", "2") if schedule == "fsdp" else ("--pp", "4", "--schedule", schedule)
    return (str(SCRIPTS / "stages.py"), *options)


def _experts(folder: Path, how: str) -> tuple[str, ...]:
    return (str(SCRIPTS / "experts.py"),)


def _llama(folder: Path) -> str:
    """A pretrained folder of a tiny Llama, made once, with a tokenizer of bytes."""
    path = folder.parent / "llama"
    if not path.exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704}
        sizes |= {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
        sizes |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        LlamaForCausalLM(LlamaConfig(**sizes, dtype="float32")).save_pretrained(path)
        save_tokenizer(path)
    return str(path)


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of bytes into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {c: i for i, c in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(path)


_WORDS: dict[str, Words] = {
    "plain": _plain(),
    "autocast": _plain(bf16={"enabled": False}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    "pipeline": _pipeline,
    "trainer": _trainer,
    "peft": _of_llama("trainer.py", "--lora", "True"),
    "reentrant": _reentrant,
    "liger": _liger,
    "seq2seq": _seq2seq,
    "image": _image(),
    "cnn": _image("--cnn", "True", "--bf16", "False"),
    "accelerate": _accelerate,
    "json": _json_plugin,
    "launched": _launched,
    "sft": _of_llama("sft.py"),
    "lora": _of_llama("sft.py", "--lora", "True"),
    "qlora": _of_llama("sft.py", "--lora", "True", "--four_bits", "True"),
    "dpo": _of_llama("preferences.py", "dpo"),
    "reward": _of_llama("preferences.py", "reward"),
    "grpo": _grpo(),
    "grpo-reference": _grpo("--beta", "0.04"),
    "grpo-lora": _grpo("--lora", "True"),
    "gan": _gan,
    "torch": _torch,
    "fsdp1": _fsdp1,
    "sharded": _sharded,
    "mesh": _mesh,
    "stages": _stages,
    "experts": _experts,
}
