"""Leave a run's frozen weights out of checkpoints, and identify them by a checksum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor

from zerofit.checkpoint.store import FrozenWeights, checksum_text
from zerofit.models.checksums import part_checksum
from zerofit.models.dtypes import torch_name
from zerofit.models.quantized import source_of_bits
from zerofit.spec.errors import Problem, UserError
from zerofit.train.shard_index import IndexedShard, indexed_frozen
from zerofit.train.trainer import EngineTrainer
from zerofit.train.zero_layouts import Engine

# The checksum is a sum over all numbers, each hashed with its name and position. A sum does not depend on the order, so
# ranks get the same result when they add up their stretches in any layout.
_EXTRAS = (".SCB", ".weight_format")  # of Linear8bitLt


def frozen_weights(trainer: EngineTrainer) -> FrozenWeights:
    """Return checksum, dtype and count of the frozen parameters. All ranks must call this."""
    total, parameters, dtype = 0, 0, torch.float32
    for tag, engine in trainer.engines().items():
        for indexed in indexed_frozen(trainer, engine, tag):
            source = source_of_bits(indexed.shard.parameter)
            if source is not None:  # checksum of the numbers before quantization, counted with the first stretch
                counted = indexed.first and indexed.shard.start == 0 and indexed.shard.numel > 0
                total += (source.checksum or 0) * counted
                parameters += source.elements * counted
                dtype = source.dtype
                continue
            # all ranks must call this, since it may gather
            stretch = _stretch(indexed)
            if indexed.first:
                total += part_checksum(indexed.name, stretch, indexed.shard.start)
                parameters += indexed.shard.numel
            dtype = stretch.dtype
    shared: list[tuple[int, int, str | None]] = [(0, 0, None)] * dist.get_world_size()
    dist.all_gather_object(shared, (total, parameters, torch_name(dtype) if parameters else None))
    dtypes = [name for _, _, name in shared if name]
    return FrozenWeights(
        parameters=sum(count for _, count, _ in shared),
        dtype=dtypes[0] if dtypes else torch_name(dtype),
        checksum=checksum_text(sum(part for part, _, _ in shared)),
    )


def refuse_other_frozen(trainer: EngineTrainer, saved: FrozenWeights | None) -> None:
    """Raise UserError if the frozen weights differ from those of the run that was saved."""
    if saved is None:
        return
    own = frozen_weights(trainer)
    if own.dtype != saved.dtype or own == saved:  # bits of different precisions cannot be compared
        return
    message = f"the frozen weights of {trainer.job.run.model} differ from those of the checkpoint: checksum "
    message += f"{own.checksum} here, {saved.checksum} in the checkpoint"
    hint = "check whether the pretrained model's folder has changed; the checkpoint has only the trained part"
    raise UserError(Problem(kind="other-base", message=message, hint=hint, where="MODEL"))


def leave_out_frozen(engine: Engine) -> None:
    """Keep frozen weights out of DeepSpeed's files."""
    original = engine.module_state_dict

    def module_state_dict(*args: object, **kwargs: object) -> dict[str, object]:
        state = original(*args, **kwargs)
        if isinstance(state, dict):  # a pipeline writes its layers to other files
            # DeepSpeed saves a tied weight under each of its names (engine.py:4013)
            parameters = dict(engine.module.named_parameters(remove_duplicate=False))
            frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
            layers = {name.removesuffix("weight") for name in frozen if source_of_bits(parameters[name]) is not None}
            for name in [name for name in state if name in frozen or _of_bits(name, layers)]:
                del state[name]
        return state

    engine.module_state_dict = module_state_dict


def _of_bits(name: str, layers: set[str]) -> bool:
    """Return whether a name is data that bitsandbytes saves with weights of these layers."""
    layer, separator, _ = name.partition("weight.")
    return (bool(separator) and layer in layers) or (name.endswith(_EXTRAS) and f"{name.rpartition('.')[0]}." in layers)


def _stretch(indexed: IndexedShard) -> Tensor:
    """Return this rank's part of a frozen weight. If it is on NVMe, all ranks gather the weight."""
    shard, parameter = indexed.shard, indexed.shard.parameter
    partitioned: Any = getattr(parameter, "ds_tensor", None)
    if partitioned is not None and partitioned.status is not PartitionedParamStatus.AVAILABLE:
        with GatheredParameters([parameter]):
            return parameter.detach().reshape(-1)[shard.start : shard.start + shard.numel].clone()
    return shard.master.detach().reshape(-1)[shard.offset : shard.offset + shard.numel]
