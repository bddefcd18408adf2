"""Train a DCGAN pair with two DeepSpeed engines on the same batches (Radford et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from zerofit.data.base import Data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs
from zerofit.models.vision import DCGAN
from zerofit.spec.mesh import RankCoords
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.build import prepare_batch_norms, stored_by_engine
from zerofit.train.callbacks import Callback
from zerofit.train.engines import start_engine
from zerofit.train.process_group import rank_device
from zerofit.train.trainer import Batch, EngineTrainer
from zerofit.train.zero_layouts import Engine

DRAWINGS = 64


class GanTrainer(EngineTrainer):
    """Trainer of an image generator, and of a discriminator of real and generated images.

    The recorded loss is the sum of both networks' losses. `loss_d` and `loss_g` are recorded, too.
    """

    def __init__(self, job: Job, coords: RankCoords, inputs: Inputs | None):
        self.job, self.coords = job, coords
        self.device = rank_device()
        torch.manual_seed(job.run.seed)
        options = {"checkpointing": job.run.activation_checkpointing, "stored": stored_by_engine(job)}
        pair = build(find(job.run.model), inputs, dict(job.run.model_args), **options)
        assert isinstance(pair, DCGAN)  # the only model for this task
        prepare_batch_norms(job, pair)
        self.latent_size = pair.generator.latent_size
        self.generator = start_engine(job, pair.generator, job.steps)
        self.engine = start_engine(job, pair.discriminator, job.steps)
        self._noise = torch.Generator().manual_seed(job.run.seed * 1_000_003 + coords.dp_rank)
        self.last_losses = torch.zeros(2)

    @property
    def module(self) -> nn.Module:
        """The generator and the discriminator in one module."""
        return nn.ModuleDict({"generator": self.generator.module, "discriminator": self.engine.module})

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one step of each network. Return loss_d + loss_g, float32 (micro batches,)."""
        pairs = []
        for _ in range(self.job.batch.accumulation):
            real = next(batches)["inputs"].to(self.device, DTYPES[self.job.precision])
            fake = self.generator(self._draw(len(real), self._noise))
            pairs.append(torch.stack([self._discriminate(real, fake.detach()), self._generate(fake)]))
        # Both engines step in every pass. The two losses show which network is ahead, but the sum of both does not.
        losses = torch.stack(pairs)  # (micro batches, 2)
        self.last_losses = losses.mean(0)
        return losses.sum(1)

    def _discriminate(self, real: Tensor, fake: Tensor) -> Tensor:
        loss = _entropy(self.engine(real), 1.0) + _entropy(self.engine(fake), 0.0)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach().float()

    def _generate(self, fake: Tensor) -> Tensor:
        # without the engine: the discriminator's weights only pass the gradient on and must not accumulate it
        discriminator = self.engine.module.requires_grad_(False)
        loss = _entropy(discriminator(fake), 1.0)
        self.generator.backward(loss)
        discriminator.requires_grad_(True)
        self.generator.step()
        return loss.detach().float()

    def engines(self) -> dict[str, Engine]:
        """Return both engines, by their folders in a checkpoint."""
        return {"state": self.engine, "generator": self.generator}

    def generators(self) -> dict[str, torch.Generator]:
        """Return the random generator that draws the noise for sample images."""
        return {"noise": self._noise}

    def extra_metrics(self) -> dict[str, Tensor | float]:
        """Return this rank's two losses of the last step."""
        return {"loss_d": self.last_losses[0], "loss_g": self.last_losses[1], **super().extra_metrics()}

    def after_training(self, data: Data, folder: RunFolder, progress: Callable[[str], None]) -> dict[str, object]:
        """Save a grid of generated images on rank 0."""
        if dist.get_rank() == 0:
            self.save_drawings(folder.path / "drawings.png", self._noise)
        return {}

    @torch.no_grad()
    def save_drawings(self, file: Path, noise: torch.Generator) -> None:
        """Save a grid of generated images as a PNG."""
        from torchvision.utils import save_image

        self.generator.eval()
        drawn = self.generator.module(self._draw(DRAWINGS, noise)).float().cpu()
        self.generator.train()
        pixels = functional.interpolate(drawn, scale_factor=4)
        save_image(pixels, file, nrow=8, normalize=True, value_range=(-1, 1))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], count: int) -> Tensor:
        """Return discriminator loss, real images, half the number of right answers: float64 (3,)."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.engine.eval()
        self.generator.eval()
        for batch in batches:
            # padding samples fill up the last batch
            keep = (batch["labels"] != IGNORE_INDEX).to(self.device)
            real = batch["inputs"].to(self.device, DTYPES[self.job.precision])[keep]
            if len(real):
                sums += self._eval_sums(real)
        self.engine.train()
        self.generator.train()
        dist.all_reduce(sums)
        return sums

    def _eval_sums(self, real: Tensor) -> Tensor:
        of_real, of_fake = self.engine(real), self.engine(self.generator(self._draw(len(real), self._noise)))
        loss = (_entropy(of_real, 1.0) + _entropy(of_fake, 0.0)) * len(real)
        # each real image counts once, although two images are judged for it
        right = ((of_real > 0).sum() + (of_fake <= 0).sum()) / 2
        return torch.stack([loss.double(), torch.tensor(float(len(real)), device=self.device).double(), right.double()])

    def _draw(self, count: int, source: torch.Generator) -> Tensor:
        noise = torch.randn(count, self.latent_size, 1, 1, generator=source)
        return noise.to(self.device, DTYPES[self.job.precision])


class EpochDrawings(Callback):
    """Saves a grid of generated images after every epoch (drawings/epoch-N.png).

    All grids are drawn from the same noise. Batch norm uses rank 0's running statistics. Drawing these images does not
    change the training's random numbers.
    """

    def __init__(self, trainer: GanTrainer, folder: RunFolder, samples: int):
        """Draw images with rank 0's trainer. `samples`: number of samples in an epoch."""
        self._trainer, self._samples = trainer, samples
        self._folder = folder.path / "drawings"
        self._folder.mkdir(exist_ok=True)

    def on_step_begin(self, step: int) -> None:
        """Save generated images if the previous step completed an epoch."""
        job = self._trainer.job
        epochs_before, epochs = (job.samples_after(n) // self._samples for n in (step - 1, step))
        if step and epochs > epochs_before:
            noise = torch.Generator().manual_seed(job.run.seed)
            self._trainer.save_drawings(self._folder / f"epoch-{epochs:03}.png", noise)


def _entropy(logits: Tensor, target: float) -> Tensor:
    logits = logits.float().reshape(-1)
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
