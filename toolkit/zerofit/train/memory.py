"""Memory that this rank takes, looked at once a block of steps, and whether it stays within its forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zerofit.spec.measured import MeasuredMemory, outgrown
from zerofit.spec.process import forget_resident_peak, resident_memory
from zerofit.spec.run_folder import MemoryForecast
from zerofit.train.callbacks import Callback, StepRecord

FIGURES = 5  # of a rank


class RankMemory:
    """The most that this rank has taken so far, and by an exchange the most of any rank."""

    def __init__(self, device: torch.device, free_bytes: int | None):
        """Begin to look; `free_bytes` of the device before any rank had started, where that is known."""
        self._device, self._free, self._outside = device, free_bytes, 0
        start = resident_memory()
        self._files, self._host = start.file, start.peak
        forget_resident_peak()

    def slots(self) -> list[float]:
        """Return the figures of all ranks, zero but for this rank's own, so that a sum over ranks has them all."""
        mine = self._look()
        before = FIGURES * dist.get_rank()
        return [0.0] * before + mine + [0.0] * (FIGURES * (dist.get_world_size() - 1) - before)

    def most(self, slots: Sequence[float]) -> MeasuredMemory:
        """Return the device memory of the rank that has taken most of it, and likewise the host memory."""
        figures = [round(figure) for figure in slots]
        rows = [figures[first : first + FIGURES] for first in range(0, len(figures), FIGURES)]
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
        """Return bytes: of the device allocated, reserved and outside of torch; of the host resident and shared.

        The kernel's mark of the peak is set back each time, so that pages of data files, which it takes back when
        memory is short, can be told from what was resident beside them.
        """
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


class MemoryWatch(Callback):
    """Warns once where a run leaves its forecast by more than its margin."""

    def __init__(self, forecast: MemoryForecast, warn: Callable[[str], None]):
        self._forecast, self._warn, self._warned = forecast, warn, False

    def on_step(self, record: StepRecord) -> None:
        """Hold what has been taken up to a step against the forecast."""
        self.look(MeasuredMemory.of(record), f"step {record['step']}")

    def look(self, taken: MeasuredMemory, when: str) -> None:
        """Hold what was taken against the forecast."""
        text = None if self._warned else outgrown(taken, self._forecast)
        if text:
            self._warned = True
            self._warn(f"{when}: {text}")
