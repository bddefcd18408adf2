"""Write a forecast step in the Chrome trace format, for Perfetto and chrome://tracing.

The format is the Chromium project's "Trace Event Format". Times are microseconds, rounded to nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from zerofit.plan.memory import LayerMoment
from zerofit.plan.step_timeline import Span, StepTimeline
from zerofit.plan.time import Stream

STREAMS: tuple[str, ...] = ("host", *(stream for stream in get_args(Stream) if stream != "host"))
Event = dict[str, object]


class MemorySample(NamedTuple):
    """The live bytes of each kind on a stage's rank, from `at_s` to the next sample."""

    stage: int
    at_s: float  # seconds into the step
    bytes: Mapping[str, float]


def step_trace(
    timeline: StepTimeline, memory: Iterable[MemorySample], ranks: Mapping[int, int], about: Mapping[str, object]
) -> dict[str, object]:
    """Return the trace of `ranks` (stage -> rank).

    Each rank is a process, and each of its streams is a thread. `about`: a description of the forecast, for
    "otherData".
    """
    spans = [span for span in timeline.spans if span.stage in ranks]
    streams = list(dict.fromkeys((*STREAMS, *(span.stream for span in spans))))
    events = [*_names(spans, ranks, streams), *_span_events(spans, ranks, streams)]
    events += [
        {"ph": "C", "name": "memory", "pid": ranks[sample.stage], "ts": _us(sample.at_s), "args": dict(sample.bytes)}
        for sample in sorted(memory, key=lambda sample: sample.at_s)
        if sample.stage in ranks
    ]
    other = {"made_by": "zerofit", "step_s": timeline.step_s, **about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def layer_memory(timeline: StepTimeline, stage: int, moments: Sequence[LayerMoment]) -> list[MemorySample]:
    """Return a stage's live memory when each layer and the optimizer step start.

    The times come from `timeline`. If `moments` lacks a layer, its bytes are interpolated from its neighbors.
    """
    known: defaultdict[str, dict[int, Mapping[str, float]]] = defaultdict(dict)
    for moment in moments:
        known[moment.phase][moment.layer] = moment.bytes
    spans = sorted((s for s in timeline.spans if s.stage == stage), key=lambda span: span.start_s)
    spans = [span for span in spans if span.phase == "step" or (span.module and span.stream in ("compute", "host"))]
    layers = {module: layer for layer, module in enumerate(dict.fromkeys(s.module for s in spans if s.module))}
    samples, previous = [], None
    for span in spans:
        layer_pass = (span.phase, span.micro_batch, span.module)
        if layer_pass != previous:
            samples.append(MemorySample(stage, span.start_s, _between(known[span.phase], layers.get(span.module, -1))))
        previous = layer_pass
    if -1 in known["backward"]:  # a moment after its last layer
        end_s = max(span.end_s for span in spans if span.phase == "backward")
        samples.append(MemorySample(stage, end_s, known["backward"][-1]))
    return samples


def _between(known: Mapping[int, Mapping[str, float]], layer: int) -> Mapping[str, float]:
    """Return the bytes of a layer, interpolated between known neighbors if necessary."""
    if layer in known:
        return known[layer]
    below = max((index for index in known if -1 < index < layer), default=None)
    above = min((index for index in known if index > layer), default=None)
    if below is None or above is None:
        return known.get(-1, {})
    share = (layer - below) / (above - below)
    kinds = dict.fromkeys([*known[below], *known[above]])
    return {k: (1 - share) * known[below].get(k, 0) + share * known[above].get(k, 0) for k in kinds}


def _names(spans: Iterable[Span], ranks: Mapping[int, int], streams: Sequence[str]) -> Iterator[Event]:
    used = {(span.stage, span.stream) for span in spans}
    for stage, rank in ranks.items():
        words = f"rank {rank}" + (f" (stage {stage})" if len(ranks) > 1 else "")
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": words}}
        for number, stream in enumerate(streams, start=1):
            if (stage, stream) in used:
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}
                # Viewers would otherwise sort the threads of a process by their names.
                order = {"sort_index": number}
                yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": order}


def _span_events(spans: Iterable[Span], ranks: Mapping[int, int], streams: Sequence[str]) -> Iterator[Event]:
    """Yield a complete event ("X") for each span."""
    # events of one stream must not overlap, even after rounding
    ends_us: defaultdict[tuple[int, str], float] = defaultdict(float)
    for span in sorted(spans, key=lambda span: span.start_s):
        start_us = max(_us(span.start_s), ends_us[span.stage, span.stream])
        end_us = ends_us[span.stage, span.stream] = max(_us(span.end_s), start_us)
        amounts = {"bytes": round(span.bytes), "flops": round(span.flops)}
        yield {
            "ph": "X",
            "name": f"{span.module}: {span.kind}" if span.module else span.kind,
            "cat": span.phase,
            "pid": ranks[span.stage],
            "tid": streams.index(span.stream) + 1,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "args": {
                "module": span.module,
                "kind": span.kind,
                "micro_batch": span.micro_batch,
                **{name: amount for name, amount in amounts.items() if amount},
            },
        }


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
