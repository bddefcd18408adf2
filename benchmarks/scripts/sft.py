"""TRL's SFTTrainer as in its documentation: all weights, LoRA, or LoRA on weights of 4 bits."""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer, TrlParser  # pyright: ignore[reportMissingImports]


@dataclass
class Ours:
    model: str = field(default="")
    lora: bool = field(default=False)
    four_bits: bool = field(default=False)


def main():
    ours, args = TrlParser((Ours, SFTConfig)).parse_args_and_config()
    rows = []
    for i in range(200):
        answer = f"{i} plus {i} is {2 * i}. " * (5 + i % 15)
        asked = {"role": "user", "content": f"what is {i} plus {i}?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    args.model_init_kwargs = {"dtype": torch.bfloat16}
    if ours.four_bits:
        args.model_init_kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    trainer = SFTTrainer(
        model=ours.model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if ours.lora
        else None,
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
