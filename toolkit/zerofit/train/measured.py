"""Compare the measured memory and step time of a run with the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from zerofit.spec.overhead import CPU_LIBRARY_BYTES, HOST_PROCESS_BYTES
from zerofit.spec.run_folder import MemoryForecast
from zerofit.spec.units import shown_bytes
from zerofit.train.callbacks import StepRecord

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
    def of(cls, record: StepRecord) -> MeasuredMemory:
        """Return the figures of a record of metrics.jsonl."""
        return cls(
            memory_bytes=record["memory_bytes"],
            reserved_bytes=record["reserved_bytes"],
            outside_bytes=record["outside_bytes"],
            host_bytes=record["host_bytes"],
            shared_bytes=record["shared_bytes"],
        )

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


def memory_figures(peaks: MeasuredMemory, forecast: MemoryForecast | None) -> dict[str, ForecastFigure]:
    """Return the memory figures of a run with their forecasts, by the name in metrics.jsonl."""
    measured = {"memory_bytes": peaks.memory_bytes}
    expected = {}
    if forecast:  # on CPUs each rank's resident memory includes the shared pages of libraries
        expected["memory_bytes"] = forecast.reserved_bytes + forecast.beside_bytes + CPU_LIBRARY_BYTES
    if peaks.reserved_bytes is not None:
        measured |= {"reserved_bytes": peaks.reserved_bytes, "host_bytes": peaks.host_bytes}
        if forecast:
            expected = {"memory_bytes": max(forecast.phases.values()), "reserved_bytes": forecast.reserved_bytes}
            expected |= {"outside_bytes": forecast.beside_bytes, "host_bytes": forecast.host_bytes + HOST_PROCESS_BYTES}
    if peaks.outside_bytes is not None:
        measured["outside_bytes"] = peaks.outside_bytes
    return {name: ForecastFigure(measured=size, forecast=expected.get(name)) for name, size in measured.items()}


def outgrown(peaks: MeasuredMemory, forecast: MemoryForecast) -> str | None:
    """Return a message that names what grew most beyond forecast plus margin; None if nothing."""
    pairs = memory_figures(peaks, forecast)
    above = {name: int(pair.measured - (pair.forecast or 0)) for name, pair in pairs.items()}
    # pinned memory counts as shared, so only what exceeds the forecast of pinned memory has grown
    shared = peaks.shared_bytes - forecast.pinned_bytes
    if peaks.on_cpu:
        place, margin, kinds = "memory", forecast.margin_bytes, {OWN: above["memory_bytes"] - shared, SHARED: shared}
        return _exceeded(place, peaks.memory_bytes, margin, kinds)
    kinds = {TENSORS: above["memory_bytes"], CACHED: above["reserved_bytes"] - above["memory_bytes"]}
    kinds[OUTSIDE] = above.get("outside_bytes", 0)
    size = (peaks.reserved_bytes or 0) + (peaks.outside_bytes or 0)
    host = {OWN: above["host_bytes"] - shared, SHARED: shared}
    return _exceeded("memory of the device", size, forecast.margin_bytes, kinds) or _exceeded(
        "host memory", peaks.host_bytes, forecast.host_margin_bytes, host
    )


def _exceeded(place: str, size: int, margin: int, kinds: Mapping[str, int]) -> str | None:
    above = sum(kinds.values())
    if above <= margin:
        return None
    kind, most = max(kinds.items(), key=lambda pair: pair[1])
    return (
        f"a rank uses {shown_bytes(size)} of {place}, {shown_bytes(above)} more than forecast (margin: "
        f"{shown_bytes(margin)}); {kind} grew most, by {shown_bytes(most)}"
    )
