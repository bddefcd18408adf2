"""How DeepSpeed's stage 3 lays out master weights and states, in memory, on NVMe and in its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from torch import Tensor, nn

from zerofit.train.param_shards import ParamShard, Unsupported


def partitioned(engine: Any, tag: str) -> Iterator[ParamShard]:
    """Stage 3: each parameter cut into equal parts, the last one padded; a rank's parts lie flat in sub groups."""
    optimizer, file = engine.optimizer, engine._get_zero_ckpt_name("", tag)
    if optimizer.offload_optimizer and optimizer.partial_offload < 1:
        raise Unsupported("offload_optimizer.ratio below 1 keeps states in an optimizer that DeepSpeed does not save")
    of_group = optimizer.sub_group_to_group_id
    saved_order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (of_group[i], i))
    for index, i in enumerate(saved_order):
        at = (file, ("optimizer_state_dict", "fp32_flat_groups", i))
        states_at = (file, ("optimizer_state_dict", "optimizer_state_dict", "state", index))
        offset, on_nvme = 0, _swap_files(optimizer, i, tag)
        for p in optimizer.fp16_groups[i]:
            start, numel = _part(p)
            yield ParamShard(
                parameter=p,
                master=optimizer.fp32_partitioned_groups_flat[i],
                offset=offset,
                start=start,
                numel=numel,
                master_at=at,
                states_at=states_at,
                on_nvme=on_nvme,
            )
            offset += p.ds_tensor.ds_numel


def _swap_files(optimizer: Any, sub_group: int, tag: str) -> dict[int, str]:
    """Where saving copies what a sub group has on NVMe, by id of the tensor."""
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        return {}
    info = optimizer.optimizer_swapper.swap_params_info[optimizer.fp32_partitioned_groups_flat[sub_group].ds_id]
    folder = f"{tag}/offloaded_tensors/rank{dp_index_to_str(dist.get_rank())}"
    return {id(one.compute_tensor): f"{folder}/{Path(one.swap_path).name}" for one in info.tensors}


@contextmanager
def in_memory(engine: Any, master: Tensor) -> Iterator[None]:
    """Within it a master and its states are there to be written to, also if their place is on NVMe."""
    optimizer = engine.optimizer
    if not getattr(optimizer, "swap_optimizer", False):
        yield
        return
    sub_group = next(i for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat) if flat is master)
    if not optimizer._swappable_optimizer_subgroup(sub_group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)  # while the masters are there
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def to_16_bit(optimizer: Any) -> None:
    """The partitions that the model is gathered from, out of the masters."""
    for sub_group in range(len(optimizer.fp16_groups)):
        if not optimizer._swappable_optimizer_subgroup(sub_group):  # `in_memory` has done it
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def frozen_part(engine: Any, p: nn.Parameter, tag: str) -> ParamShard:
    """This rank's part of a parameter that is not trained."""
    start, numel = _part(p)
    return ParamShard(
        parameter=p,
        master=p.ds_tensor,
        offset=0,
        start=start,
        numel=numel,
        master_at=(engine._get_ckpt_name("", tag), ("frozen_param_fragments", engine.param_names[p])),
        states_at=None,
    )


def _part(p: nn.Parameter) -> tuple[int, int]:
    """Start and length of this rank's part of a partitioned parameter, without padding; it may be empty."""
    start = dist.get_rank(p.ds_process_group) * p.ds_tensor.ds_numel
    return start, max(0, min(p.ds_tensor.ds_numel, p.ds_numel - start))
