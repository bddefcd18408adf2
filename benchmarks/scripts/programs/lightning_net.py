"""Lightning with a strategy by name."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    """A classifier of vectors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, number):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


rows = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
written = {"logger": False, "enable_checkpointing": False}
trainer = lightning.Trainer(strategy=sys.argv[1], accelerator="gpu", devices=2, precision="bf16-mixed", **written)
trainer.fit(Net(), DataLoader(rows, batch_size=8))
