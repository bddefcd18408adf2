"""The timeline of a step: it ends when the time says, its streams do one thing at a time, and nothing is lost."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from tests.plan.stub import BLOCK, BLOCKS, make_cluster, make_profile
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.passes import FlowRun, StageLayers, flow_ends, reduce_groups
from zerofit.plan.rates import rates_of
from zerofit.plan.step_timeline import Span, StepTimeline, step_timeline
from zerofit.plan.time import Timer
from zerofit.report.traces import FORECAST_KINDS, HOST, KINDS, OPTIMIZER

PARAMETERS = BLOCKS * BLOCK
BUCKETS = (BLOCK // 2, 3 * BLOCK, 10**9)  # less than a layer, several layers, the whole model
SIZES: dict[str, Any] = {"micro_batch": 2, "prefetch": 10**7}


def timer_of(nodes: int = 1, blocks: int = BLOCKS, **rates: float) -> Timer:
    cluster = make_cluster(nodes=nodes)
    return Timer(make_profile(blocks, on_host=True), cluster, replace(rates_of(cluster, "bf16"), **rates))


def drawn(layout: PlannedLayout, timer: Timer | None = None, blocks: int = BLOCKS) -> StepTimeline:
    return step_timeline(make_profile(blocks, on_host=True), timer or timer_of(), layout)


def every_layout(ranks: int) -> list[PlannedLayout]:
    """Layouts of all stages with every way of overlapping, offloading and cutting."""
    found = []
    for stage, overlap, steps, again, bucket in product((0, 1, 2, 3), (False, True), (1, 4), (False, True), BUCKETS):
        plain = PlannedLayout(
            zero_stage=stage, overlap=overlap, accumulation=steps, checkpointing=again, bucket=bucket, **SIZES
        )
        found += [replace(plain, dp=ranks), replace(plain, dp=ranks // 2, tp=2), replace(plain, dp=ranks // 4, sp=4)]
        if stage >= 2:
            found.append(replace(plain, dp=ranks, offload_optimizer="cpu"))
        if stage == 3:
            found += [replace(found[-1], offload_param="cpu")]
            found += [replace(found[-1], offload_optimizer="nvme", offload_param=where) for where in ("none", "nvme")]
        if stage < 2 and not overlap:
            found += [replace(plain, dp=ranks // pp, pp=pp) for pp in (2, 4, 8)]
    return found


def streams(timeline: StepTimeline) -> dict[tuple[int, str], list[Span]]:
    found = defaultdict(list)
    for span in timeline.spans:
        found[span.stage, span.stream].append(span)
    return found


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("ahead", [True, False])  # on CPUs launches do not run ahead of kernels
def test_it_ends_with_the_step_and_no_stream_does_two_things_at_once(nodes, ahead):
    timer = timer_of(nodes, ahead=ahead)
    for layout in every_layout(8 * nodes):
        timeline, step_s = step_timeline(make_profile(), timer, layout), timer.step(layout).step_s
        assert timeline.step_s == pytest.approx(step_s, rel=1e-9), layout
        assert max(span.end_s for span in timeline.spans) == pytest.approx(step_s, rel=1e-9), layout
        for spans in streams(timeline).values():
            assert all(0 <= span.start_s < span.end_s for span in spans)
            assert all(one.end_s <= next_one.start_s + 1e-12 for one, next_one in pairwise(spans)), layout


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_step_is_no_shorter_than_its_longest_stream_and_no_longer_than_all_of_them(nodes):
    timer = timer_of(nodes)
    alone = timer_of(nodes, exposed_inside=0.0, exposed_between=0.0)
    for layout in every_layout(8 * nodes):
        step_s, busy = timer.step(layout).step_s, drawn(layout, alone).busy_s().values()
        assert max(busy) <= step_s * (1 + 1e-9) and step_s <= sum(busy) * (1 + 1e-9), layout


def test_every_kind_is_one_that_a_profiler_tells():
    told = {kind for kind, _ in KINDS} | {HOST, OPTIMIZER, "elementwise"}
    for layout in every_layout(8):
        for span in step_timeline(make_profile(), timer_of(1), layout).spans:
            assert FORECAST_KINDS.get(span.kind, span.kind) in told or span.stream == "NVMe", span


def test_layers_wait_for_their_parameters_and_reductions_for_their_layers():
    layout = PlannedLayout(zero_stage=3, dp=8, overlap=True, bucket=BLOCK, checkpointing=True, reuse=0, **SIZES)
    found = streams(drawn(layout))
    for phase in ("forward", "backward"):
        gathered = {s.module: s.end_s for s in found[0, "data parallel"] if s.phase == phase and s.kind == "all-gather"}
        assert len(gathered) == BLOCKS
        for span in found[0, "compute"]:
            if span.phase == phase and span.module:
                assert span.start_s >= gathered[span.module] - 1e-12
    reduced = [s for s in found[0, "data parallel"] if s.kind == "reduce-scatter"]
    ends = sorted({s.module: s.end_s for s in found[0, "compute"] if s.phase == "backward" and s.module}.values())
    assert len(reduced) == BLOCKS
    assert all(span.start_s >= end_s - 1e-12 for span, end_s in zip(reduced, ends, strict=True))


def test_without_overlap_nothing_runs_beside_a_reduction():
    found = streams(drawn(PlannedLayout(zero_stage=3, dp=8, bucket=BLOCK, **SIZES)))
    reduced = [span for span in found[0, "data parallel"] if span.kind == "reduce-scatter"]
    others = [span for spans in found.values() for span in spans if span.kind != "reduce-scatter"]
    assert len(reduced) == BLOCKS
    for one in reduced:
        assert not [s for s in others if s.start_s < one.end_s - 1e-12 and s.end_s > one.start_s + 1e-12]


def test_bytes_and_flops_add_up():
    def total(layout: PlannedLayout, kind: str, what: str = "bytes") -> float:
        return sum(getattr(span, what) for span in drawn(layout).spans if span.kind == kind)

    layout = PlannedLayout(zero_stage=3, dp=8, accumulation=3, bucket=BLOCK, **SIZES)
    # in bf16, in forward alone: the way to backward and through it is within the reuse distance
    assert total(layout, "all-gather") == pytest.approx(3 * 2 * PARAMETERS)
    assert total(replace(layout, reuse=0), "all-gather") == pytest.approx(3 * 2 * 2 * PARAMETERS)  # in both
    assert total(layout, "reduce-scatter") == pytest.approx(3 * 2 * PARAMETERS)
    assert total(layout, "product", "flops") == pytest.approx(3 * 6 * PARAMETERS * 1024 * 2)
    layout = PlannedLayout(zero_stage=1, dp=8, accumulation=3, **SIZES)
    assert total(layout, "all-reduce") == pytest.approx(2 * PARAMETERS)  # in the last micro batch alone
    assert total(layout, "all-gather of stepped parameters") == pytest.approx(2 * PARAMETERS)
    layout = PlannedLayout(zero_stage=0, dp=2, pp=4, accumulation=6, **SIZES)
    out = 2 * 1024 * 1024 * 2  # of two samples
    assert total(layout, "send") == pytest.approx(6 * 3 * 2 * out)
    assert total(layout, "product", "flops") == pytest.approx(6 * 6 * PARAMETERS * 1024 * 2)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (4, 3), (8, 20)])
def test_pipeline_stages_follow_the_engines_schedule(stages, micro_batches):
    layout = PlannedLayout(zero_stage=0, dp=1, pp=stages, accumulation=micro_batches, **SIZES)
    found = streams(drawn(layout))
    for stage in range(stages):
        spans = [(s.phase, s.micro_batch) for s in found[stage, "compute"] if s.micro_batch >= 0]
        asked = []
        for number, instructions in enumerate(TrainSchedule(micro_batches, stages, stage).steps()):
            for one in instructions:
                if isinstance(one, (ForwardPass, BackwardPass)):
                    mine = TrainSchedule(micro_batches, stages, stage)._step_to_micro_batch(number)[0]
                    asked.append(("forward" if isinstance(one, ForwardPass) else "backward", mine))
        assert list(dict.fromkeys(spans)) == asked


@pytest.mark.parametrize(("blocks", "equal"), [(8, True), (10, False)])
def test_a_pipeline_is_never_faster_than_its_stages_let_it_be(blocks, equal):
    """The reference: each stage does its next micro batch as soon as its neighbors have sent what it takes."""
    stages, micro_batches = 4, 7
    layout = PlannedLayout(zero_stage=0, dp=1, pp=stages, accumulation=micro_batches, **SIZES)
    timer = timer_of(nodes=1, blocks=blocks)
    parts = timer.parts(layout)
    one, sent_s = parts.rank_pass, parts.send_s
    own = [(one.total(stage, one.forward) + sent_s, one.total(stage, one.backward) + sent_s) for stage in one.stages]
    ends: dict[tuple[str, int, int], float] = {}

    def end(kind: str, stage: int, n: int) -> float:
        """When a micro batch of a stage is done; in the order of one forward, one backward."""
        if not (0 <= stage < stages and 0 <= n < micro_batches):
            return 0.0
        if (kind, stage, n) not in ends:
            ahead, backward = stages - stage, kind == "backward"
            needs = [end(kind, stage + 1, n) if backward else end(kind, stage - 1, n)]
            if backward:
                needs += [end("forward", stage, min(n + ahead, micro_batches) - 1), end("backward", stage, n - 1)]
            else:
                needs += [end("forward", stage, n - 1), end("backward", stage, n - ahead)]
            ends[kind, stage, n] = max(needs) + own[stage][backward]
        return ends[kind, stage, n]

    free_s = end("backward", 0, micro_batches - 1)
    others_s = sum(task.seconds for task in (*parts.step, *(micro_batches - 1) * parts.later))
    paced_s = timer.step(layout).step_s - parts.reduce_s - others_s
    assert free_s == pytest.approx(paced_s) if equal else free_s < paced_s < 1.3 * free_s


def test_the_closed_form_of_a_flow_is_its_schedule():
    draw = random.Random(0)
    for _ in range(2000):
        runs = [
            FlowRun(
                draw.randint(1, 4),
                draw.randint(1, 4),
                draw.choice((0.0, draw.random())),
                draw.random(),
                draw.choice((0.0, 3 * draw.random())),
            )
            for _ in range(draw.randint(1, 4))
        ]
        fetched = computed = 0.0
        reduced = sum(run.groups * run.layers * run.fetch_s for run in runs)
        for run in runs:
            for _ in range(run.groups):
                for _ in range(run.layers):
                    fetched += run.fetch_s
                    computed = max(computed, fetched) + run.compute_s
                if run.reduce_s:
                    reduced = max(reduced, computed) + run.reduce_s
        expected = (fetched, computed, max(reduced, computed))
        assert flow_ends(runs) == pytest.approx(expected)


@pytest.mark.parametrize("bucket", [1, *BUCKETS, 5 * BLOCK])
def test_buckets_are_filled_by_whole_layers_and_have_every_layer(bucket):
    one = timer_of(blocks=17).parts(PlannedLayout(zero_stage=2, micro_batch=1, dp=8)).rank_pass
    stage = one.slowest
    groups = list(reduce_groups(one, stage, bucket))
    assert sum(group.groups * member.count for group in groups for member in group.members) == 17
    assert sum(group.groups * group.elements for group in groups) == 17 * BLOCK
    assert all(bucket <= group.elements < bucket + BLOCK for group in groups[:-1])
    assert stage == (StageLayers(0, 17),)
    assert math.isclose(sum(group.groups for group in groups), -(-17 // -(-bucket // BLOCK)))


def test_a_step_of_other_speed_has_the_same_timeline():
    layout = PlannedLayout(zero_stage=2, dp=8, **SIZES)
    timeline = drawn(layout)
    slower = timeline.scaled(2.5)
    assert slower.step_s == pytest.approx(2.5 * timeline.step_s)
    assert [s.end_s for s in slower.spans] == pytest.approx([2.5 * s.end_s for s in timeline.spans])
    assert [s.bytes for s in slower.spans] == [s.bytes for s in timeline.spans]
