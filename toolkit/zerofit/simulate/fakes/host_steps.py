"""Replace SuperOffload's optimizer process: queued groups are stepped at once.

That process has moments and a buffer of its own in host memory. They are allocated here, since a simulation has a
single process.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class HostSteps:
    """Replaces `SuperOffloadCPUOptimizer` (runtime/superoffload/superoffload_utils.py)."""

    def __init__(self, *, max_grad_numel: int, pin_memory: bool, **_: Any):
        from deepspeed.runtime.superoffload.superoffload_utils import _allocate_worker_grad_buffer

        self._buffer = _allocate_worker_grad_buffer(max_grad_numel, pin_memory)
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done: deque[dict[str, Any]] = deque()

    def async_step(
        self, param_group_id: int, sub_group_id: int, fp32_param: torch.Tensor, fp32_grad: torch.Tensor, **_: Any
    ) -> None:
        """Step a group; the first time, allocate its moments."""
        from deepspeed.runtime.superoffload.superoffload_utils import ResultKeys, TaskKeys

        if sub_group_id not in self._moments:
            self._moments[sub_group_id] = torch.zeros_like(fp32_param), torch.zeros_like(fp32_param)
        self._done.append({TaskKeys.SUB_GROUP_ID: sub_group_id, ResultKeys.UPDATED_PARAM: fp32_param})

    def get_result(self, **_: Any) -> dict[str, Any] | None:
        """Return the next group that was stepped, if there is one."""
        return self._done.popleft() if self._done else None
