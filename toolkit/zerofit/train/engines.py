"""Start the DeepSpeed engine. Define the trainer for every layout except the pipeline."""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from zerofit.check.dotted import get
from zerofit.config.recipe import warmup_steps
from zerofit.data.base import Data
from zerofit.data.loader import eval_batches
from zerofit.features.optimizers import has_weight_decay, of_json
from zerofit.models.build import batch_keys, forward_logits, forward_named, output_part, parameter_groups
from zerofit.models.checkpointing import keep_on_host
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs, NamedInputs
from zerofit.models.scores import (
    class_table,
    compared,
    one_a_sample,
    rouge_scores,
    squared_errors,
    tabled_classes,
    write_targets,
)
from zerofit.models.tiled_mlp import tile_mlps
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.mesh import RankCoords
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.train.averaging import AveragedWeights
from zerofit.train.build import build_from_seed, build_on_meta, build_whole, prepare_batch_norms, stored_by_engine
from zerofit.train.loss import counts, head_loss, weighted_cross_entropy
from zerofit.train.mesh_groups import MeshGroups, exchange_heads
from zerofit.train.optimizer import forget_states, own_optimizer
from zerofit.train.process_group import accelerator, rank_device
from zerofit.train.tensor_split import RouterBalance, build_split, build_spread
from zerofit.train.trainer import Batch, EngineTrainer, own_tokens
from zerofit.train.zero_layouts import Engine, check_attributes

SAMPLE_TOKENS, SAMPLE_S = 120, 10.0  # limits of a sample; each token runs one forward
PROMPT = "def "
TEMPERATURE = 0.7


def start_engine(job: Job, model: nn.Module, steps: int, **options: Any) -> Any:
    """Return a DeepSpeed engine with the run folder's JSON, unchanged, and the run's schedule."""
    run = job.run
    if "scheduler" not in job.ds_config:
        assert run.lr  # set in every job
        factor = partial(
            learning_rate_factor,
            total=steps,
            warmup=warmup_steps(run, steps),
            schedule=run.schedule,
            floor=min(1.0, run.min_lr / run.lr),
        )
        options["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, factor)
    # `keep_on_host` and `tile_mlps` change modules, so they come before DeepSpeed wraps or partitions the modules.
    if run.activation_offload:
        keep_on_host(model)  # DeepSpeed's cpu_checkpointing works only with its own checkpoint function
    if run.mlp_chunk:
        tile_mlps(model, run.mlp_chunk)
    # DeepSpeed's annotation does not allow groups
    groups: Any = parameter_groups(model.parameters(), has_weight_decay(job.ds_config))
    entry = of_json(get(job.ds_config, "optimizer.type"))
    # a compiled step needs Muon's compiled functions on a GPU
    if not (entry and entry.compiled and accelerator().device_name() != "cpu"):
        import_muon()
    if job.layout.tp > 1:
        _count_slices()
    if job.precision == "fp16" and job.layout.zero_stage == 0:
        _scale_losses()
    # All patches of DeepSpeed above have to be in place before `initialize`, which already calls the patched functions.
    options["optimizer"] = own_optimizer(job.ds_config, groups, accelerator().device_name() == "cpu")
    engine: Any = deepspeed.initialize(model=model, model_parameters=groups, config=job.ds_config, **options)[0]
    check_attributes(engine)
    if job.layout.zero_stage == 0 and job.precision == "fp32":
        _keep_gradient_norm(engine)
    elif job.layout.zero_stage == 0:
        _forget_dummy_step(engine)
    if job.precision == "fp16" and job.layout.zero_stage in (0, 3):
        _unscale_norm(engine.optimizer)
    if run.compile:
        engine.compile()
    return engine


def import_muon() -> None:
    """Import DeepSpeed's Muon. Its functions are compiled at their first call, never on CPUs."""
    # Every engine imports Muon. The functions' decorator, torch.compile, imports all of Inductor, which adds two
    # seconds to every start (runtime/zero/muon). On CPUs, a C++ compiler would run for 15 s in each rank.

    def compile_when_called(
        *args: object, **options: object
    ) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def decorate(function: Callable[..., object]) -> Callable[..., object]:
            if accelerator().device_name() == "cpu":
                return function
            compiled = cache(lambda: original(*args, **options)(function))
            return wraps(function)(lambda *inputs, **kwargs: compiled()(*inputs, **kwargs))

        return decorate

    original = compiler.compile
    with patch.object(compiler, "compile", compile_when_called):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def learning_rate_factor(step: int, *, total: int, warmup: int, schedule: str, floor: float) -> float:
    """Return the learning rate at a step (from 0), as a factor of the peak rate.

    Cosine and linear schedules approach `floor`, which step `total` would have.
    """
    # A step with rate 0 would be wasted. So the first step already has 1/(warmup + 1) of the peak, and the last step
    # (total - 1) stays above the floor.
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * shape


def _forget_dummy_step(engine: Engine) -> None:
    """Undo the step on zero gradients with which 16-bit optimizers without ZeRO allocate states."""
    # Adam counts this dummy step as its first step, so bias correction makes the first real steps too small. The dummy
    # step also applies weight decay to the master weights once (runtime/fp16/unfused_optimizer.py:425,
    # fused_optimizer.py:125).
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp16_groups"):
        return  # the BF16_Optimizer of a pipeline takes no such step
    forget_states(optimizer.optimizer)
    for group in optimizer.optimizer.param_groups:
        group.pop("step", None)  # FusedAdam's step counter
    if hasattr(optimizer, "fp32_groups_flat"):
        pairs = list(zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True))
    else:
        groups = zip(optimizer.fp16_groups, getattr(optimizer, "fp32_groups", []), strict=False)
        pairs = [pair for low, high in groups for pair in zip(low, high, strict=True)]
    for low, master in pairs:
        master.data.copy_(low.data)


# The functions from here to `_keep_gradient_norm` repair gradients and norms of DeepSpeed 0.19.8. Each names the line
# of DeepSpeed that requires it. tests/train/test_agreement.py compares the results with plain torch.
@cache
def _count_slices() -> None:
    """Include all tensor ranks' slices in the gradient norm of 16-bit training without ZeRO."""
    # DeepSpeed looks for the marks of slices on gradients, but only parameters have them
    # (runtime/fp16/unfused_optimizer.py:214).
    original: Any = unfused_optimizer.split_params_grads_into_shared_and_expert_params

    def marked(group: list[Any]) -> tuple[list[object], list[object]]:
        split = original(group)
        for gradient, p in zip(split[0], (p for p in group if p.grad is not None), strict=True):
            gradient.model_parallel = is_model_parallel_parameter(p)
        return split

    unfused_optimizer.split_params_grads_into_shared_and_expert_params = marked


@cache
def _scale_losses() -> None:
    """Make backward multiply losses by the loss scale in fp16 without ZeRO (DeepSpeed#8393)."""
    # DeepSpeed scales losses only for ZeRO's optimizers (runtime/engine.py:3417); otherwise it only divides the
    # gradients. If the source of its `backward` mentions fp16, that version has the fix.
    original: Any = DeepSpeedEngine.backward
    if "fp16" in inspect.getsource(original):
        return

    @wraps(original)
    def backward(self: DeepSpeedEngine, loss: Tensor, *args: object, **options: object) -> Any:
        scaling = getattr(self.optimizer, "loss_scale_config", None)  # ZeRO's optimizers have none
        if scaling and scaling.use_grad_scaling:
            loss = loss.float() * scaling.cur_scale
        return original(self, loss, *args, **options)

    DeepSpeedEngine.backward = backward


def _unscale_norm(optimizer: Any) -> None:
    """Remove the loss scale from an fp16 optimizer's gradient norm (ZeRO stages 0 and 3)."""
    original = optimizer.step

    def step(closure: object = None) -> object:
        scale = optimizer.loss_scale
        result = original(closure)
        if not optimizer.overflow:
            # FP16_UnfusedOptimizer keeps the scaled norm (runtime/fp16/unfused_optimizer.py:224). The other optimizers
            # divide by the scale of the next step, which may have risen (runtime/fp16/fused_optimizer.py:340,
            # runtime/zero/stage3.py:2897).
            divided = 1.0 if isinstance(optimizer, unfused_optimizer.FP16_UnfusedOptimizer) else optimizer.loss_scale
            optimizer._global_grad_norm *= divided / scale
        return result

    optimizer.step = step


def _keep_gradient_norm(engine: Engine) -> None:
    """Make an fp32 engine without ZeRO keep its gradient norm."""

    def clip() -> None:  # as in runtime/engine.py, clip_fp32_gradients, which drops the norm
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip


def _sequence_parallel_excess(job: Job) -> int:
    """Return the factor by which gradients are too large under sequence parallelism."""
    if job.layout.combined:  # sequence ranks count as data ranks
        return 1
    # DeepSpeed averages over dp ranks only, except in stage 3's reduce-scatter, which averages over all ranks
    # (stage_1_and_2.py:1506, engine.py:3884; stage3.py:1878).
    zero = job.ds_config.get("zero_optimization", {})
    averages = job.layout.zero_stage == 3 and zero.get("reduce_scatter", True)
    return 1 if averages else job.layout.sp


def _register_sequence_parallel(job: Job, model: Any) -> object:
    """Give a model DeepSpeed's sequence parallel attention. Return the engine's groups, `mpu`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=job.layout.sp,
        micro_batch_size=job.batch.micro,
        seq_length=job.run.seq_len,
        seq_length_is_variable=False,
    )


def _build_combined(job: Job, inputs: Inputs | None) -> tuple[nn.Module, MeshGroups]:
    """Return a model with spread experts, tensor slices or split sequences, and its groups."""
    layout, stored, make = job.layout, stored_by_engine(job), partial(build_from_seed, job, inputs)
    groups = MeshGroups(layout)
    shape = build_on_meta(job, inputs, checkpointing=job.run.activation_checkpointing)
    if layout.sp > 1:
        exchange_heads(shape.config, job, groups.sequence)
    if layout.ep > 1:
        return build_spread(shape, layout, stored, make), groups
    return build_split(shape, groups.tensor, stored, make), groups


class ZeroTrainer(EngineTrainer):
    """Trainer for ZeRO 0-3 with or without offload, and tensor, sequence and expert parallelism."""

    def __init__(self, job: Job, coords: RankCoords, inputs: Inputs | None, model: nn.Module | None = None):
        """Start the engine for `model`, or for the model that the run names."""
        self.job, self.coords = job, coords
        self.device = rank_device()
        if job.layout.combined:
            model, mpu = _build_combined(job, inputs)
        else:
            if model is None:
                model = build_whole(job, inputs)
            else:
                prepare_batch_norms(job, model)
            mpu = _register_sequence_parallel(job, model) if job.layout.sp > 1 else None
        self._own_loss = job.facts.own and "labels" in inspect.signature(model.forward).parameters
        if self._own_loss and job.batch.by_rank:  # only the built model shows that its forward takes labels
            message = f"{job.run.model} computes its own loss, which cannot be weighted by the samples of each rank"
            raise RunFailed(Problem(kind="loss", message=message, hint="remove --micro-batch-by-rank"))
        self._named = inputs if isinstance(inputs, NamedInputs) else None
        self._classes = tabled_classes(inputs)
        self._keys = batch_keys(inputs) if inputs else ["inputs", "labels"]
        self.engine = start_engine(job, model, job.steps, mpu=mpu)
        chunk = None if job.facts.own or job.run.compile else job.run.loss_chunk  # a compiled head gets no labels
        self._head = head_loss(self.engine.module, chunk, inside=True)
        self._excess = _sequence_parallel_excess(job)
        self._balance = RouterBalance(self.engine.module, self.engine.seq_data_parallel_group)
        self.averaged = AveragedWeights(self, job.run.ema) if job.run.ema else None
        assert self.engine.seq_dp_world_size == job.layout.dp * job.layout.sp, "DeepSpeed has another layout"

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one optimizer step over all micro batches. Return their losses, float32."""
        # engine.step() after each micro batch: the engine counts micro batches and updates only at the last of them
        losses = []
        for _ in range(self.job.batch.accumulation):
            losses.append(self._backward(next(batches)))
            self.engine.step()
        if self.averaged:
            self.averaged.update()
        return torch.stack(losses) if len(losses) > 1 else losses[0].reshape(1)

    def _backward(self, batch: Batch) -> Tensor:
        """Run forward and backward of a micro batch. Return its loss, detached from the graph."""
        loss = self._loss(batch)
        if self.loss_check:
            self.loss_check.see(loss)
        self.engine.backward(loss if self._excess == 1 else loss / self._excess)
        # the graph would keep alive the tensors that a model's own autograd functions store on its nodes
        return loss.detach().float()

    def extra_metrics(self) -> dict[str, Tensor | float]:
        """Return the base class's metrics and, for a mixture of experts, its routers' balance."""
        return super().extra_metrics() | self._balance.figures()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], count: int) -> Tensor:
        """Return loss, targets and right answers, summed over every rank's batches.

        float64 (3 + classes^2,): for labelled text and pixels `class_table` follows; otherwise `classes` is 0.
        """
        self.engine.eval()
        sums = torch.zeros(3 + self._classes**2, dtype=torch.float64, device=self.device)
        for batch in batches:
            sums += self.eval_counts(batch)
        self.engine.train()
        dist.all_reduce(sums)
        return sums / self.job.layout.tp  # tensor parallel ranks count the same batch

    def written_figures(self, data: Data) -> dict[str, float]:
        """Return an encoder-decoder's ROUGE scores on some validation samples; {} for other models."""
        job = self.job
        most = min(job.run.generate_samples, job.run.eval_samples or len(data.valid))
        if self._named is None or not self._named.padded or not most:
            return {}
        self.engine.eval()
        pairs: list[tuple[str, str]] = []
        for batch in eval_batches(data.valid, self.coords.dp_rank, job.layout.dp, job.batch.micro, most):
            moved = {name: self._moved(batch[name]) for name in self._keys}
            length, together = self._named.tensors[-1].shape[0], job.layout.zero_stage == 3
            written = write_targets(self.engine.module, moved, length, data.end_id, together)
            pairs += compared(written, batch["labels"], batch["real"], data)
        self.engine.train()
        gathered: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, pairs)
        return rouge_scores([pair for part in gathered for pair in part])

    def after_training(self, data: Data, folder: RunFolder, progress: Callable[[str], None]) -> dict[str, object]:
        """Return a sample of a causal language model's text.

        Return {} for other models, and with sequence parallelism.
        """
        job = self.job
        if job.layout.sp > 1 or job.facts.own or job.facts.task != "causal-lm" or not (data.encode and data.decode):
            return {}
        progress("writing a sample")
        prompt, context = data.encode(PROMPT), job.run.seq_len
        assert context  # set in every job on text
        return {"sample": data.decode(self._continue(prompt, context))}

    @torch.no_grad()
    def _continue(self, prompt: list[int], context: int) -> list[int]:
        """Return the token ids of the prompt and of at most SAMPLE_TOKENS tokens after it."""
        # Every rank runs the same forward, since under ZeRO-3 and tensor parallelism each rank has only a part of the
        # weights. Rank 0 draws the token and checks the time for all ranks, so that they run equally many forwards.
        self.engine.eval()
        deadline = time.monotonic() + SAMPLE_S
        generator, tokens = torch.Generator().manual_seed(self.job.run.seed), list(prompt)
        for _ in range(SAMPLE_TOKENS):
            logits, _ = forward_logits(self.engine, torch.tensor([tokens[-context:]], device=self.device))
            odds = torch.softmax(logits[0, -1].float().cpu() / TEMPERATURE, dim=-1)
            drawn = torch.multinomial(odds, 1, generator=generator).to(self.device)
            if time.monotonic() > deadline:
                drawn.fill_(-1)
            dist.broadcast(drawn, src=0)
            token = int(drawn)
            if token < 0:
                break
            tokens.append(token)
        self.engine.train()
        return tokens

    def _loss(self, batch: Batch) -> Tensor:
        x, labels, extra = self.to_device(batch)
        if self._named:
            loss = forward_named(self.engine, self._named, {"inputs": x, "labels": labels, **extra}).loss
            if self._named.padded:  # turn the mean over this micro batch into its share of the mean over all targets
                return loss.float() * (labels != IGNORE_INDEX).sum() * batch["weight"]
            return loss
        if self._own_loss:
            return output_part(self._call_own(x, labels), "loss")
        self._balance.begin()
        output, aux = self._logits(x, extra, labels)
        if self.job.run.loss == "mse":
            return nn.functional.mse_loss(one_a_sample(output, labels), labels.float())
        self._balance.end()
        if aux is not None:
            self._balance.note(aux)
        if self._head:
            loss = output * batch["weight"]
        else:
            run = self.job.run
            loss = weighted_cross_entropy(output, labels, batch["weight"], run.loss_chunk, run.label_smoothing)
        return loss if aux is None else loss + aux

    def eval_counts(self, batch: Batch) -> Tensor:
        """Return loss, targets and right answers, summed over a batch of this rank.

        The shape is that of `evaluate`.
        """
        x, labels, extra = self.to_device(batch)
        if self._named and self._named.padded:
            batch = {"inputs": x, "labels": labels, **extra}
            return counts(forward_named(self.engine, self._named, batch).logits, labels)
        if self._own_loss or self._named:
            return self._own_eval(x, labels, extra)
        logits, _ = self._logits(x, extra, labels)
        if self._head:
            return logits  # the head has counted them already
        if self.job.run.loss == "mse":
            return squared_errors(logits, labels, 3)
        sums = counts(logits, labels)
        return torch.cat([sums, class_table(logits, labels, self._classes)]) if self._classes else sums

    def _logits(self, x: Tensor, extra: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits and the routers' loss; with `_head`, its result in place of the logits."""
        with self._head.with_labels(labels) if self._head else nullcontext():
            logits, aux = forward_logits(self.engine, x, **extra)
        return (output_part(logits, "logits") if self.job.facts.own else logits), aux

    def _own_eval(self, x: Tensor, labels: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """Return the model's own loss summed over real samples, the number of these samples, and 0."""
        # A model's own loss is a mean over all samples it gets, so padding samples of the last batch are left out. A
        # rank whose samples are all padding must still run a forward: others wait for it in ZeRO-3's gathers.
        real = (labels.reshape(len(labels), -1) != IGNORE_INDEX).any(dim=1)
        count = real.sum().double()
        if not real.any():
            real, labels = torch.ones_like(real), labels.clamp_min(0)
        if self._named:
            rest = {key: t[real] for key, t in extra.items()}
            loss = forward_named(self.engine, self._named, {"inputs": x[real], "labels": labels[real], **rest}).loss
        else:
            loss = output_part(self._call_own(x[real], labels[real]), "loss")
        return torch.stack([loss.double() * count, count, count * 0])

    def _call_own(self, x: Tensor, labels: Tensor) -> object:
        if self.job.facts.task == "causal-lm":
            # as in transformers, labels align with their tokens and the model shifts them
            return self.engine(input_ids=x, labels=torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, x))
        return self.engine(x, labels=labels)

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return inputs, labels and the other named inputs of the model, on this rank's device.

        Under sequence parallelism these are the rank's slices of the tokens, with their positions.
        """
        x, *others = (self._moved(batch[key]) for key in self._keys[:-1])
        labels = batch["labels"].to(self.device, non_blocking=True)  # probabilities of mixed images stay float32
        if self.job.layout.sp == 1:
            return x, labels, dict(zip(self._keys[1:-1], others, strict=True))
        tokens = own_tokens(x.shape[1], self.job.layout, self.coords)
        positions = torch.arange(tokens.start, tokens.stop, device=self.device).expand(len(x), -1)
        return x[:, tokens], labels[:, tokens], {"position_ids": positions}

    def _moved(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device, non_blocking=True)
        return moved.to(DTYPES[self.job.precision]) if moved.is_floating_point() else moved
