"""One rank of one contender: `contenders.py NAME PLAN.json`, started by the deepspeed launcher.

All of them train the same model from the same weights with the same DeepSpeed JSON on the same micro batches, with a
learning rate that falls linearly from step to step. They differ in who wrote the loop.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from turns import Player, Turn

from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.models.build import build, parameter_groups
from zerofit.models.catalog import find
from zerofit.models.inputs import Inputs
from zerofit.spec.events import Reporter
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.callbacks import Callback
from zerofit.train.process_group import start, stop
from zerofit.train.run import RankRun

LOG_EVERY = 10  # steps between the lines that the hand-written loop, Accelerate's and the Trainer write
Batch = dict[str, Tensor]


class Stream(Dataset):
    """All samples of the run in the order in which it sees them, as two tensors: the cheapest loader there is."""

    def __init__(self, job: Job):
        data = open_data(job.run, job.facts.task, job.run.seq_len, Reporter())
        order, count = Order(len(data.train), job.run.seed), job.steps * job.batch.total
        samples = data.train.batch(order.indices(0, count).tolist(), order.keys(0, count).tolist())
        self.inputs: Inputs = data.inputs
        self._x, self._labels = samples["inputs"], samples["labels"]
        self._name = ""

    def feed(self, model: nn.Module) -> nn.Module:
        """Give samples under the name that the model's forward has for them; return the model."""
        self._name = next(iter(inspect.signature(model.forward).parameters))
        return model

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, positions: list[int]) -> Batch:
        """A whole batch at once, instead of a list of samples that a collator would put together again."""
        return {self._name: self._x[positions], "labels": self._labels[positions]}


def as_it_is(batch: Any) -> Any:
    """The stream's batches are whole: nothing is put together."""
    return batch


def loading(job: Job) -> dict[str, Any]:
    """How the peers' loaders are set by who knows torch: on a GPU, images come ahead of it by way of pinned memory."""
    ahead = torch.cuda.is_available() and job.facts.task == "image"
    return {"num_workers": 4, "pin_memory": True} if ahead else {}


def make_model(job: Job, inputs: Inputs) -> nn.Module:
    """The weights that zerofit starts from."""
    torch.manual_seed(job.run.seed)
    model = build(find(job.run.model), inputs, dict(job.run.model_args))
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    return model.train()


def cross_entropy(output: Any, labels: Tensor, reduction: str = "mean") -> Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction=reduction)


def falling(job: Job) -> Any:  # DeepSpeed's annotation of such a function takes its own schedulers only
    return lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / job.steps)


def hand_written(job: Job, folder: RunFolder, player: Player) -> list[float]:
    """What one writes who knows DeepSpeed; the loss is read every LOG_EVERY steps."""
    stream, micro, rank = Stream(job), job.batch.micro, dist.get_rank()
    starts = range(rank * micro, len(stream), job.batch.total)
    samples = [list(range(s, s + micro)) for s in starts]
    loader = DataLoader(stream, batch_sampler=samples, collate_fn=as_it_is, **loading(job))
    model = stream.feed(make_model(job, stream.inputs))
    groups: Any = parameter_groups(model.parameters(), decay=False)  # DeepSpeed's annotation knows no groups
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=job.ds_config, lr_scheduler=falling(job)
    )
    losses = []
    for step, batch in enumerate(loader):
        player.step()
        batch = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        loss = cross_entropy(engine(**batch), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if step % LOG_EVERY == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f} lr {engine.get_lr()[0]:.2e}", flush=True)
    return torch.stack(losses).tolist()


class TakeTurns(Callback):
    """Waits for this contender's turn before each step."""

    def __init__(self, player: Player):
        self._player = player

    def on_step_begin(self, step: int) -> None:
        self._player.step()


def zerofit(job: Job, folder: RunFolder, player: Player) -> list[float] | None:
    """`zerofit.train.run.train` up to the last step, with its records in metrics.jsonl."""
    RankRun(job, folder, callbacks=[TakeTurns(player)]).loop.run()
    if dist.get_rank() != 0:
        return None
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def tell_accelerate() -> None:
    """The process group as it is: without a GPU, Accelerate under DeepSpeed would take each rank for the only one."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend=dist.get_backend())


def accelerate(job: Job, folder: RunFolder, player: Player) -> list[float]:
    """The loop of Accelerate's documentation with its DeepSpeed plugin; the loss is read every LOG_EVERY steps."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    tell_accelerate()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=job.ds_config))
    stream = Stream(job)
    model = stream.feed(make_model(job, stream.inputs))
    optimizer: Any = DummyOptim(parameter_groups(model.parameters(), decay=False), lr=job.run.lr or 0.0)
    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=falling(job))
    loader = DataLoader(stream, batch_size=job.batch.micro, collate_fn=as_it_is, **loading(job))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for step, batch in enumerate(loader):
        player.step()
        labels = batch.pop("labels")
        loss = cross_entropy(model(**batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % LOG_EVERY == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    return torch.stack(losses).tolist()


def trainer(job: Job, folder: RunFolder, player: Player) -> list[float]:
    """transformers.Trainer as it comes, with the same JSON; it logs every LOG_EVERY steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Pace(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            player.step()

    losses = []

    class Noting(Trainer):
        def training_step(self, *args: Any, **more: Any) -> Tensor:
            losses.append(super().training_step(*args, **more))
            return losses[-1]

    tell_accelerate()
    arguments = TrainingArguments(
        output_dir=str(folder.path / "trainer"),
        deepspeed=job.ds_config,
        per_device_train_batch_size=job.batch.micro,
        max_steps=job.steps,
        learning_rate=job.run.lr or 0.0,
        weight_decay=job.run.weight_decay or 0.0,
        max_grad_norm=job.run.gradient_clipping or 0.0,
        lr_scheduler_type="linear",
        logging_steps=LOG_EVERY,
        train_sampling_strategy="sequential",
        accelerator_config={"use_configured_state": True},
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=job.precision == "bf16",
        fp16=job.precision == "fp16",
        **{f"dataloader_{name}": value for name, value in loading(job).items()},
    )
    stream = Stream(job)
    own_loss = job.facts.task != "image"  # a transformers model has its own
    Noting(
        model=stream.feed(make_model(job, stream.inputs)),
        args=arguments,
        train_dataset=stream,
        data_collator=already_shifted if own_loss else as_it_is,
        compute_loss_func=None if own_loss else mean_of_all,
        callbacks=[Pace()],
    ).train()
    return torch.stack(losses).tolist()


def already_shifted(batch: Any) -> Any:
    """So that the model does not shift the labels once more."""
    return {**batch, "shift_labels": batch["labels"]}


def mean_of_all(output: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The loss as the Trainer wants it: it multiplies by the number of ranks itself."""
    return cross_entropy(output, labels, reduction="sum") / num_items_in_batch


CONTENDERS = {"hand-written": hand_written, "zerofit": zerofit, "accelerate": accelerate, "trainer": trainer}


def main() -> None:
    name, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    folder = RunFolder(Path(plan["run"]))
    player = Player(Path(plan["socket"]), name, Turn(**plan["turn"]), plan["turns"])
    start(timeout=timedelta(minutes=10))
    player.finish(CONTENDERS[name](Job.read(folder), folder, player))
    stop()


if __name__ == "__main__":
    main()
