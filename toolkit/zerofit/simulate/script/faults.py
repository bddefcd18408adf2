"""Define the faults that scripts can have: problem, mend, cost and detector.

A detector reads the records of the simulated rank: its storages with kind, line and phase, and the `FaultLog`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerofit.simulate.memory.categories import (
    ACTIVATIONS,
    LOGITS,
    MASTER,
    STATE,
    TEMPORARIES,
    classify,
    optimizer_chain,
)
from zerofit.simulate.memory.host import highest, host_moments
from zerofit.simulate.memory.ledger import DEVICE, Storage
from zerofit.simulate.ops.tracker import is_own
from zerofit.simulate.record import ScriptFault
from zerofit.simulate.script.command import ScriptTarget
from zerofit.simulate.script.facts import elements_of
from zerofit.simulate.script.fault_log import FaultLog, Lives, local_bytes
from zerofit.simulate.script.lengths import Lengths
from zerofit.simulate.script.phases import ScriptPhases, has_optimizer
from zerofit.simulate.script.tracker import USER_LINE_BYTES
from zerofit.spec.memory_kinds import BUCKETS, GRADIENTS
from zerofit.spec.overhead import HOST_RESERVE
from zerofit.spec.units import shown_bytes

WORTH_BYTES, WORTH_SHARE = 32 << 20, 0.05  # a fault must cost at least these bytes and this share of the peak
GROWS_BYTES = 1 << 20  # growth per micro batch that is reported, since any growth runs out of memory at some step
MOSTLY = 0.9  # share of the weights' bytes from which tensors count as a copy
PADDED = 0.25  # share of columns without a token in every batch
_OF_GRAPH = (ACTIVATIONS, LOGITS, TEMPORARIES)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the detectors read."""

    log: FaultLog
    target: ScriptTarget
    phases: ScriptPhases
    lengths: Lengths
    lives: Lives
    peak_bytes: int

    @property
    def engines(self) -> list[DeepSpeedEngine]:
        """The engines that have an optimizer."""
        return [engine for engine in self.phases.engines if has_optimizer(engine)]

    @property
    def models(self) -> list[nn.Module]:
        """The models of the engines with an optimizer, or the script's own if there is none."""
        return [cast("nn.Module", engine.module) for engine in self.engines] or self.phases.models

    def is_worth(self, size: int) -> bool:
        """Return whether saving `size` bytes is worth a change of the script."""
        return size >= max(WORTH_BYTES, WORTH_SHARE * self.peak_bytes)


Found = tuple[str, int, str]  # line, bytes, a detail for the text
Detector = Callable[[Script], Iterable[Found]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault. In its texts, `{bytes}` and `{detail}` are replaced."""

    code: str
    problem: str
    mend: str
    find: Detector

    def named(self, line: str, size: int, detail: str) -> ScriptFault:
        """Return this fault for one line of a script, with `size` and `detail` in its texts."""
        words = {"bytes": shown_bytes(size), "detail": detail}
        problem, mend = self.problem.format(**words), self.mend.format(**words)
        return ScriptFault(code=self.code, line=line, bytes=size, problem=problem, mend=mend)


def find_faults(log: FaultLog, target: ScriptTarget, phases: ScriptPhases, lengths: Lengths) -> None:
    """Set `log.faults`, those with the most bytes first. Do nothing if they are already set."""
    if log.faults is not None:
        return
    peak = max([log.meter.peak(), *(phase.peak_bytes for phase in phases.log.done)])
    script = Script(log=log, target=target, phases=phases, lengths=lengths, lives=Lives(log.meter), peak_bytes=peak)
    found: list[ScriptFault] = []
    for fault in FAULTS:
        try:
            found += [fault.named(*seen) for seen in fault.find(script)]
        except Exception as error:  # a detector may not support this model; the memory figures are still right
            log.meter.note(f"fault {fault.code}: the check failed ({type(error).__name__}: {error})")
    log.faults = tuple(sorted(found, key=lambda fault: -fault.bytes))


def _whole_model(script: Script) -> Iterator[Found]:
    """Find full parameters that DeepSpeed gets at ZeRO-3."""
    # Every rank has them until the engine starts. Then it keeps its share, so only the rest counts.
    log, ranks = script.log, script.target.world_size
    extra = log.plain_bytes - log.plain_bytes // ranks
    if any(engine.zero_optimization_stage() == 3 for engine in script.engines) and script.is_worth(extra):
        yield log.plain_at or log.engine_at, log.plain_bytes, shown_bytes(log.plain_bytes // ranks)


def _wide_logits(script: Script) -> Iterator[Found]:
    """Find the script's float32 copies of logits that live until the loss's backward."""
    lives, meter, largest = script.lives, script.log.meter, dict[str, int]()
    # the first backward after the copy was made: a copy for a metric is gone by then
    begins = [mark.event for mark in meter.ledger.marks if mark.name == "backward"]
    for index, width in meter.widened:
        storage, after = lives.storages[index], bisect_right(begins, lives.born[index])
        own = storage.code is not None and is_own(storage.code.co_filename) and storage.phase == "forward"
        kept = after < len(begins) and lives.died.get(index, lives.end) > begins[after]
        if own and kept and width in script.log.widths:
            largest[storage.user_line] = max(largest.get(storage.user_line, 0), storage.bytes)
    yield from ((line, size, "") for line, size in largest.items() if script.is_worth(size))


def _padding(script: Script) -> Iterator[Found]:
    """Find padding in all batches."""
    # It costs the smallest share of padded columns of the activations' peak.
    share, live, most = min(script.log.padding, default=0.0), 0, 0
    for index, change in script.log.meter.ledger.events:
        storage = script.lives.storages[index]
        live += change if storage.place == DEVICE and _kind(storage) in (ACTIVATIONS, LOGITS) else 0
        most = max(most, live)
    if share >= PADDED and not script.target.longest and script.is_worth(round(share * most)):
        yield script.lengths.padded_at or script.log.batch_at, round(share * most), f"{share:.0%}"


def _second_copy(script: Script) -> Iterator[Found]:
    """Find copies of the weights: storages of these sizes from one line, without an owner."""
    meter, owned = script.log.meter, {id(storage) for storage in _owned(script)}
    parameters = [p for model in script.models for p in model.parameters()]
    elements = Counter(map(elements_of, parameters))
    owners = {id(storage): storage for p in parameters if (storage := meter.storage_of(p)) is not None}
    flat = Counter(storage.bytes for storage in owners.values())
    made: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for storage in meter.live_storages():
        made_by_step = storage.phase in ("forward", "backward")  # activations may have the sizes of weights
        is_bucket = storage.kind in (BUCKETS, GRADIENTS)  # DDP has a bucket for each large weight
        unowned = id(storage) not in owned and storage.place == DEVICE
        if unowned and storage.user_line and not (made_by_step or is_bucket):
            made[storage.user_line][storage.bytes] += 1
    for line, sizes in made.items():
        # copies in 16 or 32 bits, or of the flat storages in which ZeRO and FSDP keep several parameters
        copies = [Counter({n * size: times for n, times in elements.items()}) for size in (2, 4)]
        for weights in (*copies, flat):
            large = Counter({size: times for size, times in weights.items() if size >= USER_LINE_BYTES})
            coverage = _total(sizes & large) / max(1, _total(large))
            if coverage >= MOSTLY and script.is_worth(_total(sizes)):
                yield line, _total(sizes), ""
                break


def _total(sizes: Counter[int]) -> int:
    return sum(size * times for size, times in sizes.items())


def _owned(script: Script) -> Iterator[Storage]:
    optimizers = [o for engine in script.engines for o in optimizer_chain(engine.optimizer)]
    tensors = tree_leaves([vars(optimizer) for optimizer in (*script.phases.optimizers, *optimizers)])
    tensors += [t for model in script.models for t in (*model.parameters(), *model.buffers())]
    for tensor in tensors:
        for part in (tensor, getattr(tensor, "grad", None), getattr(tensor, "ds_tensor", None)):
            part = getattr(part, "_local_tensor", part)
            storage = script.log.meter.storage_of(part) if isinstance(part, Tensor) else None
            if storage is not None:
                yield storage


def _frozen_states(script: Script) -> Iterator[Found]:
    """Find weights without a gradient that have states in DeepSpeed's optimizer."""
    for engine in script.engines:
        grouped = _grouped(engine.optimizer)
        frozen = [p for p in grouped if id(p) not in script.log.updated]
        # an expert may get no token in the simulated steps
        still = sum(elements_of(p) for p in frozen if "expert" not in script.log.names.get(id(p), ""))
        share = still / max(1, sum(map(elements_of, grouped)))
        live = sum(s.bytes for s in script.log.meter.live_storages() if _kind(s) in (MASTER, STATE))
        size = round(share * live)
        if still and script.is_worth(size):
            yield script.log.engine_at, size, f"{still:,}"


def _grouped(optimizer: object) -> list[nn.Parameter]:
    # as the optimizers of ZeRO 1 and 2 (stage_1_and_2.py), ZeRO-3 and fp16, and BF16_Optimizer name them
    names = ("bit16_groups", "fp16_groups", "bf16_groups")
    groups = next((found for name in names if (found := getattr(optimizer, name, None))), [])
    return [p for p in tree_leaves(groups) if isinstance(p, nn.Parameter)]


def _kept_graph(script: Script) -> Iterator[Found]:
    starts = script.log.starts
    # the smallest of all: the first micro batch may allocate tensors that stay, e.g. a cached mask
    if script.log.retained_at and len(starts) > 1:
        left = [_of_graph(script.lives.between(*pair, at=pair[1])) for pair in pairwise(starts)]
        size = min(sum(storage.bytes for storage in kept) for kept in left)
        if script.is_worth(size):
            yield script.log.retained_at, size, ""


def _kept_outputs(script: Script) -> Iterator[Found]:
    """Find lines whose tensors of most micro batches are alive at the end.

    Tensors of a few micro batches may be alive: a pipeline stage keeps them in buffers that later micro batches reuse.
    """
    starts, made = script.log.starts, defaultdict[tuple[str, str], list[int]](list)
    if script.log.retained_at or not starts:
        return
    # The smallest sum of all micro batches counts, since the last one also has tensors that its end would free.
    for begin, end in zip(starts, [*starts[1:], script.lives.end], strict=True):
        sizes = Counter[tuple[str, str]]()
        for storage in _of_graph(script.lives.between(begin, end, at=script.lives.end)):
            sizes[storage.user_line, storage.op] += storage.bytes if storage.user_line else 0
        for place, size in sizes.items():
            made[place].append(size)
    lines = Counter[str]()
    for (line, _), sizes in made.items():
        lines[line] += min(sizes) if len(sizes) > max(1, len(starts) / 2) else 0
    size = lines.total()
    if size >= GROWS_BYTES:
        yield lines.most_common(1)[0][0], size, ""


def _of_graph(storages: Iterable[Storage]) -> list[Storage]:
    return [s for s in storages if s.place == DEVICE and _kind(s) in _OF_GRAPH]


def _kind(storage: Storage) -> str:
    return storage.kind or classify(storage)


def _kept_gradients(script: Script) -> Iterator[Found]:
    size = min(script.log.kept_gradients, default=0)
    # a CUDA graph needs its gradients at fixed addresses
    in_graph = any(note.startswith("CUDA graph") for note in script.log.meter.notes)
    if script.is_worth(size) and not in_graph:
        yield script.log.zeroed_at or script.log.batch_at, size, ""


def _half_weights(script: Script) -> Iterator[Found]:
    for optimizer in script.phases.optimizers:
        states = [
            leaf
            for parameter, state in optimizer.state.items()
            if parameter.dtype in (torch.bfloat16, torch.float16)
            for leaf in tree_leaves(state)
            if isinstance(leaf, Tensor) and leaf.shape == parameter.shape and leaf.is_floating_point()
        ]
        size = sum(map(local_bytes, states))
        if script.is_worth(size):
            types = " and ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in states}))
            yield script.log.zeroed_at or script.log.batch_at, size, f"{type(optimizer).__name__} has {types} states"


def _experts(script: Script) -> Iterator[Found]:
    """Find experts that ZeRO-3 gathers one by one, in an order that depends on the tokens."""
    for engine in script.engines:
        if engine.zero_optimization_stage() != 3:
            continue
        model = cast("nn.Module", engine.module)
        inside = {m for leaf in model.modules() if z3_leaf_module(leaf) for m in leaf.modules()}
        # one finding for each class, since set_z3_leaf_modules gets classes
        for module in {type(module): module for module in script.log.chosen if module not in inside}.values():
            yield script.log.experts[module] or script.log.engine_at, 0, type(module).__name__


def _lost_gradients(script: Script) -> Iterator[Found]:
    """Find trained weights without a gradient, if no input of a checkpointed block requires one."""
    trained = {id(p): p for model in script.models for p in model.parameters() if p.requires_grad}
    lost = [p for key, p in trained.items() if key not in script.log.updated]
    if script.log.detached and lost:
        yield script.log.checkpointed_at or script.log.batch_at, 0, f"{sum(map(elements_of, lost)):,}"


def _unused_search(script: Script) -> Iterator[Found]:
    """Find find_unused_parameters=True where all parameters get gradients in each batch."""
    chosen = [trainer.args.ddp_find_unused_parameters for trainer in script.lengths.trainers.values()]
    for model, line in script.log.wrapped.items():
        least = min(script.log.updated[id(p)] for p in model.parameters() if p.requires_grad)
        # None: the Trainer sets it, unless the model recomputes checkpoints (transformers/trainer.py, find_unused)
        if least >= len(script.log.starts) and None not in chosen:
            yield line, 0, ""


def _pinned(script: Script) -> Iterator[Found]:
    target, moments = script.target, host_moments(script.log.meter.ledger)
    parts = highest(moments)
    size = parts["pinned"] + parts["pinned_free"]
    if target.on_gpu and size * target.gpus > target.host_bytes * (1 - HOST_RESERVE):
        lines = Counter[str]()
        for storage in script.lives.storages:
            if storage.place != DEVICE and storage.user_line:
                lines[storage.user_line] += storage.bytes
        line = lines.most_common(1)[0][0] if lines else script.log.engine_at
        yield line, size, f"{shown_bytes(size * target.gpus)} of a node's {shown_bytes(target.host_bytes)}"


def _repeated_draws(script: Script) -> Iterator[Found]:
    """Find sharded tensors in host memory that get the same random values in each call."""
    # torch resets the host's generator after each call
    if script.log.redrawn_at is not None:
        yield script.log.redrawn_at, 0, torch.__version__.partition("+")[0]


LOST_GRADIENTS = Fault(
    code="lost-gradients",
    problem="{detail} trained weights get no gradient: no input of a checkpointed block requires a gradient",
    mend="call model.enable_input_require_grads(), or checkpoint with use_reentrant=False",
    find=_lost_gradients,
)
FAULTS = (
    Fault(
        code="whole-model",
        problem="every rank builds the full model, {bytes}, before ZeRO-3 partitions it ({detail} per rank)",
        mend="build it under deepspeed.zero.Init(), or call from_pretrained or from_config after TrainingArguments",
        find=_whole_model,
    ),
    Fault(
        code="fp32-logits",
        problem="a float32 copy of the logits, {bytes}, lives until the backward pass",
        mend="cast the logits inside the loss call, or compute the loss in chunks (Liger, --loss-chunk)",
        find=_wide_logits,
    ),
    Fault(
        code="padding",
        problem="{detail} of each batch's columns is padding, whose activations need {bytes}",
        mend="pad to the longest row of each batch: padding=True or DataCollatorWithPadding, not padding='max_length'",
        find=_padding,
    ),
    Fault(
        code="second-copy",
        problem="a second copy of the weights on the device, {bytes}",
        mend="if the copy is an average, keep it on the host; if it is a reference model, partition it with ZeRO-3 "
        "or compute its outputs before training (TRL: precompute_ref_log_probs)",
        find=_second_copy,
    ),
    Fault(
        code="frozen-states",
        problem="{detail} weights that get no gradient have master weights and optimizer states, {bytes}",
        mend="freeze these weights before the engine is built, and pass only parameters with requires_grad",
        find=_frozen_states,
    ),
    Fault(
        code="kept-graph",
        problem="retain_graph=True keeps {bytes} of activations until the next batch",
        mend="remove retain_graph from the last backward, or delete the loss before the next forward",
        find=_kept_graph,
    ),
    Fault(
        code="kept-outputs",
        problem="tensors of each batch stay on the device: {bytes} more with every batch",
        mend="keep loss.item() or output.detach().cpu(), not the tensor with its graph",
        find=_kept_outputs,
    ),
    Fault(
        code="kept-gradients",
        problem="the gradients of the last step, {bytes}, live during the forward and any evaluation",
        mend="call zero_grad(set_to_none=True) right after step()",
        find=_kept_gradients,
    ),
    Fault(
        code="half-weights",
        problem="{detail} ({bytes}) for 16-bit weights; without a float32 copy of the weights, small updates are lost",
        mend="keep float32 weights and use autocast, or DeepSpeed with bf16, which has float32 master weights",
        find=_half_weights,
    ),
    Fault(
        code="expert-leaves",
        problem="{detail} chooses experts by token; with ZeRO-3, ranks gather different experts and wait forever",
        mend="call deepspeed.utils.set_z3_leaf_modules(model, [{detail}]) before deepspeed.initialize",
        find=_experts,
    ),
    LOST_GRADIENTS,
    Fault(
        code="unused-search",
        problem="find_unused_parameters=True needlessly searches the graph in each step: all parameters are used",
        mend="remove find_unused_parameters",
        find=_unused_search,
    ),
    Fault(
        code="pinned-memory",
        problem="page-locked memory of {bytes} per rank needs {detail}",
        mend='set "pin_memory": false in the offload section or the DataLoader, or use more nodes',
        find=_pinned,
    ),
    Fault(
        code="repeated-draws",
        problem="torch {detail} gives sharded weights in host memory the same random values in each call; "
        "trunc_normal_, which draws values out of bounds again, runs forever (pytorch issue 180088)",
        mend="initialize the weights before fully_shard, or on the GPU",
        find=_repeated_draws,
    ),
)
