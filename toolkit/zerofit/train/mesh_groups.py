"""Make the process groups of combined layouts, and attention over split sequences."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch.distributed as dist
from deepspeed import comm
from torch import Tensor, nn

from zerofit.spec.mesh import ranks_along
from zerofit.spec.run_folder import Job, Layout


# DeepSpeed creates tensor groups as if there were no sequence groups, and vice versa. Both use the engine's `mpu`
# (runtime/engine.py:957, runtime/sequence_parallel/parallel_state_sp.py:50). So the engine gets one `data` axis and one
# `model` axis instead. Sequence ranks have different tokens, so all code except attention treats them as data ranks.
# Only the split layers use tensor ranks.
#
# Ranks of pp 2 x dp 2 x sp 2 and the groups of rank 0 (`spec.mesh` numbers them, tensor ranks fastest):
#
#     stage 0   0 1 | 2 3      sequence {0, 1}: parts of the same samples     data {0, 1, 2, 3}: averages, norms
#     stage 1   4 5 | 6 7      tensor {0}
class MeshGroups:
    """This rank's groups, with the methods that DeepSpeed's engine calls on an `mpu`.

    A group is created on first use, so all ranks must use the groups in the same order.
    """

    def __init__(self, layout: Layout):
        self._layout, self._rank = layout, dist.get_rank()

    @cached_property
    def tensor(self) -> dist.ProcessGroup:
        """The group of ranks that each have a slice of this rank's layers."""
        return self._group("tp")

    @cached_property
    def sequence(self) -> dist.ProcessGroup:
        """The group of ranks that each have a part of this rank's sequences."""
        return self._group("sp")

    @cached_property
    def data(self) -> dist.ProcessGroup:
        """The group over which the engine averages and partitions: ranks with the same layers."""
        return self._group("dp", "sp")

    def _group(self, *axes: str) -> dist.ProcessGroup:
        # all ranks must create all groups
        groups = [(comm.new_group(ranks=ranks), ranks) for ranks in ranks_along(self._layout, *axes)]
        return cast(dist.ProcessGroup, next(group for group, ranks in groups if self._rank in ranks))

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group over which the engine averages gradients."""
        return self.data

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the data parallel group."""
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number in its data parallel group."""
        return dist.get_rank(self.data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group over which the engine sums norms."""
        return self.tensor

    def get_model_parallel_world_size(self) -> int:
        """Return the size of the model parallel group."""
        return self._layout.tp

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in the model parallel group, which DeepSpeed uses in file names."""
        return dist.get_rank(self.tensor)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def exchange_heads(config: Any, job: Job, group: Any) -> None:  # DeepSpeed's annotation is its own class
    """Replace transformers' attention by Ulysses attention over the group's ranks.

    They exchange parts of sequences for heads.
    """
    # `UlyssesSPAttentionHF.register_with_transformers` creates its own groups of neighboring ranks and exchanges all
    # heads of the config. It cannot be used, since tensor ranks have only a part of the heads (ulysses_sp.py:401).
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seq_len, heads, kernel = job.run.seq_len, config.num_attention_heads, config._attn_implementation
    assert seq_len  # a job's run on text is resolved
    ulysses: Any = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[kernel],
        batch_size=job.batch.micro,
        attn_head_count=heads // job.layout.tp,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        kv_head_count=config.num_key_value_heads // job.layout.tp,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        local_seq_length=seq_len // dist.get_world_size(group),
        global_seq_length=seq_len,
    )
    ulysses.core_attn_implementation = kernel

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *args: object,
        **kwargs: object,
    ) -> object:
        # the mask covers only this rank's tokens; attention over the full sequence is causal without it
        return ulysses(module, query, key, value, None, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[kernel] = attend
