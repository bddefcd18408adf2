"""TRL's DPOTrainer with its reference model, or its RewardTrainer, on pairs of answers, as in its documentation."""

import sys
from dataclasses import dataclass, field

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, TrlParser  # pyright: ignore[reportMissingImports]

KINDS = {"dpo": (DPOConfig, DPOTrainer), "reward": (RewardConfig, RewardTrainer)}


@dataclass
class Ours:
    model: str = field(default="")


def main():
    config, trainer = KINDS[sys.argv.pop(1)]
    ours, args = TrlParser((Ours, config)).parse_args_and_config()
    rows = []
    for i in range(200):
        asked = [{"role": "user", "content": f"what is {i} plus {i}?"}]
        good, bad = f"{i} plus {i} is {2 * i}. " * (5 + i % 15), "I do not know. " * (1 + i % 9)
        answers = {"chosen": good, "rejected": bad}
        rows.append({"prompt": asked, **{k: [{"role": "assistant", "content": v}] for k, v in answers.items()}})
    args.model_init_kwargs = {"dtype": "bfloat16"}
    one = trainer(model=ours.model, args=args, train_dataset=Dataset.from_list(rows))
    one.train()
    one.save_model(args.output_dir)


if __name__ == "__main__":
    main()
