"""A short run_clm.py: transformers.Trainer with DeepSpeed."""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Ours:
    model: str = field(default="")
    from_config: bool = field(default=False)
    length: int = field(default=128)
    lora: bool = field(default=False)


class Lines(Dataset):
    def __init__(self, tokenizer, length):
        text = [f"the quick brown fox jumps over the lazy dog {i} " * 40 for i in range(256)]
        self.rows = [tokenizer(t, truncation=True, max_length=length) for t in text]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def main():
    ours, args = HfArgumentParser([Ours, TrainingArguments]).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(ours.model)
    if ours.from_config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ours.model))
    else:
        model = AutoModelForCausalLM.from_pretrained(ours.model, dtype=torch.bfloat16)
    if ours.lora:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    print("parameters", sum(p.numel() for p in model.parameters()))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Lines(tokenizer, ours.length),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()


if __name__ == "__main__":
    main()
