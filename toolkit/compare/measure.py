"""Time, memory and bytes on the wire of one process, step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import torch

from zerofit.spec.flows import Flow, flows

WARM = 3  # steps that are left out: connections, caches
TELL_S = 0.5


class Measure:
    """Begins before the model is built."""

    def __init__(self, device: torch.device, progress: Path | None):
        self._device, self._progress, self._told = device, progress, 0.0
        self._times: list[float] = []
        self._flows: dict[str, Flow] = {}
        _forget_peak()
        self._before = psutil.Process().memory_info().rss

    def step(self, done: int) -> None:
        """So many steps are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if done == WARM:
            self._flows = flows()
        if self._progress and (self._times[-1] - self._told > TELL_S):
            self._progress.write_text(str(done))
            self._told = self._times[-1]

    def told(self) -> dict[str, Any]:
        """For the row of this strategy; `seconds` is None where this process has taken no steps."""
        timed = len(self._times) - 1 - WARM
        then = self._flows
        now = flows() if timed > 0 else {}
        lasting = [(then[name], flow) for name, flow in now.items() if name in then]
        on_wire = self._device.type == "cpu"  # NCCL has ways of its own
        host = _peak_rss()
        peak = host - self._before
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        return {
            "timed_steps": max(0, timed),
            "seconds": self._times[-1] - self._times[WARM] if timed > 0 else None,
            "sent_bytes": sum(b.sent - a.sent for a, b in lasting) if on_wire else None,
            "received_bytes": sum(b.received - a.received for a, b in lasting) if on_wire else None,
            "peak_bytes": max(0, peak),
            "host_bytes": host,
        }


def _forget_peak() -> None:
    """Let the kernel count the peak of this process's memory from now on (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
