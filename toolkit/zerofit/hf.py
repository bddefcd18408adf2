"""Tools for the Hugging Face Trainer: simulate its training, and watch it with callbacks.

    args = TrainingArguments(..., deepspeed="ds.json")
    zf.hf.simulate("llama-3.2-1b", args, zf.Cluster("h100-80gb", gpus=8), seq_len=2048)
    trainer = Trainer(model, args, callbacks=[zf.hf.HangWatch(), zf.hf.NanReport()])

This module imports transformers and torch; `import zerofit` does not.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.hooks import RemovableHandle
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import (
    HfTrainerDeepSpeedConfig,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from zerofit.app.job.resolve import ASSUMED_STEPS
from zerofit.app.simulation.runs import simulate as simulate_run
from zerofit.check.dotted import autos, get
from zerofit.config.decide import precision_of
from zerofit.config.ds_json import read_document
from zerofit.features.optimizers import ENTRIES
from zerofit.models.catalog import ModelError, find
from zerofit.simulate.forecast.result import Simulation
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import cache_root, write_json, write_text
from zerofit.spec.process import resident_memory
from zerofit.spec.run import Run

OPTIMIZERS = {name: entry.name for entry in ENTRIES for name in entry.trainer_names}
RECENT_BATCHES = 64  # batches whose indices are kept: more than loader processes prefetch


# --- the Trainer's training as a run ---


def run_of(
    model: str | PretrainedConfig | PreTrainedModel,
    args: TrainingArguments,
    cluster: Cluster,
    *,
    seq_len: int | None = None,
    on_event: OnEvent | None = None,
) -> Run:
    """Return the run of the Trainer's training, with one rank per device of the cluster.

    Args:
        model: a name known to zerofit or transformers, a folder, a config, or a model.
        args: the Trainer's batch, accumulation, precision, checkpointing, optimizer, steps and DeepSpeed JSON.
        cluster: the devices of the ranks. `args.world_size` is ignored, since it describes this process.
        seq_len: tokens per sample; the Trainer's arguments do not contain this number.
        on_event: gets notes about assumptions.

    Raises UserError with all settings that the Trainer would refuse or zerofit cannot simulate.
    """
    problems, report = Problems(), Reporter(on_event)
    name, config = _named_model(model)
    if args.fsdp:
        message = "args.fsdp is set, but zerofit simulates only DeepSpeed here"
        problems.add("trainer", message, "set args.deepspeed instead", "args.fsdp")
    written = _deepspeed_json(args, report)
    # Without max_steps the Trainer computes the steps from the data set, which is not an argument.
    steps = args.max_steps if args.max_steps > 0 else ASSUMED_STEPS  # only for the schedule
    if get(written, "expert_parallel.enabled") is True:
        message = "expert_parallel in args.deepspeed: AutoEP would replace the Trainer's layers"
        problems.add("trainer", message, "use `zerofit simulate MODEL --expert-parallel N`", "args.deepspeed")
    # The JSON's own "auto" is filled in by transformers below. Only degrees that are numbers become fields of the run.
    degrees = {
        "tensor_parallel": written.get("tensor_parallel", {}).get("autotp_size"),
        "sequence_parallel": written.get("sequence_parallel_size"),
    }
    fields: dict[str, Any] = {key: degree for key, degree in degrees.items() if isinstance(degree, int) and degree > 1}
    if seq_len is not None:
        fields["seq_len"] = seq_len
    if "optimizer" not in written:  # then the Trainer creates the one of its arguments
        optimizer = str(getattr(args.optim, "value", args.optim))
        if optimizer not in OPTIMIZERS:
            hint = f"use {', '.join(OPTIMIZERS)}, or an optimizer block in the DeepSpeed JSON"
            problems.add("trainer", f"args.optim {optimizer} cannot be simulated", hint, "args.optim")
        fields["optimizer"] = OPTIMIZERS.get(optimizer)
    filled = problems.attempt(lambda: _with_autos_filled(written, args, config, cluster.ranks, steps))
    problems.raise_if_any()
    assert filled is not None
    if precision_of(None, filled)[0] == "auto":
        fields["precision"] = "fp32"  # as the Trainer trains by default
    # renamed in transformers 5.23
    recompute = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", False)
    return Run(
        model=name,
        ds_config=filled,
        ranks=cluster.ranks,
        micro_batch=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        activation_checkpointing=bool(recompute),
        steps=steps,
        **fields,
    )


def simulate(
    model: str | PretrainedConfig | PreTrainedModel,
    args: TrainingArguments,
    cluster: Cluster | None = None,
    *,
    seq_len: int | None = None,
    exact: bool = False,
    on_event: OnEvent | None = None,
) -> Simulation:
    """Simulate the Trainer's training (see `run_of`) without allocating the model or using GPUs.

    >>> from transformers import LlamaConfig, TrainingArguments
    >>> import zerofit as zf
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
    ...                      num_attention_heads=4, max_position_embeddings=64, eos_token_id=2)
    >>> args = TrainingArguments(per_device_train_batch_size=2, use_cpu=True)
    >>> zf.hf.simulate(config, args, zf.Cluster("l4", gpus=2), seq_len=16).fits
    True
    """
    cluster = cluster or Cluster.here()
    run = run_of(model, args, cluster, seq_len=seq_len, on_event=on_event)
    return simulate_run(run, cluster, exact=exact, on_event=on_event)


def _named_model(model: str | PretrainedConfig | PreTrainedModel) -> tuple[str, PretrainedConfig | None]:
    """Return a model name for zerofit and the model's transformers config. Raises UserError."""
    if isinstance(model, str):
        try:
            source = find(model)
            if source.family != "transformers":
                return model, None
            from zerofit.models.hf_config import make_config

            return model, make_config(source, None, {})
        except ModelError as error:
            if error.kind != "unknown-model":
                raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint)) from None
            try:
                model = AutoConfig.from_pretrained(model)
            except (OSError, ValueError) as reason:
                message = f"{error.message}; and transformers: {str(reason).splitlines()[0]}"
                raise UserError(Problem(kind=error.kind, message=message, hint=error.hint)) from None
    config = model
    if isinstance(model, PreTrainedModel):
        config = model.config
        # Without this name, a config does not determine the model's class: it may be a head or a bare encoder.
        config.architectures = config.architectures or [type(model).__name__]
    assert isinstance(config, PretrainedConfig)
    text = config.to_json_string(use_diff=False)
    # named by its content, since it is read again to simulate changes
    file = cache_root() / "hf" / hashlib.sha256(text.encode()).hexdigest()[:20] / "config.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    return str(file), config


def _deepspeed_json(args: TrainingArguments, report: Reporter) -> dict[str, Any]:
    """Return the user's DeepSpeed JSON, or a minimal one if there is none. Raises UserError."""
    if isinstance(args.deepspeed, dict):
        return args.deepspeed
    if args.deepspeed:
        return dict(read_document(Path(str(args.deepspeed)), where="args.deepspeed").config)
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    words = f" with autocast to {precision}" if precision else ""
    report.note(f"args.deepspeed is not set: simulating ZeRO stage 0{words}")
    plain: dict[str, object] = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto"}
    if precision:
        plain["torch_autocast"] = {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision]}
    return plain


class _AsOnCluster:
    """The Trainer's arguments, with the world size of the cluster instead of this process's."""

    def __init__(self, args: TrainingArguments, ranks: int):
        self._args, self.world_size = args, ranks

    def __getattr__(self, name: str) -> object:
        return getattr(self._args, name)


def _with_autos_filled(
    written: dict[str, object], args: TrainingArguments, config: PretrainedConfig | None, ranks: int, steps: int
) -> dict[str, Any]:
    """Return the JSON with "auto" filled by transformers.

    Raises UserError if the JSON and the arguments disagree.
    """
    # HfDeepSpeedConfig.__init__ registers the new object for the whole process (set_hf_deepspeed_config).
    # `from_pretrained` would then build the model with the cluster's JSON, so the user's config is restored in the end.
    own_config = getattr(args, "hf_deepspeed_config", None)
    try:
        filler = HfTrainerDeepSpeedConfig(written)
        cluster_args = _AsOnCluster(args, ranks)
        filler.trainer_config_process(cluster_args)
        filler.trainer_config_finalize(cluster_args, SimpleNamespace(config=config), steps)  # only reads model.config
        if unfilled := list(autos(filler.config)):
            raise ValueError(f'{", ".join(unfilled)} is "auto", and the Trainer does not fill it in')
        return dict(filler.config)
    except ValueError as error:
        hint = 'write "auto" where the Trainer has an argument, and values elsewhere'
        problem = Problem(kind="trainer", message=str(error), hint=hint, where="args.deepspeed")
        raise UserError(problem) from None
    finally:
        if own_config is not None:
            set_hf_deepspeed_config(own_config)
        else:
            unset_hf_deepspeed_config()


# --- callbacks ---


def _folder(chosen: Path | str | None, args: TrainingArguments) -> Path:
    folder = Path(chosen or args.output_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class MemoryAgainstForecast(TrainerCallback):
    """Compares the memory of this rank with a forecast. Warns once if it exceeds the forecast.

    `forecast` is a simulation or a number of bytes. `measured_bytes` is torch's peak allocation on this rank's GPU.
    On a CPU it is the growth of the process since this callback was created, without pages of files. So create the
    callback before the model.
    """

    def __init__(self, forecast: Simulation | int, *, tolerance: float = 0.05):
        self.forecast_bytes = forecast if isinstance(forecast, int) else forecast.peak_bytes
        self.tolerance = tolerance
        self.measured_bytes = 0
        self._before, self._warned = resident_memory().without_files, False

    @property
    def ratio(self) -> float:
        """The ratio of measured to forecast memory."""
        return self.measured_bytes / self.forecast_bytes

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure after each step and micro batch, and warn if the forecast is exceeded."""
        if args.device.type == "cuda":
            # a peak; on a CPU, only the memory between steps is seen
            now = torch.cuda.max_memory_allocated(args.device)
        else:
            now = resident_memory().without_files - self._before
        self.measured_bytes = max(self.measured_bytes, now)
        if self.ratio > 1 + self.tolerance and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {args.process_index} used {self.measured_bytes:,} bytes by step {state.global_step}, "
                f"{self.ratio - 1:.0%} more than the forecast of {self.forecast_bytes:,}",
                stacklevel=2,
            )

    on_substep_end = on_step_end


@dataclass(frozen=True, kw_only=True)
class NanFinding:
    """A loss that is not finite, and its batch."""

    step: int  # optimizer steps before this loss
    micro_batch: int  # forward passes of this rank before this loss
    rank: int
    loss: str  # "nan", "inf" or "-inf", which JSON does not have
    indices: list[int] | None  # of the samples in the training set; None if unknown
    batch_file: str  # the batch, for torch.load
    shapes: dict[str, list[int]]


class NanReport(TrainerCallback):
    """Reports the first loss that is NaN or infinite, and saves its batch and sample indices.

    Writes `nan-rank-R.json` and `nan-rank-R.pt` into `folder` (default: `args.output_dir`) and warns. If `stop` is
    true, it also stops the training. Sample indices are unknown for an IterableDataset.
    """

    def __init__(self, folder: Path | str | None = None, *, stop: bool = False):
        self.folder, self.stop = folder, stop
        self.finding: NanFinding | None = None
        self._drawn: _RecordedBatches | None = None
        self._losses: list[tuple[int, torch.Tensor, dict[str, object]]] = []  # of this step: number, loss, batch
        self._count = 0
        self._hook: RemovableHandle

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        train_dataloader: object = None,
        **_: object,
    ) -> None:
        """Start to record the model's losses and the loader's indices."""
        assert model is not None  # the Trainer passes it to every callback
        self._count, self._losses = 0, []
        self._hook = model.register_forward_hook(self._forward, with_kwargs=True)
        # Loader processes and accelerate fetch batches ahead of the forward, so the order of drawing identifies a
        # batch.
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # accelerate wraps torch's loader
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is not None and state.global_step == 0:  # a resumed run gets another loader
            self._drawn = _RecordedBatches(sampler)
            loader.__dict__["batch_sampler"] = self._drawn  # torch refuses a plain assignment

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop recording."""
        self._hook.remove()

    def _forward(self, module: torch.nn.Module, args: object, batch: dict[str, object], output: object) -> None:
        if module.training and self.finding is None:
            loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", None)
            if isinstance(loss, torch.Tensor):
                # read at the end of the step: reading it here would wait for the device
                self._losses.append((self._count, loss.detach(), batch))
            self._count += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Check the losses of the forward passes since the last call."""
        # The Trainer calls this after an optimizer step, and as on_substep_end after each other micro batch.
        losses, self._losses = self._losses, []
        for number, loss, batch in losses:
            value = float(loss.float().sum())
            if not math.isfinite(value) and self.finding is None:
                self.finding = self._save(args, number, value, batch)
                samples = self.finding.indices if self.finding.indices is not None else "unknown"
                warnings.warn(
                    f"rank {self.finding.rank}: the loss is {value} at step {self.finding.step}; samples {samples}, "
                    f"batch in {self.finding.batch_file}",
                    stacklevel=2,
                )
                control.should_training_stop |= self.stop

    on_substep_end = on_step_end

    def _save(self, args: TrainingArguments, number: int, loss: float, batch: dict[str, object]) -> NanFinding:
        stem = _folder(self.folder, args) / f"nan-rank-{args.process_index}"
        tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        torch.save(tensors, f"{stem}.pt")
        finding = NanFinding(
            step=number // args.gradient_accumulation_steps,
            micro_batch=number,
            rank=args.process_index,
            loss=str(loss),
            indices=self._drawn.indices(number) if self._drawn else None,
            batch_file=f"{stem}.pt",
            shapes={name: list(value.shape) for name, value in tensors.items()},
        )
        write_json(Path(f"{stem}.json"), asdict(finding))
        return finding


class _RecordedBatches:
    """A batch sampler that remembers the indices of its last batches."""

    def __init__(self, sampler: BatchSampler):
        self._sampler, self._drawn = sampler, 0
        self._recent: deque[tuple[int, list[int]]] = deque(maxlen=RECENT_BATCHES)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            self._recent.append((self._drawn, list(batch)))
            self._drawn += 1
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)

    def indices(self, number: int) -> list[int] | None:
        """Return the indices of batch `number` since training began; None if no longer stored."""
        return next((indices for n, indices in self._recent if n == number), None)


class HangWatch(TrainerCallback):
    """Writes the stacks of all threads to a file and warns if no step has ended for `seconds`.

    The file is `hang-rank-R.txt` in `folder` (default: `args.output_dir`). Evaluation and saving count as progress only
    at their end. Use a larger `seconds` if they take long.
    """

    def __init__(self, seconds: float = 600.0, *, folder: Path | str | None = None):
        self.seconds, self.folder = seconds, folder
        self.file: Path | None = None  # set after a hang
        self._progress, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start watching."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, args=(args,), name="zerofit-hang-watch", daemon=True)
        self._thread.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop watching."""
        self._ended.set()
        self._progress.set()  # wakes the thread
        if self._thread:
            self._thread.join()

    def _mark(self, *_: object, **__: object) -> None:
        self._progress.set()

    on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = _mark

    def _watch(self, args: TrainingArguments) -> None:
        reported = False
        while not self._ended.is_set():
            # The wait returns false only after the full time without progress: then no step has ended.
            if self._progress.wait(self.seconds):
                self._progress.clear()
                reported = False
            elif not reported:  # one report for each hang: the next needs progress in between
                reported = True
                self._report(args)

    def _report(self, args: TrainingArguments) -> None:
        self.file = _folder(self.folder, args) / f"hang-rank-{args.process_index}.txt"
        with self.file.open("a", encoding="utf-8") as file:
            words = f"rank {args.process_index}, process {os.getpid()}: no step has ended for {self.seconds:.0f} s"
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        warnings.warn(f"{words}; the stacks of all threads are in {self.file}", stacklevel=2)
