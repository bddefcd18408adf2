"""Define the trainer for one rank of DeepSpeed's pipeline engine."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zerofit.models.build import build, empty_batch
from zerofit.models.catalog import source_of
from zerofit.models.dtypes import DTYPES
from zerofit.models.inputs import Inputs
from zerofit.models.layers import Layer, RotaryBlock, as_layers, layer_facts, state_tensors
from zerofit.models.router_loss import Carried, RouterLoss, ends, router_loss
from zerofit.models.sections import ModelSection, numbered
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.mesh import RankCoords, parts_of_stage, pipeline_parts
from zerofit.spec.model_facts import IGNORE_INDEX
from zerofit.spec.run_folder import Job
from zerofit.spec.stages import PipelineStage, cut_layers, stage_layers
from zerofit.train.build import build_from_seed, build_on_meta, prepare_batch_norms, stored_by_engine
from zerofit.train.engines import start_engine
from zerofit.train.loss import HeadLoss, counts, head_loss, weighted_cross_entropy
from zerofit.train.mesh_groups import MeshGroups, exchange_heads
from zerofit.train.process_group import accelerator, rank_device
from zerofit.train.tensor_split import RouterBalance, build_split, build_spread, make_expert_groups, published_names
from zerofit.train.trainer import Batch, EngineTrainer, StateNames, gathered_state, own_tokens
from zerofit.train.zero_layouts import Engine

# From a model to a stage, without a rank that ever holds the whole model:
#
#     1. list the model's layers on the meta device, with their numbers of parameters (or measured seconds)
#     2. cut the list into as many parts as there are stages, or twice as many for DualPipeV (`spec.stages.cut_layers`)
#     3. build the model again from the seed and keep only this stage's weights
#     4. give DeepSpeed all layers with these bounds; it runs those of its own stage
#
# Layers of two stages that share a weight (embedding and head) become TiedLayerSpecs, whose gradients DeepSpeed adds
# up.
_Pair = tuple[Tensor, tuple[Tensor, Tensor]]  # the first layer's input; labels and their weight


class PipelineTrainer(EngineTrainer):
    """Trainer for pipelines at ZeRO stage 0 or 1, alone or in a layout with several degrees."""

    def __init__(self, job: Job, coords: RankCoords, inputs: Inputs):
        self.job, self.coords = job, coords
        self.device = rank_device()
        self._layers, bounds, self.stages, self._head, self._router_loss = _build_stage(job, coords, inputs)
        self.parts = _parts_of(coords.pp_rank, job, bounds)
        self._own_layers = [self._layers[index] for index in chain(*self.parts)]
        self._counts = torch.zeros(3, dtype=torch.float64, device=self.device)
        kind = _StagedV if job.run.pipeline_schedule == "dualpipev" else _Staged
        module = kind(self._layers, bounds, job, loss_fn=self._loss)
        if job.layout.zero_stage == 0 and job.precision == "fp32":
            _count_once(module, coords)
        self.engine = start_engine(job, module, job.steps)
        _even_norms(self.engine)
        grid, data = self.engine.grid, coords.dp_rank * job.layout.sp + coords.sp_rank
        assert (grid.get_data_parallel_id(), grid.get_stage_id()) == (data, coords.pp_rank)
        assert grid.get_slice_parallel_rank() == coords.tp_rank
        self._balance = RouterBalance(module, self.engine.seq_data_parallel_group, self._router_loss is not None)
        module.register_forward_pre_hook(lambda *_: self._balance.begin())
        module.register_forward_hook(lambda *_: self._balance.end() if module.training else None)

    def sections(self) -> list[ModelSection]:
        """Return the layers of this rank's stage, named as in forecasts for the full model."""
        names = [layer.name for layer in self._layers]
        if source_of(self.job.run).family == "transformers":  # as `block_sections` names them
            blocks = [n for n, name in enumerate(names) if name.rpartition(".")[2].isdigit()]
            own = dict(zip(blocks, numbered(["block"] * len(blocks)), strict=True))
            first, last = blocks[0], blocks[-1]
            others = ("embedding" if n < first else "head" if n > last else "between" for n in range(len(names)))
            names = [own.get(n, part) for n, part in enumerate(others)]
        else:
            names = numbered(names)
        return [ModelSection(name=names[n], start=self._layers[n].module) for n in chain(*self.parts)]

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one optimizer step. Return the loss over all replicas of the pipeline, float32 (1,)."""
        return self.engine.train_batch(data_iter=(self._pair(b) for b in batches)).detach().float().reshape(1)

    def extra_metrics(self) -> dict[str, Tensor | float]:
        """Return the base class's metrics and, for a mixture of experts, its routers' balance."""
        return super().extra_metrics() | self._balance.figures()

    def evaluate(self, batches: Iterable[Batch], count: int) -> Tensor:
        """Return loss, targets and right answers of every rank's `count` batches: float64 (3,)."""
        self._counts.zero_()
        pairs = (self._pair(batch) for batch in batches)
        if self.job.run.pipeline_schedule == "dualpipev":
            self._evaluate_in_rounds(pairs, count)
        elif count:
            self.engine.eval_batch(pairs, num_micro_batches=count)
        # DeepSpeed returns only the mean loss of an evaluation; the last stage's loss function counts exactly instead
        sums = self._counts.clone()  # zero on all but the last stages
        dist.all_reduce(sums)
        return sums / self.job.layout.tp  # tensor parallel ranks count the same batch

    def _evaluate_in_rounds(self, pairs: Iterator[_Pair], count: int) -> None:
        """Evaluate in rounds, each with as many micro batches as training accumulates."""
        # DualPipeV's engine chooses its backward buffers by the number of micro batches in training, even if it runs
        # a different number (runtime/pipe/dualpipev.py, `_phase1_buffer`). So the last round is filled up.
        each = self.job.batch.accumulation
        rounds = -(-count // each)
        padded = _padded(pairs, rounds * each - count)
        for _ in range(rounds):
            self.engine.eval_batch(padded, num_micro_batches=each)

    def state_names(self, engine: object) -> StateNames:
        """Return the names of this stage's state. A shared weight has its first layer's name."""
        names, firsts = StateNames(), {}
        for layer in self._layers:
            if layer.tied and layer.tied_attr:
                own = layer.names[layer.tied_attr]
                if firsts.setdefault(layer.tied, own) != own:
                    names.ties[own] = firsts[layer.tied]
        for layer in self._own_layers:
            for key, tensor in state_tensors(layer.module):
                name = names.ties.get(layer.names[key], layer.names[key])
                if not isinstance(tensor, nn.Parameter):
                    names.buffers[id(tensor)] = name
                elif names.parameters.setdefault(id(tensor), name) != name:
                    names.ties[name] = names.parameters[id(tensor)]
        return names

    def weights(self, scratch: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the full model's weights on rank 0. All ranks must iterate over this together."""
        # each stage's first replica writes its part to a file in `scratch`, and rank 0 reads all files
        coords, weights = self.coords, {}
        collect = not (coords.dp_rank or coords.sp_rank or coords.tp_rank)
        for layer in self._own_layers:
            weights |= dict(gathered_state(layer.module, self.job.layout, layer.names, collect, self.saves_adapters))
        if collect:
            scratch.mkdir(parents=True, exist_ok=True)
            part = scratch / f"stage-{coords.pp_rank}.safetensors"
            save_file({name: tensor.clone() for name, tensor in weights.items()}, part)
        dist.barrier()
        if dist.get_rank() != 0:
            return
        for stage in range(self.job.layout.pp):
            with safe_open(scratch / f"stage-{stage}.safetensors", framework="pt") as part:
                for name in part.keys():  # noqa: SIM118 (no mapping)
                    yield name, part.get_tensor(name)
        shutil.rmtree(scratch)

    def _loss(self, outputs: Tensor | Carried, target: tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(outputs, Tensor):
            return self._targets_loss(outputs, target)
        logits, sums = outputs
        loss = self._targets_loss(logits, target)
        if not torch.is_grad_enabled():
            return loss
        assert self._router_loss is not None  # it made these sums
        routers = self._router_loss.of(sums)
        self._balance.note(routers)
        return loss + routers

    def _targets_loss(self, logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        """Return the weighted loss of logits, or of hidden states if the loss contains the head."""
        labels, weight = target
        if not torch.is_grad_enabled():
            sums = self._head.of(logits, labels) if self._head else counts(logits, labels)
            self._counts += sums
            return sums[0].float() * weight
        if self._head:
            return self._head.of(logits, labels) * weight
        run = self.job.run
        return weighted_cross_entropy(logits, labels, weight, run.loss_chunk, run.label_smoothing)

    def _pair(self, batch: Batch) -> _Pair:
        x, labels = batch["inputs"], batch["labels"]
        if x.is_floating_point():
            x = x.to(DTYPES[self.job.precision])
        if self.job.layout.sp > 1:
            tokens = own_tokens(x.shape[1], self.job.layout, self.coords)
            x, labels = x[:, tokens], labels[:, tokens]
        return x, (labels, torch.tensor(batch.get("weight", 1.0)))


def _padded(pairs: Iterator[_Pair], count: int) -> Iterator[_Pair]:
    """Yield the micro batches. Then yield the last one `count` times more, without targets."""
    for x, (labels, weight) in pairs:
        yield x, (labels, weight)
    for _ in range(count):
        yield x, (torch.full_like(labels, IGNORE_INDEX), weight)


def _even_norms(engine: Engine) -> None:
    """Make stages with different numbers of parameter groups agree on the gradient norm."""
    # ZeRO 1 sums one norm per group over the stages (stage_1_and_2.py, `scaled_global_norm`). A stage with only an
    # embedding has no group of vectors. The other stages would wait for its norm forever, so it adds zeros.
    optimizer = engine.optimizer
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    own_groups = len(optimizer.param_groups)
    ends = torch.tensor([own_groups, -own_groups], device=engine.device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most == least:
        return
    own_norm = optimizer.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        norm = own_norm(norm_type)
        for _ in range(most - own_groups):
            others = torch.zeros((), device=engine.device)
            optimizer._model_parallel_all_reduce(tensor=others, op=dist.ReduceOp.SUM)
            norm = (norm.square() + others).sqrt()
        # all stages need the same bits: the norm scales the gradients of weights that two stages share
        optimizer._model_parallel_all_reduce(tensor=norm, op=dist.ReduceOp.MAX)
        return norm

    optimizer.scaled_global_norm = scaled_global_norm


def _count_once(module: PipelineModule, coords: RankCoords) -> None:
    """Mark the parameters that this rank adds to the gradient norm in fp32 without ZeRO."""
    # DeepSpeed's clipping would count split parameters on every stage, and all other parameters only on the first
    # stage (runtime/utils.py:394).
    parameters: Iterator[Any] = module.parameters()  # with DeepSpeed's marks on them
    for p in parameters:
        split = getattr(p, "tensor_model_parallel", False)
        p.model_parallel = (split or coords.tp_rank == 0) and not p.ds_pipe_replicated
        p.tensor_model_parallel = split and p.model_parallel


class _Staged(PipelineModule):
    """PipelineModule with given stage bounds: no rank has to build every layer to find them."""

    def __init__(self, layers: list[Layer], bounds: list[int], job: Job, loss_fn: object):
        self._bounds, layout = bounds, job.layout
        data = layout.dp * layout.sp  # outside attention, sequence ranks are data ranks with other tokens
        if layout.tp > 1:
            topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=data)
        else:
            topology = PipeDataParallelTopology(num_pp=layout.pp, num_dp=data)
        keys = _keys_across_stages(layers, bounds, job)
        ready = [_Tied(layer) if layer.tied in keys else layer.module for layer in layers]
        self._last = len(layers)
        super().__init__(ready, topology=topology, loss_fn=loss_fn)

    def forward(self, forward_input: object) -> object:
        """Run this stage's layers. If several tensors go to the next stage, they share one backward."""
        outputs = super().forward(forward_input)
        if isinstance(outputs, tuple) and self._local_stop != self._last and torch.is_grad_enabled():
            return ends(*outputs)
        return outputs

    def _partition_layers(self, method: str = "parameters") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self._bounds[self.stage_id], stop=self._bounds[self.stage_id + 1])


class _StagedV(DualPipeVModule, _Staged):
    """Stage of DualPipeV with given bounds. It has a part for each direction of the pipeline."""


def _parts_of(stage: int, job: Job, bounds: list[int]) -> list[range]:
    parts = parts_of_stage(stage, job.layout.pp, job.run.pipeline_schedule)
    return [range(bounds[part], bounds[part + 1]) for part in parts]


def _keys_across_stages(layers: list[Layer], bounds: list[int], job: Job) -> set[str]:
    """Return the keys of weights that different stages share."""
    # If two layers of the same stage share a weight, they have the same Parameter and need no spec. With specs,
    # DeepSpeed would call the first layer's module instead of the second layer's module.
    stages_of = defaultdict[str | None, set[int]](set)
    for stage in range(job.layout.pp):
        for index in chain(*_parts_of(stage, job, bounds)):
            stages_of[layers[index].tied].add(stage)
    return {key for key, stages in stages_of.items() if key and len(stages) > 1}


class _Tied(TiedLayerSpec):
    """Spec of a built layer that shares its weight with another layer."""

    def __init__(self, layer: Layer):
        super().__init__(layer.tied, nn.Module, tied_weight_attr=layer.tied_attr)
        self._layer = layer

    def build(self, log: bool = False) -> nn.Module:
        return self._layer.module


def _build_stage(
    job: Job, coords: RankCoords, inputs: Inputs
) -> tuple[list[Layer], list[int], tuple[PipelineStage, ...], HeadLoss | None, RouterLoss | None]:
    """Return all layers, bounds of the parts, stages, and the losses of head and routers.

    Layers of other stages are on the meta device.
    """
    # The model is built twice. The first one, without memory, shows its layers and so the bounds of the stages. The
    # second one has only the weights of this rank's stage. They equal those of the whole model.
    run, layout, shape = job.run, job.layout, build_on_meta(job, inputs)
    layers = as_layers(shape)
    stack = layer_facts(layers)
    weights = [layer.parameters for layer in stack]
    if run.pipeline_balance == "time":
        weights = _measured_seconds(job, inputs)
    parts = cut_layers(weights, [layer.trained for layer in stack], pipeline_parts(layout.pp, run.pipeline_schedule))
    stages = stage_layers(stack, parts, layout, run.pipeline_schedule)
    bounds = [0, *(last for _, last in parts)]
    indices = chain(*_parts_of(coords.pp_rank, job, bounds))
    # this rank builds only the weights of its own stage
    keep = {name for index in indices for name in layers[index].names.values()}
    make, stored, groups = partial(build_from_seed, job, inputs, keep=keep), stored_by_engine(job), MeshGroups(layout)
    if layout.tp > 1:
        model: object = build_split(shape, groups.tensor, stored, make)
    elif layout.ep > 1:
        _check_experts(layers, bounds, job)
        make_expert_groups(layout)
        model = build_spread(shape, layout, stored, make)
    else:
        model = make(stored)
    routers = router_loss(prepare_batch_norms(job, model))
    layers, published = as_layers(model, run.activation_checkpointing, routers), published_names(model)
    for layer in layers:
        layer.names = {key: published.get(name, name) for key, name in layer.names.items()}
    if layout.sp > 1:
        _share_sequences(job, coords, model.config, layers, groups)
    return layers, bounds, stages, head_loss(model, run.loss_chunk, inside=False), routers


def _check_experts(layers: list[Layer], bounds: list[int], job: Job) -> None:
    """Raise RunFailed if a stage has no experts that are divided among ranks."""
    # such a stage would average and save its weights in another way than the other stages
    for stage in range(job.layout.pp):
        names = (layers[index].names.values() for index in chain(*_parts_of(stage, job, bounds)))
        if not any(".experts." in name for name in chain(*names)):
            message = f"stage {stage} of --pipeline {job.layout.pp} has no layer with experts to spread"
            hint = "use fewer stages, or --expert-parallel 1"
            raise RunFailed(Problem(kind="layout", message=message, hint=hint, where="--pipeline"))


def _share_sequences(job: Job, coords: RankCoords, config: object, layers: list[Layer], groups: MeshGroups) -> None:
    """Make all blocks process this rank's part of each sequence (see `exchange_heads`)."""
    assert job.run.seq_len  # a job's run on text is resolved
    exchange_heads(config, job, groups.sequence)
    first = own_tokens(job.run.seq_len, job.layout, coords).start
    for block in chain.from_iterable(layer.module.modules() for layer in layers):
        if isinstance(block, RotaryBlock):
            block.first_position = first


def _measured_seconds(job: Job, inputs: Inputs) -> list[float]:
    """Return the seconds of each layer's forward and backward, as rank 0 measures them."""
    seconds: list[float] = []
    if dist.get_rank() == 0:
        torch.manual_seed(job.run.seed)
        device, dtype = rank_device(), DTYPES[job.precision]
        x = empty_batch(inputs, job.batch.micro)["inputs"].to(device)
        x = x.to(dtype) if x.is_floating_point() else x
        for layer in as_layers(build(source_of(job.run), inputs, dict(job.run.model_args))):
            layer.module.to(device=device, dtype=dtype)
            seconds.append(_time_layer(layer, x))
            with torch.no_grad():
                x = layer.module(x)
            layer.module.to("cpu")  # the device holds one layer at a time
    shared = [seconds]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _time_layer(layer: Layer, x: Tensor) -> float:
    for _ in range(2):  # only the second round counts: the first one allocates memory and chooses kernels
        accelerator().synchronize()
        start = time.perf_counter()
        out = layer.module(x)
        if out.requires_grad:
            out.float().sum().backward()
        accelerator().synchronize()
    seconds = time.perf_counter() - start
    layer.module.zero_grad(set_to_none=True)
    return seconds
