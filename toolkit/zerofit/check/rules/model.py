"""Sizes against the model: they follow from its parameters, and DeepSpeed's defaults are those of a large one."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.check.edit import Assignment
from zerofit.check.finding import Finding
from zerofit.check.subject import ZERO, CheckSubject

FAR_ABOVE = 2  # times the parameters: more can never be filled


def sizes(c: CheckSubject) -> Iterator[Finding]:
    """Buckets, persistence and swap buffers that do not suit the model. Nothing where the model is not known."""
    facts = c.setting.facts
    if facts is None or c.stage == 0:
        return
    bucket = c.get(f"{ZERO}.reduce_bucket_size")
    size = c.number(f"{ZERO}.reduce_bucket_size") or (
        c.catalog.default(f"{ZERO}.reduce_bucket_size") if not bucket else 0
    )
    if size and size > FAR_ABOVE * facts.parameters:
        given = f"reduce_bucket_size {size:,.0f}" + ("" if bucket else ", DeepSpeed's default,")
        yield Finding(
            code="bucket-above-model",
            severity="warning",
            path=f"{ZERO}.reduce_bucket_size",
            message=f"{given} for a model of {facts.parameters:,} parameters",
            why=f"DeepSpeed allocates it whole, whatever the model: {size * 2 / 1e6:,.0f} MB a buffer in 16 bits",
            fix='write "auto" if zerofit or Hugging Face fill it, else the number of parameters',
            edits=(Assignment(f"{ZERO}.reduce_bucket_size", _even(facts.parameters)),),
        )
    threshold = c.number(f"{ZERO}.stage3_param_persistence_threshold")
    if c.stage == 3 and threshold is not None and threshold >= facts.largest_parameter:
        yield Finding(
            code="persistence-above-model",
            severity="warning",
            path=f"{ZERO}.stage3_param_persistence_threshold",
            message=f"stage3_param_persistence_threshold {threshold:,.0f} is not below the largest parameter "
            f"({facts.largest_parameter:,} elements)",
            why="DeepSpeed then partitions nothing: every rank holds all parameters, as at stage 2",
            fix="take ten times the model's width",
            edits=(Assignment(f"{ZERO}.stage3_param_persistence_threshold", 10 * facts.hidden_size),),
        )
    buffer = c.number(f"{ZERO}.offload_param.buffer_size")
    if c.offload("param") == "nvme" and buffer is not None and buffer < facts.largest_parameter:
        yield Finding(
            code="swap-buffer",
            severity="error",
            path=f"{ZERO}.offload_param.buffer_size",
            message=f"offload_param.buffer_size {buffer:,.0f} is below the largest parameter "
            f"({facts.largest_parameter:,} elements)",
            why='DeepSpeed stops when it swaps that one: "More elements ... than buffer size ..."',
            fix="take the largest parameter's size",
            edits=(Assignment(f"{ZERO}.offload_param.buffer_size", facts.largest_parameter),),
        )


def _even(size: int) -> int:
    return size + size % 2
