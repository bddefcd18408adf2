"""Whether a simulated rank fits its device, and what that takes for granted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerofit.simulate.allocator import Event, Reserved, replay
from zerofit.simulate.context import Overhead
from zerofit.spec.overhead import REPLAYED
from zerofit.spec.units import shown_bytes

FITS, WITHIN, NOT = "fits", "within the margin", "does not fit"


@dataclass(frozen=True, kw_only=True)
class FitVerdict:
    """One of FITS, WITHIN and NOT, and why."""

    word: str
    margin_bytes: int  # what the device has left with every overhead at its upper end; negative: what is missing
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether it fits for all that is known. WITHIN does not count: such a run may run out."""
        return self.word == FITS


def judge(
    peak_reserved_bytes: int, overheads: Sequence[Overhead], device_bytes: int, kept_free_bytes: int | None = None
) -> FitVerdict:
    """Hold the reserved peak and what is beside it against the device.

    `kept_free_bytes` (default: REPLAYED of the peak) is for what no simulation knows. Fits: also with every overhead at
    its upper end and that kept free. Does not fit: not even with every overhead at its lower end.
    """
    kept = round(REPLAYED * peak_reserved_bytes) if kept_free_bytes is None else kept_free_bytes
    left = device_bytes - peak_reserved_bytes - sum(o.high_bytes for o in overheads)
    at_best = device_bytes - peak_reserved_bytes - sum(o.low_bytes for o in overheads)
    word = FITS if left >= kept else NOT if at_best < 0 else WITHIN
    return FitVerdict(
        word=word, margin_bytes=left, sentence=_sentence(word, peak_reserved_bytes, overheads, device_bytes, kept)
    )


def judge_events(
    events: Sequence[Event], overheads: Sequence[Overhead], device_bytes: int, *, expandable: bool = False
) -> tuple[FitVerdict, Reserved]:
    """The verdict on a sequence of allocations, and the replay that it rests on.

    Where the reserved peak is too large, the allocator's giving back of cached segments may still save the run: the
    sequence is replayed with what the device leaves to it.
    """
    found = replay(events, expandable=expandable)
    verdict = judge(found.peak_reserved_bytes, overheads, device_bytes)
    if verdict.fits or device_bytes <= 0:
        return verdict, found
    kept = round(REPLAYED * found.peak_reserved_bytes)
    for word, taken in (
        (FITS, kept + sum(o.high_bytes for o in overheads)),
        (WITHIN, sum(o.low_bytes for o in overheads)),
    ):
        tight = replay(events, device_bytes=device_bytes - taken, expandable=expandable)
        if tight.out_of_memory is None:
            return _squeezed(word, tight, overheads, device_bytes, kept), tight
    sentence = _sentence(NOT, found.peak_reserved_bytes, overheads, device_bytes, kept)
    sentence += f" The allocation that fails first asks for {shown_bytes(tight.out_of_memory.asked_bytes)}."
    return FitVerdict(word=NOT, margin_bytes=verdict.margin_bytes, sentence=sentence), found


def _squeezed(word: str, tight: Reserved, overheads: Sequence[Overhead], device_bytes: int, kept: int) -> FitVerdict:
    left = device_bytes - tight.peak_reserved_bytes - sum(o.high_bytes for o in overheads)
    sentence = _sentence(word, tight.peak_reserved_bytes, overheads, device_bytes, kept)
    if tight.flushes:
        sentence += (
            f" It fits only by giving cached memory back to the driver (flushes: {tight.flushes}), each of which stops"
            " the device; PYTORCH_ALLOC_CONF=expandable_segments:True fragments less."
        )
    return FitVerdict(word=word, margin_bytes=left, sentence=sentence)


def _sentence(word: str, reserved: int, overheads: Sequence[Overhead], device_bytes: int, kept: int) -> str:
    low, high = sum(o.low_bytes for o in overheads), sum(o.high_bytes for o in overheads)
    beside = shown_bytes(high) if low == high else f"{shown_bytes(low)} to {shown_bytes(high)}"
    names = ", ".join(o.name for o in overheads)
    reckoned = f" ({names}; the verdict reckons with the upper end)" if overheads else ""
    end = {
        FITS: f"{shown_bytes(device_bytes - reserved - high)} are left, of which {shown_bytes(kept)} are kept free "
        "for kernels' scratch and fragmentation.",
        WITHIN: f"Less than {shown_bytes(kept)}, kept for kernels' scratch and fragmentation, may be left: "
        "it may run out of memory.",
        NOT: f"At least {shown_bytes(reserved + low - device_bytes)} are missing.",
    }[word]
    return (
        f"Of the device's {shown_bytes(device_bytes)} torch reserves {shown_bytes(reserved)} "
        f"and {beside} lie beside it{reckoned}. {end}"
    )
