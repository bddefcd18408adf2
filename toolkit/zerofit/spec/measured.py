"""What a run has taken, beside its forecast: memory and step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from zerofit.spec.overhead import CPU_LIBRARY_BYTES, HOST_PROCESS_BYTES
from zerofit.spec.run_folder import MemoryForecast
from zerofit.spec.units import shown_bytes

TENSORS, CACHED = "tensors", "blocks that torch's allocator keeps for reuse (fragmentation)"
OUTSIDE = "memory outside of torch (context, communicators; other processes that came to the device)"
OWN, SHARED = "memory of the process alone (tensors, Python, what libraries take)", "shared or pinned memory"


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Bytes taken so far, at the most: of a device, by the rank with most there, and of the host, likewise."""

    memory_bytes: int  # of the device, by tensors; on CPUs `host_bytes`
    reserved_bytes: int | None  # of the device, by torch's allocator; None on CPUs
    outside_bytes: int | None  # of the device, outside of torch since the forecast; None on CPUs and without one
    host_bytes: int  # resident in the process, without the pages of data files
    shared_bytes: int  # of the host, now: pinned, or shared with the processes of a data loader

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> MeasuredMemory:
        """Return what a record of metrics.jsonl says."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    @property
    def on_cpu(self) -> bool:
        """Whether device and host are one."""
        return self.reserved_bytes is None


@dataclass(frozen=True, kw_only=True)
class ForecastFigure:
    """A figure of a run beside its forecast: bytes, or seconds."""

    measured: float
    forecast: float | None  # None: not known

    @property
    def difference(self) -> float | None:
        """What was measured above the forecast, as a share of it."""
        return self.measured / self.forecast - 1 if self.forecast else None

    def to_dict(self) -> dict[str, float | None]:
        """Return an entry of `against_forecast` in `zerofit train --json`."""
        return {**asdict(self), "difference": self.difference}


def memory_figures(taken: MeasuredMemory, forecast: MemoryForecast | None) -> dict[str, ForecastFigure]:
    """Return the figures of a run's memory that have a forecast, by their name in metrics.jsonl."""
    measured = {"memory_bytes": taken.memory_bytes}
    known = {}
    if forecast:  # on CPUs the pages of libraries, which ranks share, are resident in each
        known["memory_bytes"] = forecast.reserved_bytes + forecast.beside_bytes + CPU_LIBRARY_BYTES
    if taken.reserved_bytes is not None:
        measured |= {"reserved_bytes": taken.reserved_bytes, "host_bytes": taken.host_bytes}
        if forecast:
            known = {"memory_bytes": max(forecast.phases.values()), "reserved_bytes": forecast.reserved_bytes}
            known |= {"outside_bytes": forecast.beside_bytes, "host_bytes": forecast.host_bytes + HOST_PROCESS_BYTES}
    if taken.outside_bytes is not None:
        measured["outside_bytes"] = taken.outside_bytes
    return {name: ForecastFigure(measured=size, forecast=known.get(name)) for name, size in measured.items()}


def outgrown(taken: MeasuredMemory, forecast: MemoryForecast) -> str | None:
    """Return by how much a rank has left its forecast, and the kind that grew most; None within the margin.

    Kinds are as fine as a running process can tell them, and add up to the whole.
    """
    pairs = memory_figures(taken, forecast)
    above = {name: int(pair.measured - (pair.forecast or 0)) for name, pair in pairs.items()}
    shared = taken.shared_bytes - forecast.pinned_bytes
    if taken.on_cpu:
        place, margin, kinds = "memory", forecast.margin_bytes, {OWN: above["memory_bytes"] - shared, SHARED: shared}
        return _left(place, taken.memory_bytes, margin, kinds)
    kinds = {TENSORS: above["memory_bytes"], CACHED: above["reserved_bytes"] - above["memory_bytes"]}
    kinds[OUTSIDE] = above.get("outside_bytes", 0)
    size = (taken.reserved_bytes or 0) + (taken.outside_bytes or 0)
    host = {OWN: above["host_bytes"] - shared, SHARED: shared}
    return _left("memory of the device", size, forecast.margin_bytes, kinds) or _left(
        "host memory", taken.host_bytes, forecast.host_margin_bytes, host
    )


def _left(place: str, size: int, margin: int, kinds: Mapping[str, int]) -> str | None:
    above = sum(kinds.values())
    if above <= margin:
        return None
    kind, most = max(kinds.items(), key=lambda pair: pair[1])
    return (
        f"a rank has taken {shown_bytes(size)} of {place}, {shown_bytes(above)} more than its forecast (margin: "
        f"{shown_bytes(margin)}); what grew most: {kind}, {shown_bytes(most)} more"
    )
