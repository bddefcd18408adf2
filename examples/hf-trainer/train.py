"""Fine-tune a Llama of 7B parameters with the Hugging Face Trainer: plain data parallelism, no DeepSpeed yet."""

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


class RandomTokens(Dataset):
    """Stands for your data: rows of 2,048 token ids."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(32000, (2048,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main():
    # LlamaConfig's defaults are Llama-2 7B; with weights: AutoModelForCausalLM.from_pretrained("/models/llama-2-7b")
    model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)
    args = TrainingArguments(
        output_dir="out",
        bf16=True,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        max_steps=100,
        report_to="none",
    )
    Trainer(model=model, args=args, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()
