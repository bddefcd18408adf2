"""Measure this rank's memory use once per block of steps, and compare it with the forecast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofit.spec.overhead import HOST_PROCESS_BYTES
from zerofit.spec.process import forget_resident_peak, resident_memory
from zerofit.spec.run_folder import MemoryForecast
from zerofit.spec.units import shown_bytes
from zerofit.train.callbacks import Callback, MeasuredMemory, StepRecord

FIGURES = 5  # per rank
RING_EVENTS = 100_000  # allocations and frees: some steps of a large model
TENSORS, CACHED = "tensors", "blocks that torch's allocator keeps for reuse (fragmentation)"
OUTSIDE = "memory outside torch (context, communicators, new processes on the device)"
OWN, SHARED = "memory of the process (tensors, Python, libraries)", "shared or pinned memory"


@dataclass(frozen=True, kw_only=True)
class ForecastFigure:
    """A measured figure of a run and its forecast, in bytes or seconds."""

    measured: float
    forecast: float | None  # None: unknown

    @property
    def difference(self) -> float | None:
        """Relative difference: measured / forecast - 1."""
        return self.measured / self.forecast - 1 if self.forecast else None

    def to_dict(self) -> dict[str, float | None]:
        """Return an entry of `against_forecast` in `zerofit train --json`."""
        return {**asdict(self), "difference": self.difference}


# Ranks learn the peaks of all others without an exchange of their own: each fills its five numbers into its own slots
# of the vector that `train.metrics` sums over ranks anyway.
class RankMemory:
    """The peak memory of this rank so far and, after an exchange, of all ranks."""

    def __init__(self, device: torch.device, free_bytes: int | None):
        """Start measuring. `free_bytes`: of the device before any rank started; None if unknown."""
        self._device, self._free, self._outside = device, free_bytes, 0
        start = resident_memory()
        # How many pages of a library are resident depends on how Linux caches the file: 234 to 319 MiB for torch and
        # DeepSpeed (Linux 6.18). So none are counted on CPUs, where the forecast is of private memory.
        self._files = 0 if device.type == "cpu" else start.file
        self._host = start.peak - (start.file - self._files)
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
            allocated, reserved = host, None
        return {
            "memory_bytes": allocated,
            "reserved_bytes": reserved,
            "outside_bytes": None if reserved is None or self._free is None else outside,
            "host_bytes": host,
            "shared_bytes": shared,
        }

    def _look(self) -> list[float]:
        """Return five figures in bytes.

        On the device: allocated, reserved, outside torch. On the host: resident, shared.
        """
        # The kernel reclaims pages of files when memory is short. So they are subtracted from its peak of resident
        # memory since the last call.
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


def memory_figures(peaks: MeasuredMemory, forecast: MemoryForecast | None) -> dict[str, ForecastFigure]:
    """Return the memory figures of a run with their forecasts, by the name in metrics.jsonl."""
    measured = {"memory_bytes": peaks["memory_bytes"]}
    expected = {}
    if forecast:
        expected["memory_bytes"] = forecast.reserved_bytes + forecast.beside_bytes
    if peaks["reserved_bytes"] is not None:
        measured |= {"reserved_bytes": peaks["reserved_bytes"], "host_bytes": peaks["host_bytes"]}
        if forecast:
            expected = {"memory_bytes": max(forecast.phases.values()), "reserved_bytes": forecast.reserved_bytes}
            expected |= {"outside_bytes": forecast.beside_bytes, "host_bytes": forecast.host_bytes + HOST_PROCESS_BYTES}
    if peaks["outside_bytes"] is not None:
        measured["outside_bytes"] = peaks["outside_bytes"]
    return {name: ForecastFigure(measured=size, forecast=expected.get(name)) for name, size in measured.items()}


def outgrown(peaks: MeasuredMemory, forecast: MemoryForecast) -> str | None:
    """Return a message that names what grew most beyond forecast plus margin; None if nothing."""
    pairs = memory_figures(peaks, forecast)
    above = {name: int(pair.measured - (pair.forecast or 0)) for name, pair in pairs.items()}
    # pinned memory counts as shared, so only what exceeds the forecast of pinned memory has grown
    shared = peaks["shared_bytes"] - forecast.pinned_bytes
    if peaks["reserved_bytes"] is None:
        place, margin, kinds = "memory", forecast.margin_bytes, {OWN: above["memory_bytes"] - shared, SHARED: shared}
        return _exceeded(place, peaks["memory_bytes"], margin, kinds)
    kinds = {TENSORS: above["memory_bytes"], CACHED: above["reserved_bytes"] - above["memory_bytes"]}
    kinds[OUTSIDE] = above.get("outside_bytes", 0)
    size = peaks["reserved_bytes"] + (peaks["outside_bytes"] or 0)
    host = {OWN: above["host_bytes"] - shared, SHARED: shared}
    on_device = _exceeded("memory of the device", size, forecast.margin_bytes, kinds)
    return on_device or _exceeded("host memory", peaks["host_bytes"], forecast.host_margin_bytes, host)


def _exceeded(place: str, size: int, margin: int, kinds: Mapping[str, int]) -> str | None:
    above = sum(kinds.values())
    if above <= margin:
        return None
    kind, most = max(kinds.items(), key=lambda pair: pair[1])
    return (
        f"a rank uses {shown_bytes(size)} of {place}, {shown_bytes(above)} more than forecast (margin: "
        f"{shown_bytes(margin)}); {kind} grew most, by {shown_bytes(most)}"
    )


class MemoryWatch(Callback):
    """Warns once if a run exceeds its forecast by more than the margin."""

    def __init__(self, forecast: MemoryForecast, warn: Callable[[str], None]):
        self._forecast, self._warn, self._warned = forecast, warn, False

    def on_step(self, record: StepRecord) -> None:
        """Compare the peak memory so far with the forecast."""
        self.look(record, f"step {record['step']}")

    def look(self, measured: MeasuredMemory, when: str) -> None:
        """Warn if the `measured` memory exceeds the forecast plus margin. Warns only once."""
        text = None if self._warned else outgrown(measured, self._forecast)
        if text:
            self._warned = True
            self._warn(f"{when}: {text}")
