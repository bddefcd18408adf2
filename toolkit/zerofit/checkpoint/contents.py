"""A checkpoint's tensors under the names that the model's state_dict has for them, and where checkpoints are found."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.manifest import Manifest

# a GAN's networks have an engine each: the engine's name, and what its parameters' names begin with in the pair
_PAIR = {"generator": "generator.", "state": "discriminator."}


class CheckpointTensors:
    """What a checkpoint holds: parameters with their optimizer states, buffers, ties."""

    def __init__(self, checkpoint: Path, manifest: Manifest):
        engines = _PAIR if manifest.job["facts"]["task"] == "gan" else {"state": ""}
        self._wholes = {prefix: FullState(checkpoint, engine) for engine, prefix in engines.items()}
        self.names = [prefix + name for prefix, whole in self._wholes.items() for name in whole.names]
        self.buffers = [prefix + name for prefix, whole in self._wholes.items() for name in whole.buffers]
        self.ties = {p + name: p + source for p, whole in self._wholes.items() for name, source in whole.ties.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a parameter."""
        whole, inside = self._find(name)
        return whole.shape(inside)

    def kinds(self, name: str) -> list[str]:
        """What there is of a parameter: "fp32", and the optimizer's states."""
        whole, inside = self._find(name)
        return whole.kinds(inside)

    def read(self, name: str, kind: str = "fp32") -> Tensor:
        """A parameter or one of its states: float32, in its whole shape."""
        whole, inside = self._find(name)
        return whole.read(inside, kind)

    def buffer(self, name: str) -> Tensor:
        """A buffer as it was saved."""
        whole, inside = self._find(name)
        return whole.buffer(inside)

    def _find(self, name: str) -> tuple[FullState, str]:
        prefix = next(p for p in self._wholes if name.startswith(p))
        return self._wholes[prefix], name.removeprefix(prefix)
