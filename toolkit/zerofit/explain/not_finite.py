"""Find the cause of a loss that is not finite, from the findings of a replay's ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NotRequired, TypedDict

from zerofit.explain.result import UNKNOWN
from zerofit.spec.files import field_data
from zerofit.spec.units import first_names

# Causes, in the order in which they are checked. The first cause that the findings show is the answer.
BAD_WEIGHTS = "bad-weights"  # not finite when the replay started
COLLECTIVE = "collective"  # ranks differ, or a reduction of finite numbers is not finite
SAMPLE = "sample"  # a sample's inputs or label
LEARNING_RATE = "learning-rate"  # weights or loss grew step by step before
LOSS_SCALE = "loss-scale"  # a gradient overflows only because of the scale
FP16_OVERFLOW = "fp16-overflow"  # finite in float32
OPERATION = "operation"  # log of zero, division by zero, ...
MAX_SAMPLES = 8  # that a line names
GREW = 3.0  # training diverges if the loss grew by this factor over its lowest value, or the weights over their first
LEAST_LOSS = 1e-6  # smaller losses count as this
LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38}
# op that does not support all numbers -> its name in messages
_DOMAINS = {"log": "log", "log2": "log", "log10": "log", "sqrt": "square root", "rsqrt": "reciprocal square root"}
_DOMAINS |= {"div": "division", "div_": "division", "reciprocal": "division", "log1p": "log", "pow": "power"}
_DOMAINS |= {"lgamma": "log-gamma", "digamma": "digamma", "acos": "arc cosine", "asin": "arc sine"}
_ADVICE = {
    BAD_WEIGHTS: "resume from an older checkpoint (`zerofit ckpt verify`, `ckpt diff`), or load other weights",
    COLLECTIVE: "check this rank's device and links (`zerofit doctor`), then resume from the checkpoint",
    SAMPLE: "correct or leave out the sample; `zerofit data` shows what the model reads",
    LEARNING_RATE: "lower --lr, lengthen --warmup-steps, or set --gradient-clipping 1",
    LOSS_SCALE: "use a dynamic or a smaller loss scale (fp16.loss_scale 0 is dynamic), or --precision bf16",
    FP16_OVERFLOW: "use --precision bf16, or compute this layer in float32",
    OPERATION: "keep the input in the operation's range: for example, replace log(x) by log(x.clamp_min(1e-6))",
    UNKNOWN: "",
}


class TensorRange(TypedDict):
    """Shape and range of a tensor."""

    shape: list[int]
    dtype: str
    low: float  # of the finite elements
    high: float
    bad: int  # elements that are not finite
    zeros: int


class FirstOp(TypedDict):
    """The op whose result is the first that is not finite, or a tensor that no op has made."""

    phase: str
    op: str  # "" for a tensor
    module: str
    line: str
    tensor: str
    inputs: list[TensorRange]
    output: TensorRange
    depends: list[str]  # of "inputs", "labels" and "weights"
    wide: float | None  # largest result in float32, if the result is finite there
    samples: list[int]  # samples with such results
    of_samples: int  # samples of the micro batch


class BadNumbers(TypedDict):
    """A weight or optimizer state with numbers that are not finite."""

    name: str
    kind: str
    bad: int
    of: int


class BadSample(TypedDict):
    """A sample with inputs or labels that cannot be right."""

    sample: int
    tensor: str
    why: str
    values: TensorRange


class RankFindings(TypedDict):
    """What one rank of a replay has found; see `train.replay`."""

    rank: int
    done: int  # steps that were repeated
    sizes: list[float]  # root mean square of the weights after each step
    weights: list[BadNumbers]
    step: NotRequired[int]
    lr: NotRequired[float]
    loss_scale: NotRequired[float]
    stopped: NotRequired[str]  # why the step was stopped
    apart: NotRequired[list[str]]  # parameters that differ between ranks
    batch: NotRequired[list[BadSample]]
    origin: NotRequired[FirstOp]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found: the cause, and the first tensor that is not finite."""

    cause: str  # a stable name, or UNKNOWN
    summary: str
    step: int | None  # the step that goes wrong, from 1; None if none does
    phase: str = ""  # "start", "forward", "backward" or "step"
    module: str = ""
    op: str = ""
    tensor: str = ""  # a weight, gradient or input by name
    line: str = ""  # file:line
    inputs: tuple[str, ...] = ()  # range of each input of the op
    rank: int | None = None
    samples: tuple[int, ...] = ()  # indices in the training data
    evidence: tuple[str, ...] = ()
    advice: str = ""
    start: str = ""  # the checkpoint, or "" for the first step
    start_step: int = 0
    compared_losses: int = 0  # replayed steps whose loss is also in the run's metrics
    equal_losses: int = 0  # compared losses with equal bits
    precision: str = ""
    run_dir: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the replay names a cause."""
        return self.cause != UNKNOWN

    @property
    def title(self) -> str:
        """The title: the cause of the loss that is not finite."""
        return f"replay: {self.cause.replace('-', ' ')}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield facts (label and text): the place and its numbers, what to do, and what was repeated."""
        if self.step is not None:
            rank = f", rank {self.rank}" if self.rank is not None else ""
            yield "when", f"step {self.step}{f', {self.phase}' if self.phase else ''}{rank}"
        # Which of these are known depends on the cause: a damaged weight has no operation.
        place = {"module": self.module, "operation": self.op, "tensor": self.tensor, "line": self.line}
        yield from ((label, text) for label, text in place.items() if text)
        yield from (("inputs", text) for text in self.inputs)
        if self.samples:
            yield "samples", f"{first_names(list(map(str, self.samples)), MAX_SAMPLES)} (indices in the training data)"
        yield from (("because", reason) for reason in self.evidence)
        if self.advice:
            yield "to do", self.advice
        # Equal losses show that the replay repeats the run, so its cause is the run's cause.
        start = f"{PurePath(self.start).name} (step {self.start_step})" if self.start else "the first step"
        yield "started at", f"{start}, in {self.precision}"
        if self.compared_losses:
            yield "losses", f"{self.equal_losses} of {self.compared_losses} equal the run's losses, bit for bit"

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `zerofit replay --json`."""
        return field_data(self)


def cause_of(ranks: Sequence[RankFindings], losses: Sequence[float]) -> Replay:
    """Return the cause from the findings of each rank and the losses of the steps."""
    # The order follows the flow of numbers: weights, then inputs, then ops, and last the exchange between ranks. An
    # earlier cause also makes all later results wrong, so the first one that shows is named.
    found = _of_weights(ranks) or _of_replicas(ranks)
    if not found and not any(rank.get("stopped") for rank in ranks):
        summary = f"All steps up to step {ranks[0]['done']} are finite in this replay"
        grown = _growth(ranks[0], losses)
        cause, why = (LEARNING_RATE, f", but {grown}") if grown else (UNKNOWN, "")
        found = Replay(cause=cause, summary=f"{summary}{why}.", step=None)
    if not found:
        found = _of_samples(ranks) or _of_origin(ranks, losses) or _of_reduction(ranks, losses)
    return replace(found, advice=_ADVICE[found.cause])


def _of_weights(ranks: Sequence[RankFindings]) -> Replay | None:
    """Return the cause if weights or optimizer states are not finite."""
    bad = [rank for rank in ranks if rank["weights"]]
    if not bad:
        return None
    rank = bad[0]
    first, step = rank["weights"][0], rank.get("step")
    what = "weight" if first["kind"] in ("weight", "fp32") else f"optimizer state ({first['kind']}) of"
    shown = f"{first['bad']} of {first['of']} numbers of the {what} {first['name']} are not finite"
    if step is None:
        cause, summary = BAD_WEIGHTS, f"{shown} before the first step."
    # Ranks may have different shares of the weights (ZeRO-3, pipelines), so only replicas that differ are damaged.
    elif first["name"] in rank.get("apart", ()):
        summary = f"After step {step}, {shown} only on rank {rank['rank']}: this rank received a damaged copy."
        cause = COLLECTIVE
    else:
        summary = f"The update of step {step} was too large: gradients were finite, but {shown} after the update."
        cause = LEARNING_RATE
    return Replay(
        cause=cause,
        summary=summary,
        step=rank["done"] + 1 if step is None else step,
        phase="start" if step is None else "step",
        tensor=first["name"],
        rank=rank["rank"],
        evidence=tuple(f"{row['name']} ({row['kind']}): {row['bad']} of {row['of']}" for row in rank["weights"][1:4]),
    )


def _of_replicas(ranks: Sequence[RankFindings]) -> Replay | None:
    apart, step = ranks[0].get("apart"), ranks[0].get("step")
    if not apart:
        return None
    return Replay(
        cause=COLLECTIVE,
        summary=f"Ranks differ after step {step}: {len(apart)} parameters are not the same, the first is {apart[0]}. "
        "They were the same before this step, so an exchange of gradients or weights failed.",
        step=step,
        phase="step",
        tensor=apart[0],
        evidence=tuple(apart[1:4]),
    )


def _of_samples(ranks: Sequence[RankFindings]) -> Replay | None:
    """Return the cause if a sample of the stopped step has wrong inputs or labels."""
    bad = [(rank, row) for rank in ranks for row in rank.get("batch", ())]
    if not bad:
        return None
    rank, first = bad[0]
    values, origin = first["values"], rank.get("origin")
    numbers = f"{values['bad']} numbers" if values["bad"] else f"{values['low']:.3g} to {values['high']:.3g}"
    found = Replay(
        cause=SAMPLE,
        summary=f"Sample {first['sample']} of the training data: its {first['tensor']} are {first['why']} ({numbers}).",
        step=rank.get("step"),
        phase="forward",
        rank=rank["rank"],
        samples=tuple(dict.fromkeys(row["sample"] for _, row in bad)),
    )
    return replace(_with_op(found, origin) if origin else found, tensor=first["tensor"])


def _of_origin(ranks: Sequence[RankFindings], losses: Sequence[float]) -> Replay | None:
    """Return the cause from the first op whose result is not finite, if a rank has found one."""
    found = [(rank, origin) for rank in ranks if (origin := rank.get("origin"))]
    if not found:
        return None
    # a rank that only received the number from another rank has no op
    # False sorts before True: ranks with an op come first, and among them those that failed in forward.
    rank, origin = min(found, key=lambda pair: (not pair[1]["op"], pair[1]["phase"] != "forward", pair[0]["rank"]))
    grown = _growth(rank, losses)
    if grown:
        cause, summary = LEARNING_RATE, f"Training had already diverged: {grown}. {_first_result(origin)}."
    else:
        cause, summary = _judged(origin, rank.get("loss_scale", 1.0))
    samples = origin["samples"] if len(origin["samples"]) < origin["of_samples"] or cause == SAMPLE else ()
    replay = Replay(cause=cause, summary=summary, step=rank.get("step"), rank=rank["rank"], samples=tuple(samples))
    return _with_op(replay, origin)


def _first_result(origin: FirstOp) -> str:
    return f"{_op_of(origin)} ({origin['phase']}) has the first result that is not finite"


def _op_of(origin: FirstOp) -> str:
    return f"{origin['op'] or origin['tensor']} in {origin['module'] or 'the loss'}"


def _judged(origin: FirstOp, scale: float) -> tuple[str, str]:
    """Return cause and summary of a first op. `scale`: the loss scale."""
    place, made, samples = _op_of(origin), _first_result(origin), ", ".join(map(str, origin["samples"]))
    if origin["depends"] == ["labels"]:
        values = _range(origin["inputs"][0]) if origin["inputs"] else ""
        label = f"The label of sample {samples or 'the micro batch'}"
        return SAMPLE, f"{label} is outside the range that {place} supports: {values}."
    if len(origin["samples"]) < origin["of_samples"] and samples and "weights" not in origin["depends"]:
        values = "; ".join(map(_range, origin["inputs"]))
        return SAMPLE, f"Sample {samples} of the training data: {made}, before any weight is used ({values})."
    # finite in float32, so 16 bits are the cause; in backward, the loss scale may be, if the gradient itself would fit
    wide, limit = origin["wide"], LARGEST.get(origin["output"]["dtype"], math.inf)
    if wide is not None:
        shown = f"{wide:.3g} in float32, above {limit:.5g}"
        if origin["phase"] == "backward" and scale > 1 and wide / scale <= limit:
            reason = f"the gradient {wide / scale:.3g}, multiplied by the loss scale {scale:.6g}, is {shown}"
            return LOSS_SCALE, f"The loss scale is too high: {reason}. {made}."
        kind = "fp16" if origin["output"]["dtype"] == "float16" else origin["output"]["dtype"]
        return FP16_OVERFLOW, f"{kind} overflows in {place} ({origin['phase']}): its result is {shown}."
    domain = _DOMAINS.get(origin["op"].rpartition("::")[2])
    if domain:
        low = origin["inputs"][0]["low"] if origin["inputs"] else None
        value = "a number outside of the operation's range" if low is None else f"{low:.4g}" if low else "zero"
        what = "division by zero" if domain == "division" else f"{domain} of {value}"
        return OPERATION, f"A {what} in {origin['module'] or 'the loss'} ({origin['phase']})."
    return OPERATION, f"{made}, from finite inputs."


def has_risen(loss: float, lowest: float) -> bool:
    """Return whether a loss is not finite, or far above the lowest loss before it."""
    return not loss <= GREW * max(lowest, LEAST_LOSS)


def _growth(rank: RankFindings, losses: Sequence[float]) -> str:
    """Return a phrase if the loss or the weights grew before the step; "" if they did not."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) > 1 and has_risen(finite[-1], min(finite)):
        return f"the loss rose from {min(finite):.4g} to {finite[-1]:.4g}"
    sizes = [size for size in rank["sizes"] if size > 0]
    if len(sizes) > 1 and not sizes[-1] <= GREW * sizes[0]:
        return (
            f"the weights grew by a factor of {sizes[-1] / sizes[0]:.3g} in {len(sizes) - 1} steps "
            f"(lr {rank.get('lr', 0):.3g})"
        )
    return ""


def _of_reduction(ranks: Sequence[RankFindings], losses: Sequence[float]) -> Replay:
    """Return the cause if the results of all ranks are finite, but the gradients' norm is not."""
    stopped = next(rank for rank in ranks if rank.get("stopped"))
    message, scale = stopped.get("stopped", ""), stopped.get("loss_scale", 1.0)
    finite = "Every rank's own gradients are finite"
    if grown := _growth(stopped, losses):
        cause, summary = LEARNING_RATE, f"Training had already diverged: {grown}. {message}."
    # Only fp16 has a loss scale above 1, and the sum of finite gradients can exceed fp16's range.
    elif scale > 1:
        cause, summary = LOSS_SCALE, f"{message}. {finite}, but their sum overflows at scale {scale:g}."
    else:
        cause, summary = COLLECTIVE, f"{message}. {finite}, so the exchange between ranks failed."
    return Replay(cause=cause, summary=summary, step=stopped.get("step"), phase="step")


def _with_op(replay: Replay, origin: FirstOp) -> Replay:
    return replace(
        replay,
        phase=origin["phase"],
        module=origin["module"],
        op=origin["op"],
        tensor=origin["tensor"],
        line=origin["line"],
        inputs=tuple(map(_range, origin["inputs"])),
    )


def _range(facts: TensorRange) -> str:
    shape = " x ".join(map(str, facts["shape"])) or "one number"
    zeros = f", {facts['zeros']} zeros" if facts["zeros"] else ""
    return f"{facts['dtype']} ({shape}) {facts['low']:.4g} to {facts['high']:.4g}{zeros}"
