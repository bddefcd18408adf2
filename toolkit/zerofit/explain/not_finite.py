"""Find the cause of a loss that is not finite, from what the ranks of a replay found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerofit.explain.result import UNKNOWN
from zerofit.spec.files import field_data

# Causes, in the order in which they are checked. The first cause that the findings show is the answer.
BAD_WEIGHTS = "bad-weights"  # not finite when the replay started
COLLECTIVE = "collective"  # ranks differ, or a reduction of finite numbers is not finite
SAMPLE = "sample"  # a sample's inputs or label
LEARNING_RATE = "learning-rate"  # weights or loss grew step by step before
LOSS_SCALE = "loss-scale"  # a gradient overflows only because of the scale
FP16_OVERFLOW = "fp16-overflow"  # finite in float32
OPERATION = "operation"  # log of zero, division by zero, ...
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zerofit replay --json`."""
        return field_data(self)


def cause_of(ranks: Sequence[Mapping[str, object]], losses: Sequence[float]) -> Replay:
    """Return the cause from the findings of each rank (`ranks`, see `train.replay`) and the losses of the steps."""
    found = _of_weights(ranks) or _of_replicas(ranks)
    if not found and not any(rank.get("stopped") for rank in ranks):
        summary = f"All steps up to step {ranks[0]['done']} are finite in this replay"
        grown = _growth(ranks[0], losses)
        cause, why = (LEARNING_RATE, f", but {grown}") if grown else (UNKNOWN, "")
        found = Replay(cause=cause, summary=f"{summary}{why}.", step=None)
    if not found:
        found = _of_samples(ranks) or _of_origin(ranks, losses) or _of_reduction(ranks, losses)
    return replace(found, advice=_ADVICE[found.cause])


def _of_weights(ranks: Sequence[Mapping[str, Any]]) -> Replay | None:
    """Return the cause if weights or optimizer states are not finite at the start, or after a finite step."""
    bad = [rank for rank in ranks if rank["weights"]]
    if not bad:
        return None
    first, step = bad[0]["weights"][0], bad[0].get("step")
    what = "weight" if first["kind"] in ("weight", "fp32") else f"optimizer state ({first['kind']}) of"
    shown = f"{first['bad']} of {first['of']} numbers of the {what} {first['name']} are not finite"
    more = tuple(f"{row['name']} ({row['kind']}): {row['bad']} of {row['of']}" for row in bad[0]["weights"][1:4])
    if step is None:
        return Replay(
            cause=BAD_WEIGHTS,
            summary=f"{shown} before the first step.",
            step=bad[0]["done"] + 1,
            phase="start",
            tensor=first["name"],
            rank=bad[0]["rank"],
            evidence=more,
        )
    if len(bad) < len(ranks):
        summary = f"After step {step}, {shown} only on rank {bad[0]['rank']}: this rank received a damaged copy."
        cause = COLLECTIVE
    else:
        summary = f"The update of step {step} was too large: gradients were finite, but {shown} after the update."
        cause = LEARNING_RATE
    rank = bad[0]["rank"]
    return Replay(cause=cause, summary=summary, step=step, phase="step", tensor=first["name"], rank=rank, evidence=more)


def _of_replicas(ranks: Sequence[Mapping[str, Any]]) -> Replay | None:
    apart = ranks[0].get("apart")
    if not apart:
        return None
    step = ranks[0]["step"]
    return Replay(
        cause=COLLECTIVE,
        summary=f"Ranks differ after step {step}: {len(apart)} parameters are not the same, the first is {apart[0]}. "
        "They were the same before this step, so an exchange of gradients or weights failed.",
        step=step,
        phase="step",
        tensor=apart[0],
        evidence=tuple(apart[1:4]),
    )


def _of_samples(ranks: Sequence[Mapping[str, Any]]) -> Replay | None:
    """Return the cause if a sample of the stopped step has inputs or labels that cannot be right."""
    bad = [(rank, row) for rank in ranks for row in rank.get("batch", ())]
    if not bad:
        return None
    rank, first = bad[0]
    values = first["values"]
    where = _origin_facts(rank.get("origin") or {})
    numbers = f"{values['bad']} numbers" if values["bad"] else f"{values['low']:.3g} to {values['high']:.3g}"
    return Replay(
        cause=SAMPLE,
        summary=f"Sample {first['sample']} of the training data: its {first['tensor']} are {first['why']} ({numbers}).",
        step=rank["step"],
        rank=rank["rank"],
        samples=tuple(dict.fromkeys(row["sample"] for _, row in bad)),
        **{"phase": "forward", **where, "tensor": first["tensor"]},
    )


def _of_origin(ranks: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Replay | None:
    """Return the cause from the first op whose result is not finite, if a rank has found such an op."""
    found = [rank for rank in ranks if rank.get("origin")]
    if not found:
        return None
    # a rank that only received the number from another rank has no op
    rank = min(found, key=lambda rank: (not rank["origin"]["op"], rank["origin"]["phase"] != "forward", rank["rank"]))
    origin, step = rank["origin"], rank["step"]
    cause, summary, evidence = _judged(origin, rank, _growth(rank, losses))
    return Replay(
        cause=cause,
        summary=summary,
        step=step,
        rank=rank["rank"],
        samples=tuple(origin["samples"]) if len(origin["samples"]) < origin["of_samples"] or cause == SAMPLE else (),
        evidence=tuple(evidence),
        **_origin_facts(origin),
    )


def _judged(origin: Mapping[str, Any], rank: Mapping[str, Any], grown: str) -> tuple[str, str, list[str]]:
    place = f"{origin['op'] or origin['tensor']} in {origin['module'] or 'the loss'}"
    made = f"{place} ({origin['phase']}) has the first result that is not finite"
    evidence = [grown] if grown else []
    if grown:
        return LEARNING_RATE, f"Training had already diverged: {grown}. {made}.", []
    if origin["depends"] == ["labels"]:
        samples = ", ".join(map(str, origin["samples"])) or "the micro batch"
        values = _range(origin["inputs"][0]) if origin["inputs"] else ""
        return SAMPLE, f"The label of sample {samples} is outside the range that {place} supports: {values}.", evidence
    if len(origin["samples"]) < origin["of_samples"] and origin["samples"] and "weights" not in origin["depends"]:
        samples, values = ", ".join(map(str, origin["samples"])), "; ".join(map(_range, origin["inputs"]))
        return SAMPLE, f"Sample {samples} of the training data: {made}, before any weight is used ({values}).", evidence
    wide, limit = origin["wide"], LARGEST.get(origin["output"]["dtype"], math.inf)
    if wide is not None:
        scale = rank.get("loss_scale", 1.0)
        shown = f"{wide:.3g} in float32, above {limit:.5g}"
        if origin["phase"] == "backward" and scale > 1 and wide / scale <= limit:
            reason = f"the gradient {wide / scale:.3g}, multiplied by the loss scale {scale:.6g}, is {shown}"
            return LOSS_SCALE, f"The loss scale is too high: {reason}. {made}.", evidence
        kind = "fp16" if origin["output"]["dtype"] == "float16" else origin["output"]["dtype"]
        return FP16_OVERFLOW, f"{kind} overflows in {place} ({origin['phase']}): its result is {shown}.", evidence
    name = origin["op"].rpartition("::")[2]
    domain = _DOMAINS.get(name)
    if domain:
        divisor = origin["inputs"][-1 if domain == "division" else 0] if origin["inputs"] else {}
        what = f"{domain} by zero" if domain == "division" else f"{domain} of {_value(divisor)}"
        return OPERATION, f"A {what} in {origin['module'] or 'the loss'} ({origin['phase']}).", evidence
    return OPERATION, f"{made}, from finite inputs.", evidence


def has_risen(loss: float, lowest: float) -> bool:
    """Return whether a loss is not finite, or far above the lowest loss before it."""
    return not loss <= GREW * max(lowest, LEAST_LOSS)


def _growth(rank: Mapping[str, Any], losses: Sequence[float]) -> str:
    """Return a sentence if the loss or the weights grew before the step; "" if they did not."""
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


def _of_reduction(ranks: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Replay:
    """Return the cause if the results of all ranks are finite, but the norm of the gradients is not."""
    stopped = next(rank for rank in ranks if rank.get("stopped"))
    if grown := _growth(stopped, losses):
        summary = f"Training had already diverged: {grown}. {stopped['stopped']}."
        return Replay(cause=LEARNING_RATE, summary=summary, step=stopped["step"], phase="step")
    scale = stopped.get("loss_scale", 1.0)
    if scale > 1:
        summary = (
            f"{stopped['stopped']}. Every rank's own gradients are finite, but their sum overflows at scale {scale:g}."
        )
        return Replay(cause=LOSS_SCALE, summary=summary, step=stopped["step"], phase="step")
    summary = f"{stopped['stopped']}. Every rank's own gradients are finite, so the exchange between ranks failed."
    return Replay(cause=COLLECTIVE, summary=summary, step=stopped["step"], phase="step")


def _origin_facts(origin: Mapping[str, Any]) -> dict[str, Any]:
    if not origin:
        return {}
    inputs = tuple(_range(facts) for facts in origin["inputs"])
    return {key: origin[key] for key in ("phase", "module", "op", "tensor", "line")} | {"inputs": inputs}


def _range(facts: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, facts["shape"])) or "one number"
    zeros = f", {facts['zeros']} zeros" if facts["zeros"] else ""
    return f"{facts['dtype']} ({shape}) {facts['low']:.4g} to {facts['high']:.4g}{zeros}"


def _value(facts: Mapping[str, object]) -> str:
    if not facts:
        return "a number outside of the operation's range"
    return "zero" if facts["low"] == 0 else f"{facts['low']:.4g}"
