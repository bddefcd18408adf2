"""A trainer of TRL with its own example's data, by name: sft, dpo, kto, reward, grpo or rloo."""

import sys

import trl
from datasets import Dataset
from transformers import AutoTokenizer

ROWS = 64
PROMPTS = {"prompt": ["count to three"] * ROWS}
DATA = {
    "sft": {"text": ["one two three four"] * ROWS},
    "dpo": {**PROMPTS, "chosen": ["one two"] * ROWS, "rejected": ["two"] * ROWS},
    "kto": {**PROMPTS, "completion": ["one two"] * ROWS, "label": [True, False] * (ROWS // 2)},
    "reward": {"chosen": ["one two"] * ROWS, "rejected": ["two"] * ROWS},
    "grpo": PROMPTS,
    "rloo": PROMPTS,
}
TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}


def by_length(completions, **_):
    return [float(len(text)) for text in completions]


kind = sys.argv[1]
sizes = {"per_device_train_batch_size": 4, "bf16": True, "report_to": "none", "max_steps": 5}
samples = {"num_generations": 4, "max_completion_length": 256} if kind in ("grpo", "rloo") else {}
more = {"reward_funcs": by_length} if samples else {}
arguments = getattr(trl, f"{TRAINERS[kind]}Config")(output_dir="out", **sizes, **samples)
trainer = getattr(trl, f"{TRAINERS[kind]}Trainer")
rows, tokenizer = Dataset.from_dict(DATA[kind]), AutoTokenizer.from_pretrained("llama")
trainer(model="llama", args=arguments, train_dataset=rows, processing_class=tokenizer, **more).train()
