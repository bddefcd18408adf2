"""Seconds of an optimizer step: compute, collectives, transfers and the step itself, as DeepSpeed orders them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from zerofit.plan.collectives import RankGroup, collective_s, group_of
from zerofit.plan.kernels import kernels_s, launches
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.pipeline import stage_bounds
from zerofit.plan.rates import Rates
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import Profile, setting

# fp32 master, two moments: 12 read and 12 written; the fp32 gradient made (4), unscaled (8), its norm taken (4), read
# by Adam (4); the parameter written in the model's dtype (runtime/zero/stage_1_and_2.py, step)
ADAM_BYTES = 44
# of host memory: the C++ op reads gradient and states and writes states (28), clipping reads and writes the gradient
# (8, stage3.py:2988), the stepped parameter is converted (6, stage3.py:2858)
HOST_ADAM_BYTES = 42
STATE_BYTES = 12  # what NVMe offload reads and writes of each element: master and moments


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and what the parts add to it; what overlaps with compute is not in them."""

    step_s: float
    compute_s: float  # forward and backward of all micro batches
    gather_s: float  # ZeRO-3: parameters, where they are waited for
    reduce_s: float  # gradients
    tensor_s: float  # all-reduces of tensor parallelism
    sequence_s: float  # all-to-alls of sequence parallelism
    bubble_s: float  # a pipeline that fills and drains
    optimizer_s: float  # Adam, with the all-gather of what it stepped
    transfer_s: float  # between device, host and disks, for offloading

    def scaled(self, factor: float) -> StepTime:
        """Return all parts times a factor."""
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
    stage_output_bytes: float


class Timer:
    """Forecasts of step times for one model on one cluster; what layouts share is computed once."""

    def __init__(self, profile: Profile, cluster: Cluster, rates: Rates):
        self._profile, self._cluster, self.rates = profile, cluster, rates
        self._passes: dict[tuple, _Pass] = {}
        self._known_works: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}

    def step(self, layout: PlannedLayout) -> StepTime:
        """Return the time of one optimizer step. KeyError where the layout's setting is not in the profile."""
        one, b, gpus = self._pass(layout), layout.element_bytes, self._cluster.gpus
        micro_batches = layout.accumulation
        shards = group_of(layout.zero_ranks, layout.tp, gpus)
        tensor_s, sequence_s = self._model_parallel_s(layout, one)
        gather_s = self._gather_s(layout, one, shards, b)
        reduce_s = self._reduce_s(layout, one, shards, b)
        forward_s = one.forward_s + (tensor_s + sequence_s) / 2
        backward_s = one.backward_s + (tensor_s + sequence_s) / 2
        gather_wait_s, reduce_wait_s = self._waits(layout, shards, forward_s, backward_s, gather_s, reduce_s)
        # a pipeline stage and the next: pipe is the outermost axis of DeepSpeed's topology
        neighbours = group_of(2 if layout.pp > 1 else 1, layout.world_size // layout.pp, gpus)
        send_s = 2 * collective_s("send", one.stage_output_bytes, 1, neighbours, self.rates)
        micro_batch_s = forward_s + backward_s + gather_wait_s + send_s
        bubble_s = (layout.pp - 1) * micro_batch_s
        reductions = micro_batches if layout.zero_stage >= 2 else 1
        optimizer_s = self._optimizer_s(layout, one, shards, b)
        transfer_s = self._transfer_s(layout, one, shards, b)
        return StepTime(
            step_s=micro_batches * micro_batch_s + bubble_s + reductions * reduce_wait_s + optimizer_s + transfer_s,
            compute_s=micro_batches * (one.forward_s + one.backward_s),
            gather_s=micro_batches * gather_wait_s,
            reduce_s=reductions * reduce_wait_s,
            tensor_s=micro_batches * tensor_s,
            sequence_s=micro_batches * sequence_s,
            bubble_s=bubble_s + micro_batches * send_s,
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
        hook_s = self.rates.hook_s if layout.zero_stage == 3 else 0.0
        hooked = (1, 2 if layout.checkpointing else 1)  # in backward the forward's hooks run again
        passes = [
            tuple(self._layer_s(*work, n * hook_s * sum(counts)) for work, n in zip(works, hooked, strict=True))
            for works, counts in zip(self._works(key, m), tensors, strict=True)
        ]
        # for each pipeline stage, which layers it has: (place in profile.layers, how many of that run)
        flat = [index for index, layer in enumerate(layers) for _ in range(layer.count)]
        bounds = stage_bounds(self._profile, layout.pp)
        stages = [sorted(Counter(flat[first:last]).items()) for first, last in bounds]
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
            stage_output_bytes=costs[stages[0][-1][0]].output_bytes.at(m) if layout.pp > 1 else 0.0,
        )

    def _works(self, key: str, micro_batch: int) -> list[list[tuple[float, float]]]:
        """Return for each layer, forward and backward, the seconds of its kernels and of their launches."""
        if (key, micro_batch) not in self._known_works:
            self._known_works[key, micro_batch] = [
                [
                    (
                        self.rates.engine * kernels_s(kernels, micro_batch, self.rates),
                        launches(kernels) * self.rates.launch_s,
                    )
                    for kernels in (cost.forward_kernels, cost.backward_kernels)
                ]
                for cost in self._profile.costs[key]
            ]
        return self._known_works[key, micro_batch]

    def _layer_s(self, busy_s: float, launch_s: float, hooks_s: float) -> float:
        """Time a layer in one direction; where launches and hooks run ahead of its kernels, the slower of the two."""
        return max(busy_s, launch_s + hooks_s) if self.rates.ahead else busy_s + launch_s + hooks_s

    def _model_parallel_s(self, layout: PlannedLayout, one: _Pass) -> tuple[float, float]:
        """Time all-reduces of tensor and all-to-alls of sequence parallelism per micro batch; nothing overlaps."""
        gpus, again = self._cluster.gpus, 3 if layout.checkpointing else 2
        tp, sp = group_of(layout.tp, 1, gpus), group_of(layout.sp, layout.tp, gpus)
        return (
            collective_s("all_reduce", one.tensor_bytes, 2 * again * one.layers, tp, self.rates),
            collective_s("all_to_all", one.sequence_bytes, 4 * again * one.layers, sp, self.rates),
        )

    def _gather_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """Time ZeRO-3's all-gathers in one micro batch: every parameter in forward and again in backward."""
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
        """Time all gradients; stages 0-2 all-reduce buckets and keep their part (stage_1_and_2.py, average_tensor)."""
        op = "reduce_scatter" if layout.zero_stage == 3 else "all_reduce"
        calls = max(1.0, one.parameters / max(1, layout.bucket))
        return collective_s(op, b * one.parameters, calls, shards, self.rates)

    def _waits(
        self,
        layout: PlannedLayout,
        shards: RankGroup,
        forward_s: float,
        backward_s: float,
        gather_s: float,
        reduce_s: float,
    ) -> tuple[float, float]:
        """Return how long compute waits for gathers in a micro batch, and for one reduction of gradients.

        Gathers are issued ahead of their layers. Reductions run beside backward with overlap_comm alone; without it
        they are on its stream (stage3.py:341, stage_1_and_2.py, average_tensor). Stage 0 reduces after backward.
        """
        exposed = self.rates.exposed_between if shards.nodes > 1 else self.rates.exposed_inside
        gather_wait_s = _beside(gather_s / 2, forward_s, exposed) + _beside(gather_s / 2, backward_s, exposed)
        if not layout.overlap or layout.zero_stage == 0 or layout.pp > 1:
            return gather_wait_s, reduce_s
        idle_s = max(0.0, backward_s - gather_s / 2)  # of the links, while backward computes
        last_bucket_s = reduce_s * min(1.0, layout.bucket / max(1, self._pass(layout).parameters))
        return gather_wait_s, max(_beside(reduce_s, idle_s, exposed), last_bucket_s)

    def _optimizer_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """Time Adam on a rank's share, then the all-gather of stages 1 and 2."""
        share = one.parameters / (shards.size if layout.zero_stage else 1)
        gathered_s = 0.0
        if layout.zero_stage in (1, 2):
            calls = max(1.0, one.parameters / max(1, layout.bucket))
            gathered_s = collective_s("all_gather", b * one.parameters, calls, shards, self.rates)
        if layout.offload_optimizer == "none":
            return share * ADAM_BYTES / self.rates.memory + gathered_s
        return share * self._cluster.gpus * HOST_ADAM_BYTES / self.rates.host + gathered_s

    def _transfer_s(self, layout: PlannedLayout, one: _Pass, shards: RankGroup, b: int) -> float:
        """Time the transfers of an offloaded optimizer: gradients, stepped parameters, states from and to the disks.

        Gradients are accumulated on the host: at stage 3 a rank's share (stage3.py:2015), at stage 2 those of all
        parameters on every rank (stage_1_and_2.py:1809). Their sum is transferred in float32.
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


def _beside(collective_s: float, compute_s: float, exposed: float) -> float:
    """Return the seconds that a collective adds to the compute it overlaps with; `exposed`: the share that shows."""
    return max(0.0, collective_s - compute_s) + exposed * min(collective_s, compute_s)


def model_flops(profile: Profile, precision: str) -> float:
    """Return the FLOPs of one sample's forward and backward, counted as three forwards (as train/metrics.py does).

    KeyError where the plain setting was not traced.
    """
    costs = profile.costs[setting(precision, False, 1, 1)]
    pairs = zip(profile.layers, costs, strict=True)
    return 3 * sum(layer.count * cost.forward_flops.per_sample for layer, cost in pairs)
