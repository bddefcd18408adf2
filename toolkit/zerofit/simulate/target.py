"""What is simulated: which rank, on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerofit.models.inputs import Inputs, inputs_from_dict, inputs_to_dict
from zerofit.spec.run_folder import Job


@dataclass(frozen=True, kw_only=True)
class SimulationTarget:
    """One rank of a job, and the device that it would run on."""

    job: Job
    inputs: Inputs
    rank: int = 0
    accelerator: str = "cpu"  # "cuda": device and host are told apart; "cpu": they are one
    device_bytes: int = 0  # what the device has; DeepSpeed asks how much of it is free
    workspaces: tuple[int, ...] = ()  # bytes that torch keeps for matrix products, beside tensors
    steps: int = 2  # ZeRO-3 keeps more alive once it knows the order of the layers: from the second step on

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        plain = {name: getattr(self, name) for name in ("rank", "accelerator", "device_bytes", "workspaces", "steps")}
        return {"job": self.job.to_dict(), "inputs": inputs_to_dict(self.inputs), **plain}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SimulationTarget:
        """Return the target that `as_dict` described."""
        job, inputs = Job.from_dict(value["job"]), inputs_from_dict(value["inputs"])
        return cls(**{**value, "job": job, "inputs": inputs, "workspaces": tuple(value["workspaces"])})
