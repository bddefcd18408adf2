"""The task of every strategy: the same weights, samples, order, optimizer and loss.

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

from zerofit.compare.job import MOMENTUM, WARM, CompareJob, RankReport
from zerofit.data.base import Integers
from zerofit.data.hashing import sample_hashes
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.batch_norm import batch_norms
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.models.layers import Layer, as_layers
from zerofit.models.vision import DCGAN
from zerofit.spec.events import Reporter
from zerofit.spec.files import write_text
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.process import Flow, flows, forget_resident_peak, resident_memory
from zerofit.train.probe import task_of

EVAL_BATCH = 100
PROGRESS_EVERY_S = 0.5
MAX_STATES = 50  # copies of the weights that are stored for the accuracy curve
RANDOM = ("_DropoutNd", "StochasticDepth")  # layers of torch and torchvision that draw random numbers in training
PACE_S = 0.05  # step of an even rank: long enough that this machine's cores do not matter
STRAGGLER = 5.0  # factor on the time of a step that straggles
NOISE_EVERY = 8  # steps between measurements of the gradient's noise


class NotHereError(Exception):
    """Raised if devices, model or installation do not support a strategy, with the reason."""


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
        self._progress, self._progress_at = (folder / "done" if rank == 0 else None), 0.0
        self._states: list[tuple[float, float, dict[str, Tensor]]] = []  # step, time in seconds, weights
        self._meter = StrategyMeter(self.device)
        self.epochs = Epochs()

    @property
    def devices(self) -> list[torch.device]:
        """The devices that one process can drive."""
        if self.job.accelerator != "cuda":
            return [self.device]
        return [torch.device("cuda", n) for n in range(min(self.job.ranks, torch.cuda.device_count()))]

    def model(self) -> nn.Module:
        """Return the model on this process's device, with initial weights equal in all processes."""
        self._model = self._full_model().to(self.device)
        return self._model

    def _full_model(self) -> nn.Module:
        torch.manual_seed(self.job.seed)
        model = build(find(self.job.model), self._data.inputs, dict(self.job.model_args))
        config = getattr(model, "config", None)
        if config is not None:
            config.use_cache = False
        # Strategies would draw different random numbers, so dropout is off.
        for module in model.modules():
            if any(kind.__name__ in RANDOM for kind in type(module).__mro__):
                setattr(module, "p", 0.0)  # noqa: B010 - torch declares no such attribute for all modules
        # A GAN has two networks and two losses. As one model with one loss it needs no change in the strategies.
        if self.task == "gan":
            assert isinstance(model, DCGAN) and isinstance(self._data.inputs, ImageInputs)  # the catalog's only GAN
            model = GanPair(model, self._data.inputs.channels)
        return model.train()

    def stage(self, number: int, stages: int) -> LayerStage:
        """Return the layers of stage `number` of `stages` stages with similar numbers of parameters.

        Raises NotHereError.
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
        """Return SGD with momentum."""
        # Adam would amplify the rounding differences between strategies.
        self._optimizer = torch.optim.SGD(parameters, lr=self.job.lr, momentum=MOMENTUM)
        return self._optimizer

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean loss over a batch."""
        if self.task == "gan":
            return output.mean()
        # Divide by the number of all targets, ignored ones too: so the losses of equal parts of a batch average to
        # the loss of the batch.
        logits = getattr(output, "logits", output)
        logits = logits.reshape(-1, logits.shape[-1]).float()
        total = functional.cross_entropy(logits, target.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")
        return total / target.numel()

    def batches(self, share: int = 0, of: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of one of `of` equal shares of every global batch."""
        if self.job.phases:
            yield from self.epochs.batches(self, self._model, self._optimizer, share, of)
            return
        size = self.job.global_batch // of
        try:
            for step in range(self.job.steps):
                self._meter.step(step, last=False)
                self.progress(f"{step} of {self.job.steps} steps")
                time.sleep(pause_s(self.job, self.rank, step))
                yield self.batch(step * self.job.global_batch + share * size, size)
        finally:  # also if a strategy stops early
            self._meter.step(self.job.steps, last=True)

    def batch(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` samples from index `start` of the shuffled order."""
        indices, keys = self._order.indices(start, start + size), self._order.keys(start, start + size)
        batch = self._data.train.batch(indices, keys)
        if isinstance(self._data.inputs, TextInputs):
            self.notes["tokens_a_sample"] = batch["inputs"].shape[1]
        return self._inputs(batch["inputs"], keys).to(self.device), batch["labels"].to(self.device)

    def _inputs(self, x: Tensor, keys: Integers) -> Tensor:
        """Return the model's inputs: the samples, and a GAN's noise from the samples' keys."""
        if self.task != "gan":
            return x
        latent, size = self.job.model_args.get("latent_size", 100), x.shape[-1]
        # as many planes as the latent vector needs; `GanPair` drops the rest of the last one
        shape = (math.ceil(latent / size**2), size, size)
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
    def evaluate(self, model: nn.Module, indices: range | None = None) -> dict[str, float | None]:
        """Return mean loss and accuracy on the validation samples at these indices (None: all)."""
        was_training, total, targets, correct = model.training, 0.0, 0, 0
        model.eval()
        indices = range(self.eval_samples) if indices is None else indices
        for start in range(0, len(indices), EVAL_BATCH):
            self.progress(f"evaluated {start} of {len(indices)} samples")
            part = indices[start : start + EVAL_BATCH]
            batch = self._data.valid.batch(part, part)
            x, y = self._inputs(batch["inputs"], part).to(self.device), batch["labels"].to(self.device)
            output = model(x)
            if self.task == "gan":
                total, targets = total + float(output.sum()), targets + len(output)
                continue
            real, logits = y != IGNORE_INDEX, getattr(output, "logits", output)
            total += float(self.loss(output, y)) * y.numel()
            targets += int(real.sum())
            correct += int((logits.argmax(-1) == y)[real].sum())
        model.train(was_training)
        loss = total / targets
        accuracy = None if self.task == "gan" else correct / targets
        return {"loss": loss if math.isfinite(loss) else None, "accuracy": accuracy}

    def keep(self, model: nn.Module, steps: float) -> None:
        """Store the weights and the time after `steps` global batches, for `curve`.

        Stores only some of the steps, at regular intervals. Does nothing without a target accuracy.
        """
        # Of a model with batch norm, only the workers have the running statistics.
        if self.job.target is None or steps % max(1, self.job.steps // MAX_STATES) or batch_norms(model):
            return
        self._states.append((steps, time.perf_counter(), state_on_cpu(model)))

    def curve(self) -> list[dict[str, object]]:
        """Return step, seconds since the first stored step, loss and accuracy of all stored weights."""
        model, points = self.model(), []
        for steps, moment, state in self._states:
            model.load_state_dict(state)
            points.append({"steps": steps, "seconds": moment - self._states[0][1], **self.evaluate(model)})
        return points

    def progress(self, text: str) -> None:
        """Write the progress of rank 0 to its file; other ranks do nothing."""
        # If the file does not change for minutes, the command assumes that the process is dead.
        if self._progress and time.monotonic() - self._progress_at > PROGRESS_EVERY_S:
            self._progress_at = time.monotonic()
            write_text(self._progress, text)

    def measurements(self) -> RankReport:
        """Return the measurements of this process."""
        return {**self._meter.measurements(), **self.notes}


def pause_s(job: CompareJob, rank: int, step: int) -> float:
    """Return the seconds that a rank waits before a step; 0 if no rank is slowed."""
    if not job.slow and not job.straggle:
        return 0.0
    # Only seed, rank and step decide which steps are slow, so every strategy has the same slow steps.
    drawn = float(sample_hashes([step], (job.seed << 20) + rank)[0]) / 2.0**64
    return PACE_S * job.slow.get(str(rank), 1.0) * (STRAGGLER if drawn < job.straggle else 1.0)


class LayerStage(nn.Sequential):
    """Consecutive layers of a model."""

    def __init__(self, layers: Sequence[Layer]):
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
    """Return the start and the exclusive stop of consecutive parts with nearly equal sums.

    No part is empty. Raises NotHereError if there are fewer layers with parameters than parts.
    """
    cuts, total, filled = [0], sum(sizes), sum(size > 0 for size in sizes)
    if filled < parts:
        raise NotHereError(f"{filled} layers with parameters are too few for {parts} stages")
    # Greedy: the boundary after part k goes where the sum of sizes is nearest to k / parts of the total, among the
    # places that leave at least one layer with parameters for this part and for each later one.
    for part in range(1, parts):
        possible = [
            n
            for n in range(cuts[-1] + 1, len(sizes))
            if sum(sizes[cuts[-1] : n]) > 0 and sum(size > 0 for size in sizes[n:]) >= parts - part
        ]
        cuts.append(min(possible, key=lambda n: abs(sum(sizes[:n]) - total * part / parts)))
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))


# What is measured where, so that strategies are comparable:
#
#     time      from step WARM to the last; a request for the next batch means that a step is done
#     memory    the peak since step WARM: torch's allocator on GPUs, the kernel's VmHWM on CPUs
#     traffic   the kernel's byte counts of each TCP connection that existed at step WARM (gloo; not NCCL)
class StrategyMeter:
    """Time, memory and network bytes of one process, from before its model to its last step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: list[float] = []
        self._flows: dict[str, Flow] = {}
        self._memory_and_traffic: RankReport = {}
        _forget_peaks(device)
        self._before = resident_memory().now

    def step(self, done: int, last: bool) -> None:
        """Record the time after `done` steps. After the last step, also record memory and traffic."""
        # Kernels run asynchronously. Without this only the time to issue them would be measured.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if done == WARM:
            self._flows = flows()
            _forget_peaks(self._device)  # exclude building the model and the first step's extra memory
        if last:
            self._memory_and_traffic = {**self._memory(), **self._traffic()}

    def measurements(self) -> RankReport:
        """Return the figures for the strategy's row; `seconds` is None without timed steps."""
        timed = len(self._times) - 1 - WARM
        seconds = self._times[-1] - self._times[WARM] if timed > 0 else None
        # A process that took no last step, such as a parameter server, counts no traffic.
        no_traffic = {"sent_bytes": None, "received_bytes": None}
        figures = self._memory_and_traffic or self._memory() | no_traffic
        return {"timed_steps": max(0, timed), "seconds": seconds, **figures}

    def _memory(self) -> dict[str, int]:
        """Return the peak of the device's memory and of the process's host memory, in bytes."""
        host = resident_memory().peak
        # On a CPU the strategy's memory is the growth of the process.
        if self._device.type != "cuda":
            return {"peak_bytes": max(0, host - self._before), "host_bytes": host}
        devices = range(torch.cuda.device_count())
        return {"peak_bytes": max(torch.cuda.max_memory_allocated(n) for n in devices), "host_bytes": host}

    def _traffic(self) -> dict[str, int | None]:
        """Return the bytes sent and received by connections that existed during all timed steps."""
        # NCCL's traffic cannot be counted this way.
        if self._device.type == "cuda":
            return {"sent_bytes": None, "received_bytes": None}
        connections = [(self._flows[name], flow) for name, flow in flows().items() if name in self._flows]
        return {
            "sent_bytes": sum(now.written - then.written for then, now in connections),
            "received_bytes": sum(now.received - then.received for then, now in connections),
        }


def _forget_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
    forget_resident_peak()


class GanPair(nn.Module):
    """A DCGAN pair as one model with one loss, so every strategy can train it.

    Inputs are images with planes of noise appended (batch, channels + planes, size, size). The output is a loss per
    sample (batch,). Both networks step at once.
    """

    def __init__(self, pair: DCGAN, channels: int):
        super().__init__()
        self.pair, self.channels = pair, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both losses of each sample."""
        real, noise = x[:, : self.channels], x[:, self.channels :].flatten(1)[:, : self.pair.generator.latent_size]
        fake, discriminator = self.pair.generator(noise[:, :, None, None]), self.pair.discriminator
        # The discriminator's loss has no gradient for the generator, because its fake images are detached. The
        # generator's loss has none for the discriminator, because that one's weights are detached.
        weights = {name: value.detach() for name, value in discriminator.named_parameters()}
        generator_loss = _real_or_fake_loss(functional_call(discriminator, weights, (fake,)), 1.0)
        real_loss = _real_or_fake_loss(discriminator(real), 1.0)
        return real_loss + _real_or_fake_loss(discriminator(fake.detach()), 0.0) + generator_loss


def _real_or_fake_loss(logits: Tensor, truth: float) -> Tensor:
    """Return the loss per sample of logits that should be real (1.0) or fake (0.0)."""
    target = torch.full_like(logits, truth)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").flatten()


class Epochs:
    """The epochs of one process. The first rank evaluates after each epoch, which is not timed."""

    def __init__(self) -> None:
        self._noise = Noise()
        self._curve: list[dict[str, object]] = []

    def batches(
        self, work: BenchmarkTask, model: nn.Module, optimizer: torch.optim.Optimizer, share: int, of: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of one of `of` equal shares of every batch, phase by phase."""
        seconds, step, start, epoch = 0.0, 0, 0, 0
        epochs = sum(count for count, _, _ in work.job.phases)
        for count, batch, lr in work.job.phases:
            optimizer.param_groups[0]["lr"] = lr
            for _ in range(count):
                epoch += 1
                # An epoch ends with the step that completes it. The number of samples therefore exceeds full epochs by
                # less than one batch, at any batch size.
                while start < epoch * work.samples:
                    x, y = work.batch(start + share * (batch // of), batch // of)
                    measured = of == 1 and step % NOISE_EVERY == 0
                    if measured:
                        self._noise.of_half(work, model, x, y)
                    began = _now(work)
                    yield x, y
                    seconds += _now(work) - began
                    if measured:
                        self._noise.of_whole(model)
                    start, step = start + batch, step + 1
                    work.progress(f"epoch {epoch} of {epochs}, step {step}")
                if work.rank == 0:
                    progress = {"epoch": epoch, "steps": step, "samples": start, "seconds": seconds}
                    self._curve.append({**progress, **self._scores(work, model)})

    def _scores(self, work: BenchmarkTask, model: nn.Module) -> dict[str, float | None]:
        """Return loss and accuracy on the validation samples, and a test accuracy."""
        # Every second validation sample is reserved for the test accuracy, which must not influence the choice of an
        # epoch or a batch size.
        count = work.eval_samples
        test = work.evaluate(model, range(1, count, 2))["accuracy"] if count > 1 else None
        return {**work.evaluate(model, range(0, count, 2)), "test_accuracy": test}

    def measurements(self) -> RankReport:
        """Return the figures after each epoch and the noise scale; {} on all ranks but the first."""
        return {"curve": self._curve, "noise_scale": self._noise.scale} if self._curve else {}


def _now(work: BenchmarkTask) -> float:
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter()


class Noise:
    """The simple noise scale: the batch size at which a gradient's noise equals the gradient.

    It is computed from the gradient's squared norms over a full batch and over half a batch. Both norms are averaged
    over many steps. The source is McCandlish, Kaplan, Amodei and others, "An Empirical Model of Large-Batch Training"
    (2018), appendix A.1.
    """

    def __init__(self) -> None:
        self._half, self._whole, self._sizes = list[float](), list[float](), (0, 0)

    def of_half(self, work: BenchmarkTask, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Measure the gradient over the first half of a batch."""
        half = len(x) // 2
        if half == 0:
            return
        norms = batch_norms(model)
        # The extra forward must not change running statistics, or measuring would change the training.
        for module in norms:
            module.track_running_stats = False
        model.zero_grad()
        work.loss(model(x[:half]), y[:half]).backward()
        for module in norms:
            module.track_running_stats = True
        self._half.append(_squared_norm(model))
        self._sizes = (half, len(x))

    def of_whole(self, model: nn.Module) -> None:
        """Measure the gradient over the full batch, after its backward."""
        # only for a batch of which `of_half` has measured half
        if len(self._whole) < len(self._half):
            self._whole.append(_squared_norm(model))

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None if noise hides the gradient, or if nothing was measured."""
        if not self._whole:
            return None
        small, large = self._sizes
        of_small, of_large = (sum(values) / len(values) for values in (self._half, self._whole))
        # A gradient over B samples has the expected squared norm |G|^2 + tr(S) / B, with the true gradient G and the
        # covariance S of one sample's gradient. Two batch sizes give both unknowns; the noise scale is tr(S) / |G|^2.
        squared = (large * of_large - small * of_small) / (large - small)  # of the true gradient
        spread = (of_small - of_large) / (1 / small - 1 / large)  # trace of the covariance of one sample's gradient
        scale = spread / squared if squared > 0 else math.inf
        return scale if 0 < scale < math.inf else None


def _squared_norm(model: nn.Module) -> float:
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
