"""Make a simulated rank's record from its tracker and its log."""

from __future__ import annotations

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.memory.alloc_conf import read_alloc_conf
from zerofit.simulate.memory.allocator import replay
from zerofit.simulate.memory.categories import classify
from zerofit.simulate.memory.host import highest, host_moments
from zerofit.simulate.memory.ledger import device_events, kind_peaks, timeline
from zerofit.simulate.memory.snapshot import AllocationOrigin
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.simulate.record import CollectiveCalls, GroupUse, PhaseFlops, RankRecord, ScriptFacts
from zerofit.spec.memory_kinds import SAVED


def record_of(
    meter: AllocationTracker,
    log: PhaseLog,
    alloc_conf: str,
    *,
    script: ScriptFacts | None = None,
    heavier_rank: int | None = None,
) -> RankRecord:
    """Return the record of a rank. `alloc_conf`: the options of the caching allocator."""
    # all storages get their kind only now: the owner of an early one, e.g. an optimizer's state, is often known late
    ledger = meter.ledger
    for storage in ledger.storages:
        storage.kind = storage.kind or classify(storage)
    moments = host_moments(ledger)
    events, settings = device_events(ledger), read_alloc_conf(alloc_conf)
    origins = None
    if meter.stacks is not None:
        origins = tuple(
            AllocationOrigin(s.kind or "", s.phase, s.step, s.module, s.op, s.stack) for s in ledger.storages
        )
    return RankRecord(
        phases=log.done,
        peaks=kind_peaks(ledger),
        host=highest(moments),
        host_phases={phase: moment.total_bytes for phase, moment in moments.items()},
        host_moments=moments,
        kept={kind: sum(s.bytes for s in meter.live_storages() if s.kind == kind) for kind in SAVED},
        nvme_bytes=sum(meter.files.values()),
        reserved_bytes=replay(events, settings=settings, host_ahead=False).peak_reserved_bytes,
        reserved_ahead_bytes=replay(events, settings=settings).peak_reserved_bytes,
        sent=[
            CollectiveCalls(op=op, bytes=size, group_size=ranks, phase=phase, count=count, step=step)
            for (op, ranks, phase, step), (count, size) in meter.sent.items()
        ],
        groups=[GroupUse(ranks=ranks, ops=tuple(sorted(ops))) for ranks, ops in meter.groups.values()],
        flops=[PhaseFlops(phase=phase, step=step, flops=n) for (phase, step), n in meter.flops.items()],
        timeline=timeline(ledger),
        events=events,
        origins=origins,
        convolution_bytes=meter.convolution_bytes,
        script=script,
        heavier_rank=heavier_rank,
    )
