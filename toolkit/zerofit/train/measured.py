"""Compare the measured memory and step time of a run with the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from zerofit.spec.overhead import CPU_LIBRARY_BYTES, HOST_PROCESS_BYTES
from zerofit.spec.run_folder import MemoryForecast
from zerofit.spec.units import shown_bytes

TENSORS, CACHED = "tensors", "blocks that torch's allocator keeps for reuse (fragmentation)"
OUTSIDE = "memory outside torch (context, communicators, new processes on the device)"
OWN, SHARED = "memory of the process (tensors, Python, libraries)", "shared or pinned memory"


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Peak bytes so far on the device and on the host, each for the rank that uses the most."""

    memory_bytes: int  # tensors on the device; on CPUs `host_bytes`
    reserved_bytes: int | None  # reserved on the device by torch's allocator; None on CPUs
    outside_bytes: int | None  # on the device outside torch since the forecast; None on CPUs or without a forecast
    host_bytes: int  # resident in the process, without the pages of data files
    shared_bytes: int  # host memory now pinned or shared with data loader processes

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> MeasuredMemory:
        """Return the figures of a record of metrics.jsonl."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the host."""
        return self.reserved_bytes is None


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


def memory_figures(taken: MeasuredMemory, forecast: MemoryForecast | None) -> dict[str, ForecastFigure]:
    """Return the memory figures of a run with their forecasts, by the name in metrics.jsonl."""
    measured = {"memory_bytes": taken.memory_bytes}
    known = {}
    if forecast:  # on CPUs each rank's resident memory includes the shared pages of libraries
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
    """If a rank exceeds forecast plus margin, return a message that names what grew most; else None."""
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
        f"a rank uses {shown_bytes(size)} of {place}, {shown_bytes(above)} more than forecast (margin: "
        f"{shown_bytes(margin)}); {kind} grew most, by {shown_bytes(most)}"
    )
