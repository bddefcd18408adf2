"""What is simulated: which rank, on which device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zerofit.models.inputs import ImageInputs, Inputs, TextInputs
from zerofit.spec.layout import Batch, Layout
from zerofit.spec.model_facts import ModelFacts
from zerofit.spec.run import Run
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
        """Plain JSON."""
        job = self.job
        return {
            "run": job.run.model_dump(mode="json"),
            "layout": asdict(job.layout),
            "batch": asdict(job.batch),
            "steps_of_run": job.steps,
            "facts": asdict(job.facts),
            "ds_config": job.ds_config,
            "inputs": {"kind": type(self.inputs).__name__, **asdict(self.inputs)},
            "rank": self.rank,
            "accelerator": self.accelerator,
            "device_bytes": self.device_bytes,
            "workspaces": list(self.workspaces),
            "steps": self.steps,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> SimulationTarget:
        """The target that `as_dict` gave."""
        inputs = dict(value["inputs"])
        kind = {"ImageInputs": ImageInputs, "TextInputs": TextInputs}[inputs.pop("kind")]
        job = Job(
            run=Run(**value["run"]),
            layout=Layout(**value["layout"]),
            batch=Batch(**value["batch"]),
            steps=value["steps_of_run"],
            facts=ModelFacts(**value["facts"]),
            ds_config=value["ds_config"],
        )
        plain = {name: value[name] for name in ("rank", "accelerator", "device_bytes", "steps")}
        return cls(job=job, inputs=kind(**inputs), workspaces=tuple(value["workspaces"]), **plain)
