"""TRL's GRPOTrainer with transformers' generation, as in its documentation; every completion has the maximum length."""

from dataclasses import dataclass, field

from datasets import Dataset
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from trl import GRPOConfig, GRPOTrainer, TrlParser  # pyright: ignore[reportMissingImports]


@dataclass
class Ours:
    model: str = field(default="")
    lora: bool = field(default=False)


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


def main():
    ours, args = TrlParser((Ours, GRPOConfig)).parse_args_and_config()
    rows = Dataset.from_dict({"prompt": [f"count from {n} to {n + 9}" for n in range(10, 90)]})
    args.model_init_kwargs = {"dtype": "bfloat16"}
    args.generation_kwargs = {"min_new_tokens": args.max_completion_length}
    adapters = LoraConfig(r=8, target_modules="all-linear") if ours.lora else None
    GRPOTrainer(model=ours.model, reward_funcs=lengths, args=args, train_dataset=rows, peft_config=adapters).train()


if __name__ == "__main__":
    main()
