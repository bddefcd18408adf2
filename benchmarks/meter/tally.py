"""A simulated rank that is counted twice: as `zerofit simulate` does, and with what this machine's kernels take."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

from torch import Tensor

from zerofit.simulate.engine import rank
from zerofit.simulate.ops.costs import Scratch
from zerofit.simulate.ops.tracker import AllocationTracker, CallSite
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.files import plain_data

from .scratch import KernelScratch


class TwoTallies(AllocationTracker):
    """The simulation's meter, with the kernels' measured scratch in its own figures and the known one beside them."""

    without_kernels: Counter[int]  # peak bytes by step, -1 before the first; of the last one made

    def __init__(self, device: str, known: Scratch, workspace_bytes: int = 0):
        super().__init__(device, self._take, workspace_bytes)
        self._known, self._kernels = known, KernelScratch()
        self._going_over = 0
        TwoTallies.without_kernels = Counter()

    def begin(self, name: str, step: int) -> None:
        """What follows belongs to this phase."""
        super().begin(name, step)
        self._note(0)

    def track(self, tensor: Tensor, op: str, place: CallSite | None = None, instead: int | None = None) -> None:
        """Note a storage; `instead`: of what it may take the memory."""
        super().track(tensor, op, place, instead)
        self._going_over = 0 if instead is None else tensor.nbytes

    def _take(self, op: str, args: Any, kwargs: Any, out: Any) -> int:
        """Called once the op's outputs are counted, when live memory may be at its highest."""
        self._note(self._known(op, args, kwargs, out) - self._going_over)
        self._going_over = 0
        return self._kernels(op, args, kwargs, out)

    def _note(self, scratch_bytes: int) -> None:
        self.without_kernels[self._step] = max(self.without_kernels[self._step], self.live() + scratch_bytes)


def simulated(target: SimulationTarget) -> dict[str, Any]:
    """Simulate a rank with kernels' scratch; its record, and "without_kernels": [[step, peak bytes], ...]."""
    with patch.object(rank, "AllocationTracker", TwoTallies):
        record = rank.simulate_rank(target)
    return plain_data(record) | {"without_kernels": list(TwoTallies.without_kernels.items())}
