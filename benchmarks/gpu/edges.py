"""Verdicts at the edge: the largest micro batch that `zerofit simulate` lets through, and the first that it refuses.

Both are really trained under the memory of a smaller GPU: the first must run, the second should not. What needs less
than the GPU has, but not less than the margin leaves, is refused with a warning only, and is reported apart.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zerofit as zf
from benchmarks.meter.configurations import MODELS as SMALL
from benchmarks.meter.configurations import options, target
from zerofit.spec.cluster import Cluster
from zerofit.spec.overhead import CUDNN_WORKSPACES

from .part import Measure
from .rank import Waiting
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
    """Find both sides of each edge by simulation, all cases at once, then train them."""
    workers = ProcessPoolExecutor(len(cases), mp_context=multiprocessing.get_context("spawn"))
    sides = {case: workers.submit(_sides, case, rehearse) for case in cases}
    with workers:
        yield lambda case: {side: _tried(case, found, rehearse) for side, found in sides[case].result().items()}


def _sides(case: str, rehearse: bool) -> dict[str, dict[str, Any]]:
    """Return what simulation says of the largest micro batch that it lets through, and of the next one."""
    name, _, size = case.partition(" in ")
    cluster = Cluster(Cluster.here().kind, gpus=1, nodes=1, device_memory=size)
    most, verdicts = REHEARSED if rehearse else MOST, dict[int, zf.Simulation]()

    def fits(micro: int) -> bool:
        if micro not in verdicts:
            run = zf.Run(**{**options(name, SMALL if rehearse else MODELS), "micro_batch": micro, "ranks": None})
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
        side: {
            "micro_batch": micro,
            "verdict": verdicts[micro].verdict,
            "reserved_bytes": verdicts[micro].reserved_bytes,
            "device_bytes": verdicts[micro].device_total_bytes,
            "outside_bytes": sum(
                one.bytes
                for one in verdicts[micro].overheads
                if one.name != CUDNN_WORKSPACES  # which torch allocates
            ),
        }
        for side, micro in sides.items()
        if micro in verdicts
    }


def _tried(case: str, said: dict[str, Any], rehearse: bool) -> dict[str, Any]:
    """Train with a micro batch under the memory that torch may take of such a device."""
    name = case.partition(" in ")[0].replace(" mb1 ", f" mb{said['micro_batch']} ")
    asked = replace(target(name, SMALL if rehearse else MODELS), device_bytes=said["device_bytes"])
    cap_bytes = said["device_bytes"] - said["outside_bytes"]
    rank = Waiting(asked, cap_bytes if torch.cuda.is_available() else None)
    rank.begin()
    try:
        real = rank.answer()
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        return {**said, "ran": False}
    return {**said, "ran": True, "real_bytes": real.get("reserved_bytes", real["allocated_bytes"])}
