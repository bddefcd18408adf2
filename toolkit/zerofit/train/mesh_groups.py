"""Process groups of layouts that combine tensor, pipeline and sequence parallelism.

DeepSpeed creates tensor and sequence groups independently, each as if it were alone, and both use the engine's `mpu`
(runtime/engine.py:957, runtime/sequence_parallel/parallel_state_sp.py:50). So the engine gets one `data` axis and one
`model` axis instead. Sequence ranks have different tokens, so everything except attention treats them as data ranks;
only the split layers use tensor ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist
from deepspeed import comm

from zerofit.spec.mesh import ranks_along
from zerofit.spec.run_folder import Layout


class MeshGroups:
    """This rank's groups, with the methods that DeepSpeed's engine calls on an `mpu`.

    A group is created on first use, so all ranks must use the groups in the same order.
    """

    def __init__(self, layout: Layout):
        self._layout, self._rank = layout, dist.get_rank()

    @cached_property
    def tensor(self) -> Any:
        """Ranks that each hold a slice of this rank's layers."""
        return self._group("tp")

    @cached_property
    def sequence(self) -> Any:
        """Ranks that each have a part of this rank's sequences."""
        return self._group("sp")

    @cached_property
    def data(self) -> Any:
        """Ranks with the same layers and slices; the engine averages, partitions and clips over them."""
        return self._group("dp", "sp")

    def _group(self, *axes: str) -> Any:
        made = [(comm.new_group(ranks=ranks), ranks) for ranks in ranks_along(self._layout, *axes)]
        return next(group for group, ranks in made if self._rank in ranks)

    def get_data_parallel_group(self) -> Any:
        """Return the group over which the engine averages gradients."""
        return self.data

    def get_data_parallel_world_size(self) -> int:
        """Return the size of that group."""
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number in that group."""
        return dist.get_rank(self.data)

    def get_model_parallel_group(self) -> Any:
        """Return the group over which the engine sums norms."""
        return self.tensor

    def get_model_parallel_world_size(self) -> int:
        """Return the size of that group."""
        return self._layout.tp

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in that group, which also appears in the names of its files."""
        return dist.get_rank(self.tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
