"""A stretch of a parameter that a rank holds: where it lives in the engine, and where a checkpoint's files have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zerofit.checkpoint.full_state import MASTER

Address = tuple[str, tuple[Any, ...]]  # a file, by its path in the checkpoint, and the keys to something in it


class Unsupported(Exception):
    """Part of an engine's state is not where a checkpoint could have it."""


@dataclass(frozen=True)
class StateSlot:
    """One kind of state of one stretch of a parameter: where it lives, and where a checkpoint's file has it."""

    tensor: Tensor  # contains it; empty while it is on NVMe
    at: Address  # of that tensor in a file; without keys: the file is nothing but its numbers
    offset: int  # of the stretch in that tensor
    start: int  # of the stretch in the flattened parameter
    numel: int

    @property
    def live(self) -> Tensor:
        """The stretch, flat or in the parameter's shape; writing to it changes the engine."""
        whole = self.tensor.detach()
        return whole if whole.numel() == self.numel else whole.view(-1).narrow(0, self.offset, self.numel)


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """A stretch of one parameter that this rank's optimizer steps on, or that it merely holds (frozen ones)."""

    parameter: nn.Parameter
    master: Tensor  # what the optimizer steps on: a flat partition of many parameters, or one in its own shape
    offset: int  # of the stretch in `master`
    start: int  # of the stretch in the flattened parameter
    numel: int
    master_at: Address
    states_at: Address | None  # of the dict by kind; None for a frozen parameter
    replicated: bool = False  # whether every data parallel rank holds the same
    # Muon's momentum at stages 1 and 2 is not cut where the partition is: where the whole parameter begins in it, and
    # its length
    uncut: tuple[int, int] | None = None
    on_nvme: dict[int, str] = field(default_factory=dict)  # files by id of the tensor, for what is on NVMe

    def slots(self, states: dict[str, Any]) -> dict[str, StateSlot]:
        """By kind; `states` is what the optimizer has for `master`. Raises Unsupported for states of other shapes."""
        found = {MASTER: self._slot(self.master, self.master_at)}
        for kind, tensor in states.items():
            if not isinstance(tensor, Tensor) or kind == "step" or self.states_at is None:
                continue
            at = (self.states_at[0], (*self.states_at[1], kind))
            if kind == "momentum_buffer" and self.uncut is not None:
                found[kind] = StateSlot(tensor, at, self.uncut[0], 0, self.parameter.numel())
            elif tensor.numel() == self.master.numel():
                found[kind] = self._slot(tensor, at)
            else:
                raise Unsupported(f"the optimizer's {kind} is not one number a weight")
        return found

    def _slot(self, tensor: Tensor, at: Address) -> StateSlot:
        if id(tensor) in self.on_nvme:
            at = (self.on_nvme[id(tensor)], ())
        return StateSlot(tensor, at, self.offset, self.start, self.numel)
