"""What every strategy is given: the same weights, the same samples in the same order, the same optimizer and loss.

It also measures: whoever asks for the next batch has done a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import StochasticDepth

from zerofit.compare.gan import GanPair, noise_planes
from zerofit.compare.job import MOMENTUM, CompareJob
from zerofit.compare.measure import StrategyMeter
from zerofit.data import Order, open_data
from zerofit.data.base import Integers
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.gan import DCGAN
from zerofit.models.inputs import ImageInputs
from zerofit.models.layers import as_layers
from zerofit.spec.events import Reporter
from zerofit.spec.task import IGNORE_INDEX
from zerofit.train.probe import task_of

EVAL_BATCH = 100
TELL_S = 0.5
RANDOM = (nn.modules.dropout._DropoutNd, StochasticDepth)


class NotHereError(Exception):
    """A strategy that these devices, this model or this installation do not take: the reason."""


class BenchmarkTask:
    """One process's share of the work."""

    def __init__(self, job: CompareJob, folder: Path, rank: int):
        self.job, self.rank = job, rank
        self.task = task_of(find(job.model), job.run)
        self._data = open_data(job.run, self.task, job.seq_len, Reporter())
        self._order = Order(len(self._data.train), job.seed)
        self.device = torch.device("cpu")
        if job.accelerator == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())  # a server has none of its own
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.allow_tf32 = False  # weights are compared to the fifth digit
        self.backend = "nccl" if job.accelerator == "cuda" else "gloo"
        self.notes: dict[str, Any] = {"tokens_a_sample": None}  # what there is to tell besides
        self._progress, self._told = (folder / "done" if rank == 0 else None), 0.0
        self._measure = StrategyMeter(self.device)

    @property
    def devices(self) -> list[torch.device]:
        """All devices of a kind that one process can drive."""
        if self.job.accelerator != "cuda":
            return [self.device]
        return [torch.device("cuda", n) for n in range(min(self.job.ranks, torch.cuda.device_count()))]

    def model(self) -> nn.Module:
        """The model with its initial weights, the same in every process, on this process's device."""
        return self._whole_model().to(self.device)

    def _whole_model(self) -> nn.Module:
        torch.manual_seed(self.job.seed)
        model = build(find(self.job.model), self._data.inputs, dict(self.job.model_args))
        config: Any = getattr(model, "config", None)
        if config is not None:
            config.use_cache = False
        for module in model.modules():
            if isinstance(module, RANDOM):
                module.p = 0.0  # or no two strategies would see the same numbers
        if self.task == "gan":
            assert isinstance(model, DCGAN) and isinstance(self._data.inputs, ImageInputs)  # the catalogue's only GAN
            model = GanPair(model, self._data.inputs.channels)
        return model.train()

    def stage(self, number: int, stages: int) -> LayerStage:
        """The layers of one of several stages of about as many parameters. Raises NotHereError."""
        if self.task == "gan":
            raise NotHereError("a pair of networks is not a list of layers")
        layers = as_layers(self._whole_model())
        if any(layer.tied for layer in layers):
            raise NotHereError("its first and last layers share a parameter, which no two ranks can hold")
        first, last = _even_cuts([_size(layer.module) for layer in layers], stages)[number]
        return LayerStage(layers[first:last]).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """SGD with momentum: it does not blow up the last bits in which strategies differ, as Adam does."""
        return torch.optim.SGD(parameters, lr=self.job.lr, momentum=MOMENTUM)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Mean loss over a batch; shares of equal size average to exactly that of the whole."""
        if self.task == "gan":
            return output.mean()
        logits = getattr(output, "logits", output)
        logits = logits.reshape(-1, logits.shape[-1]).float()
        total = functional.cross_entropy(logits, target.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")
        return total / target.numel()

    def batches(self, share: int = 0, of: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of this share of every global batch."""
        size = self.job.global_batch // of
        for step in range(self.job.steps):
            self._measure.step(step, last=False)
            self.progress(f"{step} of {self.job.steps} steps")
            yield self.batch(step * self.job.global_batch + share * size, size)
        self._measure.step(self.job.steps, last=True)

    def batch(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """So many samples from a place in their order."""
        indices, keys = self._order.indices(start, start + size), self._order.keys(start, start + size)
        found = self._data.train.batch(indices, keys)
        if not self.is_image:
            self.notes["tokens_a_sample"] = found["inputs"].shape[1]
        return self._inputs(found["inputs"], keys).to(self.device), found["labels"].to(self.device)

    def _inputs(self, x: Tensor, keys: Integers) -> Tensor:
        if self.task != "gan":
            return x
        latent, size = self.job.model_args.get("latent_size", 100), x.shape[-1]
        shape = (noise_planes(latent, size), size, size)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(key))) for key in keys]
        return torch.cat([x, torch.stack(noise)], dim=1)

    @property
    def samples(self) -> int:
        """Of one epoch."""
        return len(self._data.train)

    @property
    def is_image(self) -> bool:
        """Whether samples are images."""
        return isinstance(self._data.inputs, ImageInputs)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float | None]:
        """Mean loss and the share of right answers over validation samples."""
        was, total, targets, right = model.training, 0.0, 0, 0
        model.eval()
        count = min(self.job.eval_samples, len(self._data.valid))
        for start in range(0, count, EVAL_BATCH):
            self.progress(f"evaluated {start} of {count} samples")
            places = list(range(start, min(start + EVAL_BATCH, count)))
            found = self._data.valid.batch(places, places)
            x, y = self._inputs(found["inputs"], places).to(self.device), found["labels"].to(self.device)
            output = model(x)
            if self.task == "gan":
                total, targets = total + float(output.sum()), targets + len(output)
                continue
            real, logits = y != IGNORE_INDEX, getattr(output, "logits", output)
            total += float(self.loss(output, y)) * y.numel()
            targets += int(real.sum())
            right += int((logits.argmax(-1) == y)[real].sum())
        model.train(was)
        loss = total / targets
        accuracy = None if self.task == "gan" else right / targets
        return {"loss": loss if math.isfinite(loss) else None, "accuracy": accuracy}

    def progress(self, text: str) -> None:
        """Say how far this process is; who sees nothing new for minutes takes it for dead."""
        if self._progress and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._progress.write_text(text)

    def note(self, name: str, value: Any) -> None:
        """Something to tell besides speed and weights."""
        self.notes[name] = value

    def told(self) -> dict[str, Any]:
        """What was measured in this process."""
        return {**self._measure.told(), **self.notes}


class LayerStage(nn.Sequential):
    """Some of a model's layers in a row."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__(*(layer.module for layer in layers))
        self._names = [layer.names for layer in layers]

    def whole_state(self) -> dict[str, Tensor]:
        """Its weights by their names in the whole model, on the CPU."""
        found = {}
        for number, names in enumerate(self._names):
            for key, value in self[number].state_dict().items():
                found[names[key]] = value.detach().cpu().clone()
        return found


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights of a model on the CPU."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def tied(model: nn.Module) -> bool:
    """Whether two layers share a parameter."""
    return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _even_cuts(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """(first, last) of each part: cut where the sum is nearest to its share, none without parameters.

    Raises NotHereError where there are too few layers that have any.
    """
    cuts, whole, full = [0], sum(sizes), sum(size > 0 for size in sizes)
    if full < parts:
        raise NotHereError(f"{full} layers with parameters are too few for {parts} stages")
    for part in range(1, parts):
        able = [
            n
            for n in range(cuts[-1] + 1, len(sizes))
            if sum(sizes[cuts[-1] : n]) > 0 and sum(size > 0 for size in sizes[n:]) >= parts - part
        ]
        cuts.append(min(able, key=lambda n: abs(sum(sizes[:n]) - whole * part / parts)))
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))
