"""Measure this rank's memory use once per block of steps, and compare it with the forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofit.spec.process import forget_resident_peak, resident_memory
from zerofit.spec.run_folder import MemoryForecast
from zerofit.train.callbacks import Callback, StepRecord
from zerofit.train.measured import MeasuredMemory, outgrown

FIGURES = 5  # per rank
RING_EVENTS = 100_000  # allocations and frees: some steps of a large model


# Ranks learn the peaks of all others without an exchange of their own: each fills its five numbers into its own slots
# of the vector that `train.metrics` sums over ranks anyway.
class RankMemory:
    """The peak memory of this rank so far and, after an exchange, of all ranks."""

    def __init__(self, device: torch.device, free_bytes: int | None):
        """Start measuring. `free_bytes`: of the device before any rank started; None if unknown."""
        self._device, self._free, self._outside = device, free_bytes, 0
        start = resident_memory()
        self._files, self._host = start.file, start.peak
        forget_resident_peak()

    def slots(self) -> list[float]:
        """Return one slot for each figure of each rank. Only this rank's slots are filled.

        All other slots are zero, so the sum over all ranks has every rank's figures.
        """
        figures = self._look()
        before = FIGURES * dist.get_rank()
        return [0.0] * before + figures + [0.0] * (FIGURES * (dist.get_world_size() - 1) - before)

    def most(self, slots: Sequence[float]) -> MeasuredMemory:
        """Return the largest device and host memory of any rank, from the summed slots."""
        figures = [round(figure) for figure in slots]
        rows = [figures[first : first + FIGURES] for first in range(0, len(figures), FIGURES)]
        # the rank with the fullest device and the rank with the largest process may differ
        allocated, reserved, outside, _, _ = max(rows, key=lambda row: row[1] + row[2])
        *_, host, shared = max(rows, key=lambda row: row[3])
        if self._device.type == "cpu":
            none = {"reserved_bytes": None, "outside_bytes": None}
            return MeasuredMemory(memory_bytes=host, host_bytes=host, shared_bytes=shared, **none)
        return MeasuredMemory(
            memory_bytes=allocated,
            reserved_bytes=reserved,
            outside_bytes=None if self._free is None else outside,
            host_bytes=host,
            shared_bytes=shared,
        )

    def _look(self) -> list[float]:
        """Return five figures in bytes.

        On the device: allocated, reserved, outside torch. On the host: resident, shared.
        """
        # The kernel reclaims pages of data files when memory is short. So they are subtracted from its peak of
        # resident memory since the last call.
        now = resident_memory()
        forget_resident_peak()
        self._host = max(self._host, now.peak - max(0, now.file - self._files))
        if self._device.type == "cpu":
            return [0.0, 0.0, 0.0, self._host, now.shared]
        stats = torch.cuda.memory_stats(self._device)
        if self._free is not None:
            free, _ = torch.cuda.mem_get_info(self._device)
            self._outside = max(self._outside, self._free - free - stats["reserved_bytes.all.current"])
        peaks = [stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")]
        return [*peaks, self._outside, self._host, now.shared]


def record_allocations(file: Path) -> None:
    """Record the last allocations on this rank's GPU, with their lines.

    If an allocation fails, write the record to `file`.
    """
    torch.cuda.memory._record_memory_history(max_entries=RING_EVENTS)
    # called before the error unwinds the stack, so tensors that it would free are still in the snapshot
    attach: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]  # torch declares no types for it
    attach(lambda *_: torch.cuda.memory._dump_snapshot(str(file)))


class MemoryWatch(Callback):
    """Warns once if a run exceeds its forecast by more than the margin."""

    def __init__(self, forecast: MemoryForecast, warn: Callable[[str], None]):
        self._forecast, self._warn, self._warned = forecast, warn, False

    def on_step(self, record: StepRecord) -> None:
        """Compare the peak memory so far with the forecast."""
        self.look(MeasuredMemory.of(record), f"step {record['step']}")

    def look(self, measured: MeasuredMemory, when: str) -> None:
        """Warn if the `measured` memory exceeds the forecast plus margin. Warns only once."""
        text = None if self._warned else outgrown(measured, self._forecast)
        if text:
            self._warned = True
            self._warn(f"{when}: {text}")
