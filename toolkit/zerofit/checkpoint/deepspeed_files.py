"""The files of a checkpoint that a DeepSpeed engine wrote, by rank.

*mp_rank_MM_model_states.pt        names, shapes, ties, counters; the 16-bit weights below stage 3
*zero_pp_rank_R_*optim_states.pt   rank R's flat partitions: master weights and the optimizer's states
layer_NN-model_MM-model_states.pt  a pipeline's weights: one file for each layer of each tensor parallel rank
layer_L_expert_E_*, expp_rank_*    a mixture's experts, and their optimizer at stage 0
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from zerofit.checkpoint import safe_load
from zerofit.checkpoint.foreign import MODEL_STATES, OPTIM_STATES, Foreign
from zerofit.checkpoint.index import Location, ParameterGroup, SavedBuffer, Shard, incomplete

LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
EXPERTS = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
Keys = list[str | int]


MISSING = "copy the files of all ranks into one folder; `zerofit ckpt verify` lists what is lost"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one checkpoint, by rank. A file is opened when it is needed."""

    root: Path  # folder that the index's paths are relative to
    folder: Path
    models: dict[tuple[int, int], str]  # by (model parallel rank, data parallel rank)
    optimizers: dict[tuple[int, int], str]
    layers: dict[tuple[int, int], str]  # by (number, tensor parallel rank)
    experts: list[str]
    expert_optimizers: dict[tuple[int, int], str]
    loaded: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Foreign) -> DeepSpeedFiles:
        """List the files of a checkpoint."""
        names = sorted(file.name for file in found.files.glob("*.pt"))
        by: dict[re.Pattern[str], dict[str, tuple[int, ...]]] = defaultdict(dict)
        for pattern in (MODEL_STATES, OPTIM_STATES, LAYER, EXPERT, EXPERT_OPTIM):
            for name in names:
                if match := pattern.fullmatch(name):
                    by[pattern][name] = tuple(int(number or 0) for number in match.groups())
        return cls(
            root=found.path,
            folder=found.files,
            models={(mp, dp): name for name, (dp, mp) in by[MODEL_STATES].items()},
            optimizers={(mp, dp): name for name, (dp, mp) in by[OPTIM_STATES].items()},
            layers={(number[0], number[1]): name for name, number in by[LAYER].items()},
            experts=list(by[EXPERT]),
            expert_optimizers={(mp, ep): name for name, (ep, mp) in by[EXPERT_OPTIM].items()},
        )

    def load(self, name: str) -> Any:
        """Return the content of a file. Its tensors stay on disk."""
        if name not in self.loaded:
            self.loaded[name] = safe_load.load(self.folder / name)
        return self.loaded[name]

    def at(self, name: str, keys: Keys, offset: int = 0) -> Location:
        """Return the location of a tensor in a file."""
        return Location(file=(self.folder / name).relative_to(self.root).as_posix(), keys=keys, offset=offset)

    @property
    def model_ranks(self) -> list[int]:
        """The model parallel ranks, that is, tensor or pipeline parallel ranks."""
        return sorted({mp for mp, _ in self.models} | {mp for mp, _ in self.optimizers})

    @property
    def tensor_ranks(self) -> int:
        """The tensor parallel degree. Without a pipeline, all model parallel ranks count."""
        return len({tp for _, tp in self.layers}) if self.layers else len(self.model_ranks)

    def model(self, mp: int) -> tuple[str, dict[str, Any]]:
        """Return the model states of the model parallel rank `mp`: file name and content.

        The file is from the first data parallel rank.
        """
        name = next((name for (rank, _), name in sorted(self.models.items()) if rank == mp), None)
        if name is None:
            raise incomplete(self.folder, f"mp_rank_{mp:02}_model_states.pt is missing", MISSING)
        state = self.load(name)
        if state.get("num_experts") and "param_shapes" not in state:  # up to DeepSpeed 0.16
            state["param_shapes"] = self._shapes_of_mixture(mp, dict(state["module"]))
        return name, state

    def _shapes_of_mixture(self, mp: int, weights: dict[str, Tensor]) -> list[dict[str, torch.Size]]:
        """Return the shapes of the flat groups of a mixture of experts, from the optimizer's files.

        DeepSpeed 0.14 divides the experts' elements by the number of all ranks. The optimizer's files then list only
        the first parameters of a partition. In this case the names are read from the experts' files.
        """
        for name in self.experts:
            weights |= self.load(name)
        groups: dict[int, dict[str, torch.Size]] = defaultdict(dict)
        flats: dict[int, list[int]] = defaultdict(list)
        lacking: dict[int, int] = {}  # expert parallel ranks, by group
        files = [file for (rank, _), file in sorted(self.optimizers.items()) if rank == mp]
        for saved in (self.load(file)["optimizer_state_dict"] for file in files):
            for number, mapping in enumerate(saved["param_slice_mappings"]):
                groups[number] |= {name: weights[name].shape for name in mapping}
                flats[number].append(saved["single_partition_of_fp32_groups"][number].numel())
                if lacks_experts(mapping, flats[number][-1]):
                    lacking[number] = len(files) // saved["partition_count"][number]
        for number, ranks in lacking.items():
            every = {name: tensor.shape for name, tensor in weights.items() if EXPERTS.fullmatch(name)}
            if sum(map(math.prod, every.values())) != sum(flats[number]):
                what = "the files layer_*_expert_* do not have the experts of the optimizer's files"
                raise incomplete(self.folder, what, MISSING)
            groups[number] = {name: every[name] for name in self._first_experts(mp, ranks)}
        return [groups[number] for number in sorted(groups)]

    def _first_experts(self, mp: int, ranks: int) -> list[str]:
        """Return the parameter names of the first rank's experts, in the model's order.

        `ranks`: the number of ranks over which the experts are split.
        """
        layers: dict[int, dict[int, str]] = defaultdict(dict)
        for name in self.experts:
            layer, expert, rank = (int(number) for number in cast("re.Match[str]", EXPERT.fullmatch(name)).groups())
            if rank == mp:
                layers[layer][expert] = name
        # Each expert parallel rank has consecutive experts of each layer. The first rank's files have the numbers from
        # 0 on.
        own = [layers[layer][n] for layer in sorted(layers) for n in range(len(layers[layer]) // ranks)]
        return [name for file in own for name in self.load(file)]

    def optimizer_ranks(self, mp: int) -> list[int]:
        """Return the data parallel ranks that wrote optimizer files, also files that are lost."""
        ranks = sorted(dp for rank, dp in self.optimizers if rank == mp)
        first = self.load(self.optimizers[mp, ranks[0]])["optimizer_state_dict"]
        # Stage 3 saves one number, stages 1 and 2 save a list. A group of experts has fewer partitions than the other
        # groups.
        counts = first.get("partition_count") or self.model(mp)[1].get("dp_world_size") or len(ranks)
        return [*range(max(*ranks, int(max(counts) if isinstance(counts, list | tuple) else counts) - 1) + 1)]

    def lost(self, mp: int) -> dict[int, str]:
        """Return the names of the optimizer's files that are missing, by rank."""
        # The prefix of the names depends on the precision (bf16_, fp16_), so a present file's name is the pattern.
        rank, name = next((dp, name) for (other, dp), name in self.optimizers.items() if other == mp)
        missing = [dp for dp in self.optimizer_ranks(mp) if (mp, dp) not in self.optimizers]
        return {dp: name.replace(f"pp_rank_{rank}_", f"pp_rank_{dp}_") for dp in missing}


@dataclass(kw_only=True)
class Parts:
    """An index under construction. Tensor parallel ranks have shares of the same parameters."""

    tensor_ranks: int
    shards: dict[str, dict[int, list[Shard]]] = field(default_factory=dict)  # by name and tensor parallel rank
    buffers: dict[str, SavedBuffer] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: list[ParameterGroup] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    owners: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(
        self, mp: int, name: str, shape: tuple[int, ...], start: int, numel: int, where: dict[str, Location]
    ) -> None:
        """Add `numel` elements of a parameter from `start` on, written by model parallel rank `mp`."""
        tp = mp % self.tensor_ranks
        # tied weights are also in a later stage of a pipeline
        if numel and self.owners.setdefault((name, tp), mp) == mp:
            shard = Shard(name=name, shape=shape, cut=None, start=start, numel=numel, where=where)
            self.shards.setdefault(name, {}).setdefault(tp, []).append(shard)


def lacks_experts(mapping: dict[str, Any], elements: int) -> bool:
    """Return whether a mapping with experts does not cover its partition of `elements`."""
    has_experts = any(map(EXPERTS.fullmatch, mapping))
    return has_experts and sum(fragment.numel for fragment in mapping.values()) != elements


def flat_groups(state: dict[str, Any]) -> list[dict[str, torch.Size]]:
    """Return the shapes of the flat groups. Releases before 0.4 saved a single dictionary."""
    shapes = state.get("param_shapes") or []
    return [shapes] if isinstance(shapes, dict) else list(shapes)


def step_count(saved: object) -> int | None:
    """Return the optimizer's step count, from any depth of its state dict, or None."""
    if isinstance(saved, dict):
        values: object = saved.values()
        if "step" in saved and isinstance(saved["step"], int | float | Tensor):
            return int(saved["step"])
    elif isinstance(saved, list | tuple):
        values = saved
    else:
        return None
    return next((step for value in values if (step := step_count(value)) is not None), None)
