"""The trace of a forecast step: a valid file of the Chrome trace format, as long as the step, with its memory."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.plan.stub import BLOCKS, make_cluster, make_profile
from tests.plan.test_step_timeline import every_layout, timer_of
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.plan.step_timeline import step_timeline
from zerofit.plan.step_trace import layer_memory, step_trace

LAYOUTS = random.Random(0).sample(every_layout(8), 60)


def traced(layout: PlannedLayout) -> dict[str, Any]:
    profile = make_profile()
    timeline, forecaster = step_timeline(profile, timer_of(), layout), Forecaster(profile)
    ranks = {stage: stage * (layout.world_size // layout.pp) for stage in range(layout.pp)}
    memory = [sample for stage in ranks for sample in layer_memory(timeline, stage, forecaster.along(layout, stage))]
    return json.loads(json.dumps(step_trace(timeline, memory, ranks, {"forecast": str(layout)})))


def check_format(trace: dict[str, Any]) -> None:
    """Check what the "Trace Event Format" asks of complete events, counters and metadata."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["dur"] >= 0 and isinstance(event["cat"], str) and (event["pid"], event["tid"]) in named
    assert len(set(named.values())) <= len(named)


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_streams_are_threads_that_do_one_thing_at_a_time_until_the_step_ends(layout):
    trace = traced(layout)
    check_format(trace)
    threads = defaultdict(list)
    for event in complete(trace):
        threads[event["pid"], event["tid"]].append(event)
    assert {pid for pid, _ in threads} == {stage * (8 // layout.pp) for stage in range(layout.pp)}
    for events in threads.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(sorted(events, key=lambda e: e["ts"])))
    ends = [event["ts"] + event["dur"] for event in complete(trace)]
    assert max(ends) / 1e6 == pytest.approx(timer_of().step(layout).step_s, abs=2e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_memory_counter_reaches_the_forecast_peak(layout):
    counters = [event for event in traced(layout)["traceEvents"] if event["ph"] == "C"]
    highest = max(sum(event["args"].values()) for event in counters)
    memory = Forecaster(make_profile()).memory(layout)
    if memory.peak_phase == "init":
        assert highest <= memory.peak_bytes
    else:
        assert highest == pytest.approx(memory.peak_bytes, abs=2)


def test_memory_rises_in_forward_and_falls_in_backward():
    counters = [e for e in traced(PlannedLayout(zero_stage=0, dp=8, micro_batch=2))["traceEvents"] if e["ph"] == "C"]
    activations = [event["args"].get("activations", 0) for event in counters]
    assert len(counters) == 2 * BLOCKS + 2  # each layer twice, after the last, the step
    rising, falling = activations[:BLOCKS], activations[BLOCKS : 2 * BLOCKS]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True) and rising[0] < rising[-1]


def test_a_rank_of_one_stage_alone():
    layout = PlannedLayout(zero_stage=0, dp=2, pp=4, micro_batch=1, accumulation=4)
    timeline = step_timeline(make_profile(), timer_of(), layout)
    trace = step_trace(timeline, [], {2: 5}, {})
    assert {event["pid"] for event in trace["traceEvents"]} == {5}
    sent = [e["args"]["bytes"] for e in complete(trace) if e["args"]["kind"] == "send"]
    assert sent == [1024 * 1024 * 2] * 8  # activations on, gradients back
    assert make_cluster().ranks == 8
