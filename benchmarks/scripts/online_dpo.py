"""TRL's OnlineDPOTrainer with a reward model, as in its documentation. TRL has no command for it."""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config  # pyright: ignore[reportMissingImports]
from trl.experimental.online_dpo import (  # pyright: ignore[reportMissingImports]
    OnlineDPOConfig,
    OnlineDPOTrainer,
)


def main():
    script, args, model = TrlParser((ScriptArguments, OnlineDPOConfig, ModelConfig)).parse_args_and_config()
    args.model_init_kwargs = {"dtype": model.dtype}
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    reward = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1, dtype=model.dtype)
    OnlineDPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=reward,
        args=args,
        train_dataset=load_dataset(script.dataset_name)["train"],
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        peft_config=get_peft_config(model),
    ).train()


if __name__ == "__main__":
    main()
