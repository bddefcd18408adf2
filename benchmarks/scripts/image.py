"""A short run_image_classification.py: a vision transformer or a CNN under transformers.Trainer with DeepSpeed."""

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop
from transformers import (
    HfArgumentParser,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

SIZE, CLASSES = 64, 10


@dataclass
class Ours:
    cnn: bool = field(default=False)


class Images(Dataset):
    def __init__(self):
        self.images = torch.randint(0, 256, (128, 3, 80, 80), dtype=torch.uint8)
        self.transforms = Compose([RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3)])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"pixel_values": self.transforms(self.images[i] / 255), "labels": i % CLASSES}


def collate(rows):
    labels = torch.tensor([row["labels"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def main():
    ours, args = HfArgumentParser([Ours, TrainingArguments]).parse_args_into_dataclasses()
    if ours.cnn:
        sizes = {"embedding_size": 32, "hidden_sizes": [64, 128, 256], "depths": [2, 2, 2]}
        model = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES, layer_type="basic", **sizes))
    else:
        sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
        model = ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=8, num_labels=CLASSES, **sizes))
    trainer = Trainer(model=model, args=args, train_dataset=Images(), data_collator=collate)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
