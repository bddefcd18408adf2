"""From a run as asked to what is simulated: everything checked as before a training, for any hardware, without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerofit.app.resolve import cluster_machine, resolve_job
from zerofit.models.inputs import Inputs
from zerofit.simulate.context import blas_workspaces
from zerofit.simulate.knobs import Knob
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.load import RunRequest
from zerofit.spec.run_folder import Job
from zerofit.spec.task import Task


@dataclass(frozen=True, kw_only=True)
class PreparedTarget:
    """A job that could be trained on the cluster, and the DeepSpeed JSON as it was written."""

    job: Job
    inputs: Inputs
    written: dict[str, Any]

    def target(self, rank: int, cluster: Cluster) -> SimulationTarget:
        """One of its ranks."""
        return SimulationTarget(
            job=self.job,
            inputs=self.inputs,
            rank=rank,
            accelerator="cpu" if cluster.on_cpu else "cuda",
            device_bytes=cluster.device.memory_bytes,
            workspaces=tuple(blas_workspaces(cluster.device)),
        )


def prepare_target(asked: RunRequest, cluster: Cluster, image: str | None, progress: Reporter) -> PreparedTarget:
    """Check everything that does not need the data. Raises UserError with all that is wrong."""
    problems = Problems()
    resolved = resolve_job(
        _on_all(asked, cluster, problems),
        machine=cluster_machine(cluster),
        inputs="assumed",
        image=image,
        report=progress,
        problems=problems,
        check_task=lambda task, problems: _check_task(asked, task, problems),
    )
    assert resolved.inputs is not None
    return PreparedTarget(job=resolved.job, inputs=resolved.inputs, written=resolved.ds_source)


def turned(asked: RunRequest, knob: Knob, cluster: Cluster, image: str | None) -> PreparedTarget | None:
    """The job with a knob turned; None where zerofit or DeepSpeed would refuse it."""
    places = {**asked.places, **{field: field for field in knob.fields}}
    run = asked.run.model_copy(update={**knob.fields, "ds_config": knob.config})
    try:
        return prepare_target(RunRequest(run=run, places=places), cluster, image, Reporter())
    except UserError:
        return None


def _check_task(asked: RunRequest, task: Task, problems: Problems) -> None:
    """Refuse what a simulation cannot do, and settings that mean nothing to this kind of model."""
    if task == "gan":
        message = f"{asked.run.model} trains two engines, which `zerofit simulate` does not"
        problems.add("model-task", message, "take another model", "MODEL")
    if asked.run.pipeline > 1 and asked.run.pipeline_balance == "time":
        message = "--pipeline-balance time measures the layers, and nothing is computed here"
        problems.add("layout", message, "take --pipeline-balance parameters", "--pipeline-balance")
    if task == "image":
        for field in ("seq_len", "loss_chunk"):
            if field in asked.places and getattr(asked.run, field):
                what = "images have no tokens" if field == "seq_len" else "images have too few targets to cut up"
                problems.add("conflict", f"{asked.place(field)}: {what}", "leave it out", asked.place(field))


def _on_all(asked: RunRequest, cluster: Cluster, problems: Problems) -> RunRequest:
    """One rank a device of the cluster, unless the run names another number."""
    ranks = asked.run.ranks
    if ranks and ranks > cluster.ranks:
        message = f"{ranks} ranks on {cluster.ranks} devices ({cluster.nodes} x {cluster.gpus})"
        problems.add("ranks", message, "raise --gpus or --nodes, or leave --ranks out", asked.place("ranks"))
    return RunRequest(run=asked.run.model_copy(update={"ranks": ranks or cluster.ranks}), places=asked.places)


def ranks_of(prepared: PreparedTarget, rank: int | None) -> list[int]:
    """The ranks to simulate: the one asked for, else the first of each pipeline stage. Raises UserError."""
    layout = prepared.job.layout
    if rank is None:
        return [stage * (layout.world_size // layout.pp) for stage in range(layout.pp)]
    if rank >= layout.world_size:
        message = f"rank {rank} of {layout.world_size} ranks"
        raise UserError(
            Problem(kind="bad-value", message=message, hint=f"take 0 to {layout.world_size - 1}", where="--rank")
        )
    return [rank]
