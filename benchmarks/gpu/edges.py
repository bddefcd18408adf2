"""Verdicts at the edge: the largest micro batch that `zerofit simulate` lets through, and the first that it refuses.

Both are really trained under the memory of a smaller GPU: the first must run, the second should not. What needs less
than the GPU has, but not less than the margin leaves, is refused with a warning only, and is reported apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zerofit as zf
from benchmarks.meter.configurations import MODELS as SMALL
from benchmarks.meter.configurations import options, target
from zerofit.spec.cluster import Cluster

from .part import Measure
from .rank import train
from .training import MODELS

MOST, REHEARSED = 4096, 4  # samples of a micro batch


def cases(rehearse: bool) -> list[str]:
    """Configurations whose micro batch is looked for, and the memory that the device is to have."""
    if rehearse:
        return ["lenet zero0 fp32 mb1 x1 in 1GiB"]
    return [
        "llama-1b zero2 bf16 mb1 ckpt x1 in 32GiB",
        "resnet50 zero0 bf16 mb1 x1 in 16GiB",
        "gpt2 zero3 fp16 mb1 x1 in 24GiB",
        "llama-1b zero3 bf16 mb1 x1 in 48GiB",
    ]


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Find both sides of each edge by simulation, then train them."""
    models = SMALL if rehearse else MODELS
    yield lambda case: _measure(case, models, folder, REHEARSED if rehearse else MOST)


def _measure(case: str, models: dict[str, dict[str, Any]], folder: Path, most: int) -> dict[str, Any]:
    name, _, size = case.partition(" in ")
    cluster = Cluster(Cluster.here().kind, gpus=1, nodes=1, device_memory=size)
    verdicts: dict[int, zf.Simulation] = {}

    def fits(micro: int) -> bool:
        if micro not in verdicts:
            run = zf.Run(**{**options(name, models), "micro_batch": micro, "ranks": None})
            verdicts[micro] = zf.simulate(run, cluster)
        return verdicts[micro].fits

    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    sides = {"largest_that_fits": low, "first_refused": high}
    return {
        side: _tried(micro, verdicts[micro], name, models, folder) for side, micro in sides.items() if micro in verdicts
    }


def _tried(
    micro: int, said: zf.Simulation, name: str, models: dict[str, dict[str, Any]], folder: Path
) -> dict[str, Any]:
    found = {"micro_batch": micro, "verdict": said.verdict, "reserved_bytes": said.reserved_bytes}
    asked = target(name.replace(" mb1 ", f" mb{micro} "), models)
    outside = sum(one.bytes for one in said.overheads)
    asked = replace(asked, device_bytes=said.device_total_bytes)
    try:
        real = train(asked, folder, said.device_total_bytes - outside if torch.cuda.is_available() else None)
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        return {**found, "ran": False}
    return {**found, "ran": True, "real_bytes": real.get("reserved_bytes", real["allocated_bytes"])}
