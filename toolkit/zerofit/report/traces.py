"""Read and compare traces of steps: forecast by zerofit, or measured by torch.profiler."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict, TypeGuard, cast

from zerofit.report.plot import PICTURES, save
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.files import field_data, refuse_target
from zerofit.spec.foreign import Unreadable, read_json, refused
from zerofit.spec.local_machine import MeasuredKernel
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# From a torch.profiler trace to seconds by layer and kind:
#
#     with kernels     each kernel counts with its duration; its layer and phase are those of the last mark before
#                      its launch on the host, which the shared correlation id identifies
#     without (CPU)    ops nest, so an op counts with its own time: its duration less that of the ops inside it;
#                      the rest is Python, unless the thread waits for a collective of gloo's threads
HINT = "give a file from --trace of `zerofit plan` or `simulate`, or traces/rank-0-step-3.json of a run folder"
MAX_BYTES = 2 << 30  # torch.profiler writes hundreds of MB per step
MAX_TIME = 1e18  # microseconds since 1970 are 1.8e15
HOST, OPTIMIZER = "launches and hooks", "optimizer"
# The order counts: names of flash attention's kernels also contain "cutlass".
KINDS = (  # kind and a pattern for names; the first match counts
    ("all-gather", r"all_?gather"),
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-reduce", r"all_?reduce"),
    ("all-to-all", r"all_?to_?all"),
    ("send", r"\b(send|recv)"),
    ("attention", r"attention|flash|fmha"),
    ("convolution", r"conv(olution|2d|1d)|cudnn|implicit"),
    ("product", r"::(mm|bmm|addmm|baddbmm|matmul|linear)$|gemm|cutlass|cublas|xmma"),
    ("normalisation", r"norm|softmax"),
    ("embedding", r"embedding|index_select"),
    ("copy", r"copy|memcpy|memset|::to$|::cat$|::fill_|::zero_"),
)
NOTHING_COMPUTED = (
    "_?(as_strided|view|view_as|slice|narrow|select|transpose|t|reshape|detach|expand|squeeze|unsqueeze|permute|chunk|"
    "split|empty|empty_like|empty_strided|resolve_conj|resolve_neg|alias|item|result_type|unsafe_view|has_\\w+)"
)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send")
FORECAST_KINDS = {  # kind in the timeline -> kind in a profiler's trace
    **dict.fromkeys(("launches", "launches of the step"), HOST),
    "passes of the step": OPTIMIZER,
    "gradients into buckets and out": "copy",
    "gradients added up": "elementwise",
    "all-gather of stepped parameters": "all-gather",
    **dict.fromkeys(("copy to the host", "copy from the host"), "copy"),
    **dict.fromkeys(("fetch", "accumulated gradients", "gradients of a step", "stepped parameters"), "copy"),
}
# FLOPs from recorded shapes. A matrix multiplication (m, k) x (k, n) has 2 m k n. Attention has 4 b h q k w: two matrix
# multiplications of 2 q k w for each of b x h heads. Its backward recomputes the scores, so it has 5 instead of 2.
DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_"
LOG_SUMS = ("efficient_attention", "cudnn_attention")  # their forward has `compute_log_sumexp` as a fifth argument
BACKWARD = 2.5  # FLOPs relative to forward
MOST = 16  # rows in the picture


class TraceEvent(TypedDict):
    """An event of a trace that has a duration. Times are in microseconds."""

    name: str
    ts: float
    dur: float
    cat: NotRequired[str]
    pid: NotRequired[object]
    tid: NotRequired[object]
    args: NotRequired[dict[str, object]]


class Part(NamedTuple):
    """A part of a step's time: one kind of work in one module."""

    module: str  # "block" for all equal layers, "" outside of the model
    kind: str


@dataclass(frozen=True, kw_only=True)
class ReadTrace:
    """The busy seconds of one rank in one step, summed over its streams, by module and kind."""

    forecast: bool
    on_device: bool  # whether host time is left out, because the host runs ahead
    step_s: float
    parts: Mapping[Part, float]


def read_trace(path: Path, flag: str = "--trace") -> ReadTrace:
    """Read a forecast or a measured trace. Raises UserError that names the option `flag`."""
    with refused(path, kind="bad-trace", hint=HINT, where=flag):
        events, about = read_events(path)
        if about.get("made_by") == "zerofit":
            return _read_forecast(events, about)
        steps = [event for event in events if event["name"].startswith(STEP_MARK)]
        if not steps:
            raise Unreadable("it contains no steps marked by `zerofit train --profile`")
        return _read_measured(events, steps)


def read_events(path: Path) -> tuple[list[TraceEvent], dict[str, object]]:
    """Return a trace's complete events and its metadata. Raises OSError and Unreadable."""
    trace = read_json(path, most=MAX_BYTES)
    listed, about = trace.get("traceEvents"), trace.get("otherData", {})
    if not isinstance(listed, list) or not isinstance(about, dict):
        raise Unreadable("it has no list `traceEvents`")
    # Phase "X" is an event with a duration. Traces also have instants, counters and arrows without one.
    events = [event for event in listed if isinstance(event, dict) and event.get("ph") == "X"]
    for number, event in enumerate(events, 1):
        # This comparison is also false for NaN, which Python's JSON reader accepts.
        timed = all(isinstance(event.get(key), int | float) and abs(event[key]) < MAX_TIME for key in ("ts", "dur"))
        if not timed or not isinstance(event.get("name"), str) or not isinstance(event.get("args", {}), dict):
            raise Unreadable(f'event {number} of phase "X" lacks a name, times (ts and dur) or arguments')
    return cast(list[TraceEvent], events), about


def _read_forecast(events: list[TraceEvent], about: Mapping[str, object]) -> ReadTrace:
    """Sum the spans of a forecast's first rank. Raises Unreadable."""
    parts: defaultdict[Part, float] = defaultdict(float)
    # ranks of a pipeline are processes with numbers; a shorter number is smaller
    first = min((str(event.get("pid")) for event in events), key=lambda pid: (len(pid), pid), default="")
    for event in events:
        if str(event.get("pid")) == first:
            kind, module = (str(event.get("args", {}).get(name, "")) for name in ("kind", "module"))
            parts[_part(module, FORECAST_KINDS.get(kind, kind))] += event["dur"] / 1e6
    step_s = about.get("step_s")
    if not isinstance(step_s, int | float):
        raise Unreadable("its otherData lacks step_s, a number of seconds")
    return ReadTrace(forecast=True, on_device=about.get("gpu") != "cpu", step_s=float(step_s), parts=parts)


def _read_measured(events: list[TraceEvent], steps: list[TraceEvent]) -> ReadTrace:
    """Sum torch.profiler's kernels; without kernels, the ops' own times and the times between."""
    start, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    marks = _Marks(events)
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    # A damaged file may have a list as its id, which cannot be a key. So ids are compared as text.
    launched = {str(args["correlation"]): e for e in calls if "correlation" in (args := e.get("args", {}))}
    parts: defaultdict[Part, float] = defaultdict(float)
    for event in kernels:
        # A kernel runs later than its launch, possibly after the step's end. The launch decides to which step it
        # belongs.
        issued = launched.get(str(event.get("args", {}).get("correlation")), event)
        if start <= issued["ts"] <= end:
            parts[marks.part(kind_of(event["name"]), issued["ts"])] += event["dur"] / 1e6
    if not kernels:
        for kind, at, own_us in _own_times([event for event in events if start <= event["ts"] <= end], steps):
            parts[marks.part(kind, at)] += own_us / 1e6
    # several steps are averaged; `end - start` includes the pauses between them
    mean = {part: seconds / len(steps) for part, seconds in parts.items()}
    return ReadTrace(forecast=False, on_device=bool(kernels), step_s=(end - start) / 1e6 / len(steps), parts=mean)


class _Marks:
    """The marks `SECTION_MARK|phase|module` that a profiled step has written."""

    def __init__(self, events: Iterable[TraceEvent]):
        marks = sorted((e["ts"], e["name"]) for e in events if e["name"].startswith(SECTION_MARK))
        self._times = [at for at, _ in marks]
        self._sections = [(*name.split("|"), "", "")[1:3] for _, name in marks]

    def part(self, kind: str, at: float) -> Part:
        before = bisect_right(self._times, at)
        phase, module = self._sections[before - 1] if before else ("", "")
        return _part(module, OPTIMIZER if phase == "step" and kind not in COLLECTIVES else kind)


def _part(module: str, kind: str) -> Part:
    """Return the part of `kind` in `module`. Equal blocks share a part."""
    # collectives are issued early, so they belong to no module
    return Part("" if kind in COLLECTIVES else re.sub(r"^block\.\d+$", "block", module), kind)


def _own_times(events: list[TraceEvent], steps: list[TraceEvent]) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and microseconds of each collective, and of the training thread's work.

    An op counts without the time of the ops inside it. The time between ops counts as Python's time, except while
    Python waits for a collective.
    """
    sent = [e for e in events if e["name"].startswith("gloo:")]
    yield from ((kind_of(e["name"]), e["ts"], e["dur"]) for e in sent)
    # gloo works in its own threads. While they run, the training thread mostly waits; counting both would count time
    # twice.
    waits = _Busy((e["ts"], e["ts"] + e["dur"]) for e in sent)
    for kind, at, own_us in _thread_times(events, steps):
        yield kind, at, own_us - (waits.within(at, at + own_us) if kind in (HOST, *COLLECTIVES) else 0.0)


def _thread_times(events: list[TraceEvent], steps: list[TraceEvent]) -> Iterator[tuple[str, float, float]]:
    """Yield kind, start and microseconds on the training thread."""
    # Ops nest, so the events in order of their start form a stack. The time from one event to the next counts for the
    # innermost open op. A step is the outermost event: its own time is Python's.
    ops = [e for e in events if e.get("cat") == "cpu_op" and e.get("tid") == steps[0].get("tid")]
    within: list[tuple[str, float]] = []  # kind and end of open ops, innermost last
    at = 0.0
    # Of two events with the same start, the longer one contains the other.
    for event in sorted([*ops, *steps], key=lambda e: (e["ts"], -e["dur"])):
        while within and within[-1][1] <= event["ts"]:
            kind, end = within.pop()
            yield kind, at, max(0.0, end - at)
            at = max(at, end)
        if within:
            yield within[-1][0], at, event["ts"] - at
        at, name = event["ts"], event["name"]
        # ops of other libraries count as host time, and so do ops that compute nothing
        computes = name.startswith("aten::") and not re.fullmatch(NOTHING_COMPUTED, name.removeprefix("aten::"))
        within.append((kind_of(name) if computes else HOST, at + event["dur"]))
    for kind, end in reversed(within):
        yield kind, at, max(0.0, end - at)
        at = max(at, end)


class _Busy:
    """The union of intervals, sorted and without overlaps."""

    def __init__(self, intervals: Iterable[tuple[float, float]]):
        self._union: list[tuple[float, float]] = []
        for start, end in sorted(intervals):
            if self._union and start <= self._union[-1][1]:
                self._union[-1] = (self._union[-1][0], max(end, self._union[-1][1]))
            else:
                self._union.append((start, end))

    def within(self, start: float, end: float) -> float:
        """Return the length of the part of the union between `start` and `end`."""
        first = max(0, bisect_right(self._union, (start, math.inf)) - 1)
        total = 0.0
        for left, right in self._union[first:]:
            if left >= end:
                break
            total += max(0.0, min(end, right) - max(start, left))
        return total


def kind_of(name: str) -> str:
    """Return the kind of a kernel or op by its name.

    >>> kind_of("aten::addmm"), kind_of("ncclDevKernel_AllGather_RING_LL"), kind_of("aten::mul")
    ('product', 'all-gather', 'elementwise')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "elementwise")


def measured_kernels(path: Path) -> tuple[MeasuredKernel, ...]:
    """Return the kinds of kernels in a measured trace, each with its median time."""
    events, _ = read_events(path)
    # On a GPU an op's duration is only the time to launch it; its kernels carry the op's external id.
    on_device: defaultdict[object, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            on_device[str(event.get("args", {}).get("External id"))] += event["dur"]
    times: defaultdict[MeasuredKernel, list[float]] = defaultdict(list)
    for event in events:
        kernel = _kernel(event) if event.get("cat") == "cpu_op" else None
        if kernel is None:
            continue
        micros = on_device.get(str(event.get("args", {}).get("External id")), 0.0) if on_device else event["dur"]
        if micros > 0:
            times[kernel].append(micros)
    return tuple(replace(kernel, seconds=statistics.median(of) / 1e6) for kernel, of in times.items())


def _kernel(event: TraceEvent) -> MeasuredKernel | None:
    """Return the kernel of an op without seconds; None for other ops, or without shapes."""
    name, arguments = event["name"], event.get("args", {})
    shapes = [tuple(shape) for shape in _listed(arguments, "Input Dims") if _is_shape(shape)]
    types = map(str, _listed(arguments, "Input type"))
    dtype = next((DTYPES[name] for name in types if name in DTYPES), "")
    if not shapes or not dtype:
        return None
    if name in PRODUCTS:
        return _product(shapes, dtype)
    if name.startswith(ATTENTION):
        return _attention(name, [shape for shape in shapes if len(shape) == 4], dtype, arguments)
    return None


def _product(shapes: list[tuple[int, ...]], dtype: str) -> MeasuredKernel | None:
    # The factors are the last two: addmm and baddbmm have the tensor to add before them.
    factors = [shape for shape in shapes if len(shape) > 1][-2:]
    if len(factors) < 2:
        return None
    a, b = factors
    rows, inner, columns = a[-2], a[-1], b[-1]
    flops = 2.0 * math.prod(a[:-2]) * rows * inner * columns
    if not flops:
        return None
    return MeasuredKernel(kind="product", dtype=dtype, shape=(rows, columns, inner), flops=flops, seconds=0.0)


def _attention(
    name: str, shapes: list[tuple[int, ...]], dtype: str, arguments: Mapping[str, object]
) -> MeasuredKernel | None:
    backward = name.endswith("_backward")
    if len(shapes) < 3 + backward:
        return None
    # the backward's first argument is the gradient of the result; query and key follow
    (batch, heads, queries, width), (*_, keys, _) = shapes[backward], shapes[backward + 1]
    values = _listed(arguments, "Concrete Inputs")
    # Without this argument, only `is_causal` can be the text "True". A backward's mask of gradients is a list.
    if name.endswith(LOG_SUMS):
        values = values[:4] + values[5:]
    return MeasuredKernel(
        kind="attention",
        dtype=dtype,
        shape=(batch * heads, queries, keys, width),
        flops=(BACKWARD if backward else 1.0) * 4.0 * batch * heads * queries * keys * width,
        causal="True" in map(str, values),
        seconds=0.0,
    )


def _listed(arguments: Mapping[str, object], name: str) -> list[object]:
    value = arguments.get(name)
    return value if isinstance(value, list) else []


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) and size >= 0 for size in value)


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """The busy seconds of one kind of work in one module in a step, of each trace's first rank."""

    module: str  # "block" for all blocks; "" outside of the model
    kind: str
    forecast_s: float
    measured_s: float

    @property
    def off_s(self) -> float:
        """Measured minus forecast seconds."""
        return self.measured_s - self.forecast_s

    @property
    def what(self) -> str:
        """The module and the kind, as text."""
        return f"{self.module}: {self.kind}" if self.module else self.kind


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """A forecast step, and the same step measured by torch.profiler."""

    forecast_step_s: float
    measured_step_s: float
    rows: tuple[TraceRow, ...]  # largest difference first
    picture: Path

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `zerofit plot --trace --json`."""
        rows = [{**field_data(row), "off_s": row.off_s} for row in self.rows]
        return {**field_data(self, "rows", "picture"), "rows": rows, "picture": str(self.picture)}


def compare_traces(paths: Sequence[Path], out: Path) -> TraceComparison:
    """Read a forecast and a measured trace (in any order), and draw them.

    Raises UserError with all problems.
    """
    problems = Problems()
    traces = [problems.attempt(lambda path=path: read_trace(path)) for path in paths]
    problems.attempt(lambda: refuse_target(out, "--out", PICTURES))
    problems.raise_if_any()
    read = sorted((trace for trace in traces if trace), key=lambda trace: not trace.forecast)  # the forecast first
    if [trace.forecast for trace in read] != [True, False]:
        message = f"--trace names {len(read)} traces, {sum(trace.forecast for trace in read)} of them forecasts"
        hint = "give one from --trace of `zerofit plan` or `simulate`, and one of `zerofit train --profile`"
        raise UserError(Problem(kind="usage", message=message, hint=hint, where="--trace"))
    forecast, measured = read
    left_out = {HOST} if forecast.on_device or measured.on_device else set()  # the host runs ahead of the device
    parts: dict[Part, None] = dict.fromkeys([*forecast.parts, *measured.parts])
    rows = [
        TraceRow(**part._asdict(), forecast_s=forecast.parts.get(part, 0.0), measured_s=measured.parts.get(part, 0.0))
        for part in parts
        if part.kind not in left_out
    ]
    rows.sort(key=lambda row: -abs(row.off_s))
    comparison = TraceComparison(
        forecast_step_s=forecast.step_s, measured_step_s=measured.step_s, rows=tuple(rows), picture=out
    )
    save(_figure(comparison), out, "--out", dpi=120)
    return comparison


def _figure(comparison: TraceComparison) -> Figure:
    from matplotlib.figure import Figure

    rows = comparison.rows[:MOST][::-1]  # the first row at the top
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    heights = range(len(rows))
    for shift, name, step_s in (
        (0.2, "forecast", comparison.forecast_step_s),
        (-0.2, "measured", comparison.measured_step_s),
    ):
        widths = [1e3 * getattr(row, f"{name}_s") for row in rows]
        axes.barh([height + shift for height in heights], widths, height=0.38, label=f"{name}: {step_s:.3g} s per step")
    axes.set_yticks(list(heights), [row.what for row in rows])
    axes.set_xlabel("busy milliseconds per step, largest difference first")
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    return figure
