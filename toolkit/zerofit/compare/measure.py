"""Time, memory and bytes on the wire of one process, step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import torch

from zerofit.compare.job import WARM
from zerofit.spec.flows import Flow, flows


class StrategyMeter:
    """Begins before the model is built; what comes after the last step is not in it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: list[float] = []
        self._flows: dict[str, Flow] = {}
        self._found: dict[str, Any] = {}
        _forget_peak(device)
        self._before = psutil.Process().memory_info().rss

    def step(self, done: int, last: bool) -> None:
        """So many steps are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if done == WARM:
            self._flows = flows()
            _forget_peak(self._device)  # of building the model, and of what only a first step needs
        if last:
            self._found = {**self._memory(), **self._wire()}

    def told(self) -> dict[str, Any]:
        """For the row of this strategy; `seconds` is None where this process has taken no steps."""
        timed = len(self._times) - 1 - WARM
        seconds = self._times[-1] - self._times[WARM] if timed > 0 else None
        none_sent = {"sent_bytes": None, "received_bytes": None}
        return {"timed_steps": max(0, timed), "seconds": seconds, **(self._found or self._memory() | none_sent)}

    def _memory(self) -> dict[str, int]:
        """A GPU's peak is torch's, over all devices of this process; a CPU's is by how much the process grew."""
        host = _peak_rss()
        if self._device.type != "cuda":
            return {"peak_bytes": max(0, host - self._before), "host_bytes": host}
        devices = range(torch.cuda.device_count())
        return {"peak_bytes": max(torch.cuda.max_memory_allocated(n) for n in devices), "host_bytes": host}

    def _wire(self) -> dict[str, int | None]:
        """Bytes of connections that lasted from the first timed step to the last; NCCL has ways of its own."""
        if self._device.type == "cuda":
            return {"sent_bytes": None, "received_bytes": None}
        both = [(self._flows[name], flow) for name, flow in flows().items() if name in self._flows]
        return {
            "sent_bytes": sum(now.sent - then.sent for then, now in both),
            "received_bytes": sum(now.received - then.received for then, now in both),
        }


def _forget_peak(device: torch.device) -> None:
    """Let peaks be counted from now on; the process's by the kernel (proc(5), clear_refs)."""
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
