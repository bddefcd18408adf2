"""Seconds of an optimizer step: compute, collectives, transfers and the step itself, as DeepSpeed orders them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from zerofit.plan.collectives import RankGroup, collective_s, group_of
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.pipeline import stage_bounds
from zerofit.plan.rates import CONTENTION, ZERO3_HOOK_S, Rates
from zerofit.spec.cluster import Cluster
from zerofit.spec.precision import ELEMENT_BYTES
from zerofit.spec.profile import LayerCost, Linear, Profile, setting

# fp32 master, two moments: 12 read and 12 written; the fp32 gradient made (4), unscaled (8), its norm taken (4), read
# by Adam (4); the parameter written in the model's dtype (runtime/zero/stage_1_and_2.py, step)
ADAM_BYTES = 44
# of host memory: the C++ op reads gradient and states and writes states (28), clipping reads and writes the gradient
# (8, stage3.py:2988), the stepped parameter is converted (6, stage3.py:2858)
HOST_ADAM_BYTES = 42
STATE_BYTES = 12  # what NVMe offload reads and writes of each element: master and moments


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step that the parts add to it; what hides behind compute is not in them."""

    step_s: float
    compute_s: float  # forward and backward of all micro batches
    gather_s: float  # ZeRO-3: parameters, where they are waited for
    reduce_s: float  # gradients
    tensor_s: float  # all-reduces of tensor parallelism
    sequence_s: float  # all-to-alls of sequence parallelism
    bubble_s: float  # a pipeline that fills and drains
    optimizer_s: float  # Adam, with the all-gather of what it stepped
    transfer_s: float  # between device, host and disks, for offloading

    def stretched(self, factor: float) -> StepTime:
        """All parts times a factor."""
        return StepTime(**{name: factor * value for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class _Pass:
    """One micro batch through the slowest pipeline stage."""

    forward_s: float
    backward_s: float
    tensor_bytes: float
    sequence_bytes: float
    layers: float  # how many the stage has
    parameters: float  # elements of the stage with most, on one rank
    matrices: float  # tensors that ZeRO-3 shares out; vectors stay on every rank
    handed_on_bytes: float


class Timer:
    """Forecasts of step times for one model on one cluster; parts that layouts share are computed once."""

    def __init__(self, profile: Profile, cluster: Cluster, rates: Rates):
        self._profile, self._cluster, self.rates = profile, cluster, rates
        self._passes: dict[tuple, _Pass] = {}

    def step(self, layout: PlannedLayout) -> StepTime:
        """The time of one optimizer step. KeyError where the layout's setting is not in the profile."""
        one, rates, b = self._pass(layout), self.rates, ELEMENT_BYTES[layout.precision]
        micro_batches = layout.accumulation
        shards = group_of(layout.dp * layout.sp, layout.tp, self._cluster.gpus)
        tensor_s, sequence_s = self._model_parallel_s(layout, one)
        gather_s = self._gather_s(layout, one, shards, b)
        reduce_s = self._reduce_s(layout, one, shards, b)
        forward_s = one.forward_s + (tensor_s + sequence_s) / 2
        backward_s = one.backward_s + (tensor_s + sequence_s) / 2
        gather_wait_s, reduce_wait_s = self._waits(layout, forward_s, backward_s, gather_s, reduce_s)
        handed_s = 2 * collective_s("send", one.handed_on_bytes, 1, self._neighbours(layout), rates)
        a_micro_batch_s = forward_s + backward_s + gather_wait_s + handed_s
        bubble_s = (layout.pp - 1) * a_micro_batch_s
        reductions = micro_batches if layout.zero_stage >= 2 else 1
        optimizer_s = self._optimizer_s(layout, one, shards, b)
        transfer_s = self._transfer_s(layout, one, shards, b)
        return StepTime(
            step_s=micro_batches * a_micro_batch_s + bubble_s + reductions * reduce_wait_s + optimizer_s + transfer_s,
            compute_s=micro_batches * (one.forward_s + one.backward_s),
            gather_s=micro_batches * gather_wait_s,
            reduce_s=reductions * reduce_wait_s,
            tensor_s=micro_batches * tensor_s,
            sequence_s=micro_batches * sequence_s,
            bubble_s=bubble_s + micro_batches * handed_s,
            optimizer_s=optimizer_s,
            transfer_s=transfer_s,
        )

    def _pass(self, layout: PlannedLayout) -> _Pass:
        degrees = (layout.tp, layout.sp, layout.pp, layout.zero_stage == 3)
        key = (layout.precision, layout.checkpointing, layout.micro_batch, *degrees)
        if key not in self._passes:
            self._passes[key] = self._compute_pass(layout)
        return self._passes[key]

    def _compute_pass(self, layout: PlannedLayout) -> _Pass:
        key = setting(layout.precision, layout.checkpointing, layout.tp, layout.sp)
        costs, layers, m = self._profile.costs[key], self._profile.layers, layout.micro_batch
        # DeepSpeed fetches and releases module by module: about one for each tensor
        tensors = [
            (len(cost.matrices or layer.matrices), len(cost.vectors or layer.vectors))
            for cost, layer in zip(costs, layers, strict=True)
        ]
        hook_s = ZERO3_HOOK_S.value if layout.zero_stage == 3 else 0.0
        passes = [
            tuple(self._layer_s(cost, m, phase, hook_s * sum(held)) for phase in ("forward", "backward"))
            for cost, held in zip(costs, tensors, strict=True)
        ]
        stages = self._stages(layout.pp)
        slowest = max(stages, key=lambda stage: sum(n * sum(passes[i]) for i, n in stage))
        sizes = [
            sum(cost.matrices or layer.matrices) + sum(cost.vectors or layer.vectors)
            for cost, layer in zip(costs, layers, strict=True)
        ]

        def total(line: str) -> float:
            return sum(n * getattr(costs[i], line).at(m) for i, n in slowest)

        again = 1.5 if layout.checkpointing else 1.0  # the forward's collectives run again in backward
        return _Pass(
            forward_s=sum(n * passes[i][0] for i, n in slowest),
            backward_s=sum(n * passes[i][1] for i, n in slowest),
            tensor_bytes=2 * again * total("tp_allreduce_bytes"),
            sequence_bytes=2 * again * total("sp_alltoall_bytes"),
            layers=sum(n for _, n in slowest),
            parameters=max(sum(n * sizes[i] for i, n in stage) for stage in stages),
            matrices=sum(n * tensors[i][0] for i, n in slowest),
            handed_on_bytes=costs[stages[0][-1][0]].output_bytes.at(m) if layout.pp > 1 else 0.0,
        )

    def _stages(self, pp: int) -> list[list[tuple[int, int]]]:
        """For each pipeline stage, which layers it has: (place in profile.layers, how many of that run)."""
        flat = [index for index, layer in enumerate(self._profile.layers) for _ in range(layer.count)]
        return [sorted(Counter(flat[first:last]).items()) for first, last in stage_bounds(self._profile, pp)]

    def _layer_s(self, cost: LayerCost, micro_batch: int, phase: str, hooks_s: float) -> float:
        """Compute-bound and memory-bound kernels take turns, so their times add; launches run ahead on GPUs."""
        rates = self.rates
        flops: Linear = getattr(cost, f"{phase}_flops")
        moved: Linear = getattr(cost, f"{phase}_bytes")
        busy_s = flops.at(micro_batch) / rates.flops + moved.at(micro_batch) / rates.memory
        launch_s = getattr(cost, f"{phase}_ops") * rates.launch_s + hooks_s
        return max(busy_s, launch_s) if rates.ahead else busy_s + launch_s

    def _neighbours(self, layout: PlannedLayout) -> RankGroup:
        """A pipeline stage and the next: pipe is the outermost axis of DeepSpeed's topology."""
        return group_of(2 if layout.pp > 1 else 1, layout.dp, self._cluster.gpus)

    def _model_parallel_s(self, layout: PlannedLayout, one: _Pass) -> tuple[float, float]:
        """All-reduces of tensor and all-to-alls of sequence parallelism in one micro batch; compute waits for them."""
        gpus, again = self._cluster.gpus, 3 if layout.checkpointing else 2
        tp, sp = group_of(layout.tp, 1, gpus), group_of(layout.sp, 1, gpus)
        return (
            collective_s("all_reduce", one.tensor_bytes, 2 * again * one.layers, tp, self.rates),
            collective_s("all_to_all", one.sequence_bytes, 4 * again * one.layers, sp, self.rates),
        )

    def _gather_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """ZeRO-3's all-gathers in one micro batch: every parameter in forward and again in backward."""
        if layout.zero_stage < 3:
            return 0.0
        whole = b * one.parameters
        calls = min(one.matrices, one.parameters / max(1, layout.prefetch) + one.layers)
        seconds = collective_s("all_gather", whole, calls, shards, self.rates)
        if layout.offload_param == "cpu":
            seconds += whole / shards.size / self.rates.pcie
        elif layout.offload_param == "nvme":
            seconds += whole / shards.size * self._cluster.gpus / self.rates.nvme_read
        return 2 * seconds

    def _reduce_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """All gradients once. Stages 0-2 all-reduce buckets and keep their part (stage_1_and_2.py, average_tensor)."""
        op = "reduce_scatter" if layout.zero_stage == 3 else "all_reduce"
        calls = max(1.0, one.parameters / max(1, layout.bucket))
        return collective_s(op, b * one.parameters, calls, shards, self.rates)

    def _waits(
        self, layout: PlannedLayout, forward_s: float, backward_s: float, gather_s: float, reduce_s: float
    ) -> tuple[float, float]:
        """How long compute waits for gathers in a micro batch, and for one reduction of gradients.

        Gathers are issued ahead of their layers. Reductions run beside backward with overlap_comm alone; without it
        they are on its stream (stage3.py:341, stage_1_and_2.py, average_tensor). Stage 0 reduces after backward.
        """
        gather_wait_s = _beside(gather_s / 2, forward_s) + _beside(gather_s / 2, backward_s)
        if not layout.overlap or layout.zero_stage == 0 or layout.pp > 1:
            return gather_wait_s, reduce_s
        idle_s = max(0.0, backward_s - gather_s / 2)  # of the links, while backward computes
        last_bucket_s = reduce_s * min(1.0, layout.bucket / max(1, self._pass(layout).parameters))
        return gather_wait_s, max(_beside(reduce_s, idle_s), last_bucket_s)

    def _optimizer_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """Adam on a rank's share, then stages 1 and 2 gather what was stepped."""
        share = one.parameters / (shards.size if layout.zero_stage else 1)
        gathered_s = 0.0
        if layout.zero_stage in (1, 2):
            calls = max(1.0, one.parameters / max(1, layout.bucket))
            gathered_s = collective_s("all_gather", b * one.parameters, calls, shards, self.rates)
        if layout.offload_optimizer == "none":
            return share * ADAM_BYTES / self.rates.memory + gathered_s
        return share * self._cluster.gpus * HOST_ADAM_BYTES / self.rates.host + gathered_s

    def _transfer_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """What offloading the optimizer moves: gradients, stepped parameters, states from and to the disks.

        Gradients of earlier micro batches come up, are added to and go down again: at stage 3 a rank's share
        (stage3.py:2015), at stage 2 those of all parameters on every rank (stage_1_and_2.py:1809). The sum goes down in
        float32.
        """
        if layout.offload_optimizer == "none":
            return 0.0
        share, steps = one.parameters / shards.size, layout.accumulation
        if layout.zero_stage == 3:
            accumulated = 2 * steps * b * share
        else:
            accumulated = (2 * steps - 1) * b * one.parameters if steps > 1 else 0.0
        up = share * b if layout.offload_param == "none" else 0.0
        seconds = (accumulated + 4 * share + up) / self.rates.pcie
        if layout.offload_optimizer == "nvme":
            of_node = share * self._cluster.gpus * STATE_BYTES
            seconds += of_node / self.rates.nvme_read + of_node / self.rates.nvme_write
        return seconds


def _beside(collective_s: float, compute_s: float) -> float:
    """Seconds that a collective adds to compute which it runs beside."""
    return max(0.0, collective_s - compute_s) + CONTENTION.value * min(collective_s, compute_s)


def model_flops(profile: Profile, precision: str) -> float:
    """FLOPs of one sample's forward and backward, counted as three forwards (train/metrics.py does the same).

    KeyError where the plain setting was not traced.
    """
    costs = profile.costs[setting(precision, False, 1, 1)]
    pairs = zip(profile.layers, costs, strict=True)
    return 3 * sum(layer.count * cost.forward_flops.per_sample for layer, cost in pairs)
