"""The real Trainer on a tiny Llama whose loss is NaN for one sample: by itself, and as a rank under DeepSpeed.

python -m tests.app.trainer_ranks FOLDER [DEEPSPEED_JSON]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, SAMPLES, POISONED, POISON = 64, 16, 24, 13, 63
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    bos_token_id=1,
    eos_token_id=2,
)


class Samples(torch.utils.data.Dataset):
    """Random tokens; one sample holds the token whose embedding is NaN."""

    def __init__(self, poisoned: bool = True) -> None:
        self.tokens = torch.randint(3, POISON, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
        if poisoned:
            self.tokens[POISONED, 3] = POISON

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Sleeper(TrainerCallback):
    """Hangs in one step."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            time.sleep(self.seconds)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    fixed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(output_dir=str(folder), **{**fixed, **quiet, **more})


def trainer(args: TrainingArguments, callbacks: list[TrainerCallback], poisoned: bool = True) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    if poisoned:
        with torch.no_grad():
            model.get_input_embeddings().weight[POISON] = float("nan")
    return Trainer(model, args, train_dataset=Samples(poisoned), callbacks=callbacks)


def main(folder: Path, config: str | None) -> None:
    import deepspeed

    from zerofit import hf

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # inference alone needs that op of 45 s
    watch, nan = hf.HangWatch(60), hf.NanReport(stop=False)
    memory = hf.MemoryAgainstForecast(10**12)
    trainer(arguments(folder, deepspeed=config), [watch, nan, memory]).train()
    found = {"measured": memory.measured_bytes > 0, "hung": watch.file}
    (folder / f"found-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():  # else gloo's threads may outlive the interpreter, which then aborts
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
