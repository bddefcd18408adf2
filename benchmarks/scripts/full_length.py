"""transformers.Trainer on a model of random weights, with checkpointing and samples of full length."""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Ours:
    model: str = field(default="")
    length: int = field(default=4096)
    lora: bool = field(default=False)


class Samples(Dataset):
    def __init__(self, vocabulary, length):
        self.vocabulary, self.length = vocabulary, length

    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, self.vocabulary, (self.length,))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main():
    ours, args = HfArgumentParser([Ours, TrainingArguments]).parse_args_into_dataclasses()
    config = AutoConfig.from_pretrained(ours.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if ours.lora:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapters = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    Trainer(model=model, args=args, train_dataset=Samples(config.vocab_size, ours.length)).train()


if __name__ == "__main__":
    main()
