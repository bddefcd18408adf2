"""Define the interface of trainers, which the loop, checkpoints and the saved model use."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from zerofit.data.base import Data
from zerofit.spec.mesh import RankCoords
from zerofit.spec.run_folder import Job, Layout, RunFolder
from zerofit.train.tensor_split import gathered_experts, published_names
from zerofit.train.zero_layouts import Engine, partitioned

if TYPE_CHECKING:
    from zerofit.train.averaging import AveragedWeights
    from zerofit.train.check_loss import LossCheck

Batch = dict[str, Any]  # one micro batch: "inputs", "labels", "weight", "indices", ...


@dataclass
class StateNames:
    """The full model's names for an engine's parameters and buffers."""

    parameters: dict[int, str] = field(default_factory=dict)  # by id, in the order of the model
    ties: dict[str, str] = field(default_factory=dict)  # other names of the same tensor
    buffers: dict[int, str] = field(default_factory=dict)  # by id

    def only(self, wanted: set[int]) -> StateNames:
        """Return only the parameters whose id is in `wanted`, with their ties, and all buffers."""
        parameters = {key: name for key, name in self.parameters.items() if key in wanted}
        ties = {name: first for name, first in self.ties.items() if first in parameters.values()}
        return StateNames(parameters=parameters, ties=ties, buffers=self.buffers)


class EngineTrainer(ABC):
    """One rank's DeepSpeed engines, and the methods that train, evaluate and save them."""

    job: Job
    coords: RankCoords
    engine: Any  # the engine whose learning rate and gradient norm are recorded
    device: torch.device
    averaged: AveragedWeights | None = None  # if the run averages its weights
    loss_check: LossCheck | None = None  # with --check-loss

    @property
    def module(self) -> nn.Module:
        """All networks that this rank trains (parameters may be partitioned)."""
        return self.engine.module

    @abstractmethod
    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Make one optimizer step on the next micro batches. Return this rank's losses, float32."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch], count: int) -> Tensor:
        """Return loss, targets and right answers of every rank's `count` batches: float64 (3,).

        For labelled text a table of classes follows (`zerofit.models.scores.class_table`).
        """

    def written_figures(self, data: Data) -> dict[str, float]:
        """Return scores of text that the model generates for some validation samples.

        All ranks must call this.
        """
        return {}

    def engines(self) -> dict[str, Engine]:
        """Return the DeepSpeed engines, by their folders in a checkpoint."""
        return {"state": self.engine}

    def generators(self) -> dict[str, torch.Generator]:
        """Return the trainer's own random generators. Checkpoints keep their states."""
        return {}

    def extra_metrics(self) -> dict[str, Tensor | float]:
        """Return further metrics of the last step. All ranks must call this."""
        if self.job.precision != "fp16":
            return {}
        return {"loss_scale": self.engine.optimizer.loss_scale, "skipped_steps": self.engine.skipped_steps}

    def state_names(self, engine: Engine) -> StateNames:
        """Return the full model's names for an engine's parameters and buffers."""
        module = engine.module
        published = published_names(module)
        own_buffers = {name.lstrip("."): buffer for name, buffer in persistent_buffers(module)}
        names = StateNames(buffers={id(buffer): published.get(own, own) for own, buffer in own_buffers.items()})
        for own, p in module.named_parameters(remove_duplicate=False):
            name = published.get(own, own)
            # The first name of a tied weight counts, and later ones are its ties. Empty parameters have no state.
            if 0 not in getattr(p, "ds_shape", p.shape) and names.parameters.setdefault(id(p), name) != name:
                names.ties[name] = names.parameters[id(p)]
        return names

    @property
    def saves_adapters(self) -> bool:
        """Whether the saved model has only the adapters."""
        return self.job.run.lora is not None

    def weights(self, scratch: Path) -> Iterator[tuple[str, Tensor]]:
        """On rank 0, yield the full model's weights by name, on the CPU, one module at a time.

        With `saves_adapters`, yield only the adapters' weights. All ranks must iterate over this together.
        `scratch`: a folder for temporary files that all ranks share. If a killed run leaves files there, the next
        start deletes them.
        """
        layout, collect, trained_only = self.job.layout, dist.get_rank() == 0, self.saves_adapters
        # every rank has the full model: nothing to gather
        if layout.zero_stage < 3 and layout.tp == layout.ep == 1:
            for name, tensor in self.module.state_dict(keep_vars=True).items() if collect else ():
                if tensor.requires_grad or not trained_only:
                    yield name, tensor.detach().cpu()
            return
        transposed, names = self.engine.zenflow, published_names(self.module)  # ZenFlow transposes matrices
        with partitioned(self.engine):
            for name, tensor in gathered_state(self.module, layout, names, collect, trained_only):
                yield name, tensor.t() if transposed and tensor.ndim == 2 else tensor

    def after_training(self, data: Data, folder: RunFolder, progress: Callable[[str], None]) -> dict[str, object]:
        """Make samples of the trained model's output. Return entries for the result.

        All ranks must call this.
        """
        return {}

    def rank_state(self) -> dict[str, object]:
        """Return copies of the state that DeepSpeed does not save: random states, buffers, averages."""
        numpy_state: Any = np.random.get_state(legacy=True)
        return {
            # only tensors, numbers and lists: checkpoints are read without executing code
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "python": list(random.getstate()[1]),
            "python_gauss": random.getstate()[2],
            "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
            "numpy_rest": list(numpy_state[2:]),
            "generators": {name: generator.get_state() for name, generator in self.generators().items()},
            "buffers": {name: buffer.detach().clone() for name, buffer in persistent_buffers(self.module)},
            "averages": self.averaged.state() if self.averaged else None,
        }

    def restore_rank_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `rank_state` returned."""
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)
        # 3 is the version of Python's format. The states were saved as tensors and numbers, which load without pickled
        # classes.
        random.setstate((3, tuple(state["python"]), state["python_gauss"]))
        np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["numpy_rest"]))
        for name, generator in self.generators().items():
            generator.set_state(state["generators"][name])
        with torch.no_grad():
            for name, buffer in persistent_buffers(self.module):
                buffer.copy_(state["buffers"][name])


def own_tokens(length: int, layout: Layout, coords: RankCoords) -> slice:
    """Return the slice of tokens of a sequence that this sequence parallel rank processes."""
    share = length // layout.sp
    return slice(coords.sp_rank * share, (coords.sp_rank + 1) * share)


def gathered_state(
    module: nn.Module, layout: Layout, names: Mapping[str, str], collect: bool, trained_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Gather a module's state from all ranks. If `collect`, yield it on the CPU.

    `names`: names in the full model, for tensors whose name in `module` differs. `trained_only`: leave out frozen
    parameters and buffers. One submodule is gathered at a time. All ranks that have a part of the module must iterate
    over this together.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, GroupedExperts):
            yield from gathered_experts(part, layout, collect)
            continue
        parameters, prefix = list(part.parameters(recurse=False)), f"{path}." if path else ""
        if trained_only and not any(p.requires_grad for p in parameters):
            continue
        # Nested: ZeRO-3 first gathers each tensor rank's slice, then AutoTP's context joins the slices of all tensor
        # ranks.
        zero = GatheredParameters(parameters, modifier_rank=0, enabled=layout.zero_stage == 3)
        with zero, GatherReplacedLayerParams(parameters, part, enabled=layout.tp > 1):
            tensors = {**part._parameters, **part._buffers} if collect else {}
            own = {n: t for n, t in tensors.items() if t is not None and n not in part._non_persistent_buffers_set}
            state = {prefix + n: t.detach().cpu() for n, t in own.items() if t.requires_grad or not trained_only}
        yield from ((names.get(name, name), t) for name, t in state.items())


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model's state, under the names that `rank_state` uses."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
