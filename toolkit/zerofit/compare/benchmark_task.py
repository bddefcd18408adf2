"""Define the task of every strategy: the same weights, samples, order of samples, optimizer and loss.

The task also measures time, memory and traffic. A step ends when its strategy requests the next batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from zerofit.compare.epochs import Epochs
from zerofit.compare.job import MOMENTUM, WARM, CompareJob, RankReport
from zerofit.compare.pace import pause_s
from zerofit.data import Order, open_data
from zerofit.data.base import Integers
from zerofit.models.batch_norm import batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.models.layers import as_layers
from zerofit.models.vision import DCGAN
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_text
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.process import Flow, flows, forget_resident_peak, resident_memory
from zerofit.train.probe import task_of

EVAL_BATCH = 100
TELL_S = 0.5
MOST_KEPT = 50  # states of the weights that are kept for the accuracy curve
RANDOM = ("_DropoutNd", "StochasticDepth")  # layers of torch and torchvision that draw random numbers in training


class NotHereError(Exception):
    """These devices, this model or this installation do not support a strategy. The message is the reason."""


class BenchmarkTask:
    """The task as one process sees it: weights, batches, optimizer, loss and measurements."""

    def __init__(self, job: CompareJob, folder: Path, rank: int):
        self.job, self.rank = job, rank
        self.task = task_of(find(job.model), job.run)
        self._data = open_data(job.run, self.task, job.seq_len, Reporter())
        self._order = Order(len(self._data.train), job.seed)
        self.device = torch.device("cpu")
        if job.accelerator == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())  # servers share a GPU
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.allow_tf32 = False  # weights are compared to the fifth digit
        self.backend = "nccl" if job.accelerator == "cuda" else "gloo"
        self.notes: RankReport = {"tokens_a_sample": None}  # further figures to report
        self._progress, self._told = (folder / "done" if rank == 0 else None), 0.0
        self._kept: list[tuple[float, float, dict[str, Tensor]]] = []
        self._measure = StrategyMeter(self.device)
        self.epochs = Epochs()

    @property
    def devices(self) -> list[torch.device]:
        """The devices that one process can drive."""
        if self.job.accelerator != "cuda":
            return [self.device]
        return [torch.device("cuda", n) for n in range(min(self.job.ranks, torch.cuda.device_count()))]

    def model(self) -> nn.Module:
        """Return the model with its initial weights, the same in every process, on this process's device."""
        self._model = self._full_model().to(self.device)
        return self._model

    def _full_model(self) -> nn.Module:
        torch.manual_seed(self.job.seed)
        model = build(find(self.job.model), self._data.inputs, dict(self.job.model_args))
        config: Any = getattr(model, "config", None)
        if config is not None:
            config.use_cache = False
        modules: Iterator[Any] = model.modules()
        for module in modules:
            if any(kind.__name__ in RANDOM for kind in type(module).__mro__):
                module.p = 0.0  # strategies would draw different numbers
        # a GAN has two networks and two losses. As one model with one loss it needs no change in the strategies
        if self.task == "gan":
            assert isinstance(model, DCGAN) and isinstance(self._data.inputs, ImageInputs)  # the catalog's only GAN
            model = GanPair(model, self._data.inputs.channels)
        return model.train()

    def stage(self, number: int, stages: int) -> LayerStage:
        """Return the layers of stage `number` out of `stages` stages. Raises NotHereError.

        All stages have similar numbers of parameters.
        """
        if self.task == "gan":
            raise NotHereError("a pair of networks is not a list of layers")
        layers = as_layers(self._full_model())
        if any(layer.tied for layer in layers):
            raise NotHereError("its first and last layers share a parameter, which must be on one rank")
        sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in layers]
        first, last = _even_cuts(sizes, stages)[number]
        return LayerStage(layers[first:last]).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """Return SGD with momentum. Adam would amplify the rounding differences between strategies."""
        self._optimizer = torch.optim.SGD(parameters, lr=self.job.lr, momentum=MOMENTUM)
        return self._optimizer

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean loss over a batch. The losses of equal parts of a batch average to this value."""
        if self.task == "gan":
            return output.mean()
        logits = getattr(output, "logits", output)
        logits = logits.reshape(-1, logits.shape[-1]).float()
        total = functional.cross_entropy(logits, target.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")
        return total / target.numel()

    def batches(self, share: int = 0, of: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Divide every global batch into `of` equal shares, and yield inputs and targets of share `share`."""
        if self.job.phases:
            yield from self.epochs.batches(self, self._model, self._optimizer, share, of)
            return
        size = self.job.global_batch // of
        try:
            for step in range(self.job.steps):
                self._measure.step(step, last=False)
                self.progress(f"{step} of {self.job.steps} steps")
                time.sleep(pause_s(self.job, self.rank, step))
                yield self.batch(step * self.job.global_batch + share * size, size)
        finally:  # also if a strategy stops early
            self._measure.step(self.job.steps, last=True)

    def batch(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` samples from index `start` of the shuffled order."""
        indices, keys = self._order.indices(start, start + size), self._order.keys(start, start + size)
        batch = self._data.train.batch(indices, keys)
        if isinstance(self._data.inputs, TextInputs):
            self.notes["tokens_a_sample"] = batch["inputs"].shape[1]
        return self._inputs(batch["inputs"], keys).to(self.device), batch["labels"].to(self.device)

    def _inputs(self, x: Tensor, keys: Integers) -> Tensor:
        if self.task != "gan":
            return x
        latent, size = self.job.model_args.get("latent_size", 100), x.shape[-1]
        shape = (noise_planes(latent, size), size, size)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(key))) for key in keys]
        return torch.cat([x, torch.stack(noise)], dim=1)

    @property
    def samples(self) -> int:
        """The number of samples in one epoch."""
        return len(self._data.train)

    @property
    def eval_samples(self) -> int:
        """The number of validation samples per evaluation."""
        return min(self.job.eval_samples, len(self._data.valid))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, places: range | None = None) -> dict[str, float | None]:
        """Return mean loss and accuracy on the validation samples at the indices `places` (None: all samples)."""
        was, total, targets, right = model.training, 0.0, 0, 0
        model.eval()
        positions = range(self.eval_samples) if places is None else places
        for start in range(0, len(positions), EVAL_BATCH):
            self.progress(f"evaluated {start} of {len(positions)} samples")
            part = positions[start : start + EVAL_BATCH]
            batch = self._data.valid.batch(part, part)
            x, y = self._inputs(batch["inputs"], part).to(self.device), batch["labels"].to(self.device)
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

    def keep(self, model: nn.Module, steps: float) -> None:
        """Store the weights and the time after `steps` global batches, for `curve`.

        Stores only some of the steps, at regular intervals. Does nothing if no target accuracy is set, or if the
        model has batch norm, because then only the workers have the running statistics.
        """
        if self.job.target is None or steps % max(1, self.job.steps // MOST_KEPT) or batch_norms(model):
            return
        self._kept.append((steps, time.perf_counter(), state_on_cpu(model)))

    def curve(self) -> list[dict[str, object]]:
        """Evaluate all weights that `keep` stored.

        Return for each: its step, the seconds since the first stored step, its loss and its accuracy.
        """
        model, points = self.model(), []
        for steps, moment, state in self._kept:
            model.load_state_dict(state)
            points.append({"steps": steps, "seconds": moment - self._kept[0][1], **self.evaluate(model)})
        return points

    def progress(self, text: str) -> None:
        """Write the progress of rank 0 to its file; other ranks do nothing.

        If the file does not change for minutes, the command assumes that the process is dead.
        """
        if self._progress and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            write_text(self._progress, text)

    def measurements(self) -> RankReport:
        """Return the measurements of this process."""
        return {**self._measure.measurements(), **self.notes}


class LayerStage(nn.Sequential):
    """Consecutive layers of a model."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__(*(layer.module for layer in layers))
        self._names = [layer.names for layer in layers]

    def state_on_cpu(self) -> dict[str, Tensor]:
        """Return the weights on the CPU, by their names in the full model."""
        state = {}
        for number, names in enumerate(self._names):
            for key, value in self[number].state_dict().items():
                state[names[key]] = value.detach().cpu().clone()
        return state


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all weights of a model on the CPU."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def tied(model: nn.Module) -> bool:
    """Return whether two layers share a parameter."""
    return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def _even_cuts(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divide `sizes` into consecutive parts with nearly equal sums. Return (start, stop) of each part.

    `stop` is exclusive; no part is empty. Raises NotHereError if there are fewer layers with parameters than parts.
    """
    # Greedy: the boundary after part k goes where the sum of sizes is nearest to k / parts of the total, among the
    # places that leave at least one layer with parameters for this part and for each later one.
    cuts, total, filled = [0], sum(sizes), sum(size > 0 for size in sizes)
    if filled < parts:
        raise NotHereError(f"{filled} layers with parameters are too few for {parts} stages")
    for part in range(1, parts):
        able = [
            n
            for n in range(cuts[-1] + 1, len(sizes))
            if sum(sizes[cuts[-1] : n]) > 0 and sum(size > 0 for size in sizes[n:]) >= parts - part
        ]
        cuts.append(min(able, key=lambda n: abs(sum(sizes[:n]) - total * part / parts)))
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))


# What is measured where, so that strategies are comparable:
#
#     time      from step WARM to the last; a request for the next batch means that a step is done
#     memory    the peak since step WARM: torch's allocator on GPUs, the kernel's VmHWM on CPUs
#     traffic   the kernel's byte counts of each TCP connection that existed at step WARM (gloo; not NCCL)
class StrategyMeter:
    """Time, memory and network bytes of one process, from before the model is built to the last step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: list[float] = []
        self._flows: dict[str, Flow] = {}
        self._found: RankReport = {}
        _forget_peaks(device)
        self._before = resident_memory().now

    def step(self, done: int, last: bool) -> None:
        """Record the time after `done` steps. After the last step, also record memory and traffic."""
        # kernels run asynchronously; without this only the time to issue them would be measured
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if done == WARM:
            self._flows = flows()
            _forget_peaks(self._device)  # exclude building the model and the first step's extra memory
        if last:
            self._found = {**self._memory(), **self._wire()}

    def measurements(self) -> RankReport:
        """Return the figures for the strategy's row; `seconds` is None if this process has taken no timed steps."""
        timed = len(self._times) - 1 - WARM
        seconds = self._times[-1] - self._times[WARM] if timed > 0 else None
        none_sent = {"sent_bytes": None, "received_bytes": None}
        return {"timed_steps": max(0, timed), "seconds": seconds, **(self._found or self._memory() | none_sent)}

    def _memory(self) -> dict[str, int]:
        """Return peaks. On GPUs: torch's peak over all devices of this process. On a CPU: the growth of the process."""
        host = resident_memory().peak
        if self._device.type != "cuda":
            return {"peak_bytes": max(0, host - self._before), "host_bytes": host}
        devices = range(torch.cuda.device_count())
        return {"peak_bytes": max(torch.cuda.max_memory_allocated(n) for n in devices), "host_bytes": host}

    def _wire(self) -> dict[str, int | None]:
        """Return the bytes sent and received by connections that existed during all timed steps. None on GPUs.

        NCCL's traffic cannot be counted this way.
        """
        if self._device.type == "cuda":
            return {"sent_bytes": None, "received_bytes": None}
        both = [(self._flows[name], flow) for name, flow in flows().items() if name in self._flows]
        return {
            "sent_bytes": sum(now.written - then.written for then, now in both),
            "received_bytes": sum(now.received - then.received for then, now in both),
        }


def _forget_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
    forget_resident_peak()


class GanPair(nn.Module):
    """A DCGAN pair as one model with one loss, so every strategy can train it.

    Inputs are images with planes of noise appended (batch, channels + planes, size, size). The output is a loss per
    sample (batch,). Both networks step at once. The discriminator's loss has no gradient for the generator. The
    generator's loss has no gradient for the discriminator's weights.
    """

    def __init__(self, pair: DCGAN, channels: int):
        super().__init__()
        self.pair, self.channels = pair, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both losses of each sample."""
        real, noise = x[:, : self.channels], x[:, self.channels :].flatten(1)[:, : self.pair.generator.latent_size]
        fake, judge = self.pair.generator(noise[:, :, None, None]), self.pair.discriminator
        fixed = {name: value.detach() for name, value in judge.named_parameters()}
        fooled = functional_call(judge, fixed, (fake,))
        return _judged(judge(real), 1.0) + _judged(judge(fake.detach()), 0.0) + _judged(fooled, 1.0)


def noise_planes(latent_size: int, size: int) -> int:
    """Return the number of planes of size x size that a latent vector needs."""
    return -(-latent_size // size**2)


def _judged(logits: Tensor, truth: float) -> Tensor:
    target = torch.full_like(logits, truth)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").flatten()
