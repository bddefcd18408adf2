"""Process groups of layouts with more than one of tensor, pipeline and sequence parallelism.

DeepSpeed's own ways to a tensor or a sequence group each make groups as if they were alone, and take the engine's `mpu`
(runtime/engine.py:957, runtime/sequence_parallel/parallel_state_sp.py:50). So its engine is shown one `data` axis and
one `model` axis instead: sequence ranks have tokens of their own, which makes them data ranks to everything but
attention, and only the layers that are split know of tensor ranks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist
from deepspeed import comm

from zerofit.spec.mesh import ranks_along
from zerofit.spec.run_folder import Layout


class MeshGroups:
    """This rank's groups, and what DeepSpeed's engine asks of an `mpu`.

    A group is made when it is first asked for, which all ranks must do in one order.
    """

    def __init__(self, layout: Layout):
        self._layout, self._rank = layout, dist.get_rank()

    @cached_property
    def tensor(self) -> Any:
        """The ranks that each hold a slice of this rank's layers."""
        return self._group("tp")

    @cached_property
    def sequence(self) -> Any:
        """The ranks that each have a part of this rank's sequences."""
        return self._group("sp")

    @cached_property
    def data(self) -> Any:
        """The ranks that hold the same layers and slices; the engine averages, partitions and clips over them."""
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
        """Return the group over which the engine adds up norms."""
        return self.tensor

    def get_model_parallel_world_size(self) -> int:
        """Return the size of that group."""
        return self._layout.tp

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in that group, which is also in the names of its files."""
        return dist.get_rank(self.tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
