"""From a run as asked to what is simulated: everything checked as before a training, for any hardware, without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerofit.app.model_inputs import assumed_inputs
from zerofit.app.resolve import ds_document, ds_place, find_model, seq_len_of
from zerofit.check.document import Document, of_data
from zerofit.config.resolve import decide, resolve
from zerofit.config.validate import check_machine, check_model
from zerofit.data import open_data
from zerofit.launch.machine import this_machine
from zerofit.models.inputs import Inputs
from zerofit.simulate.context import blas_workspaces
from zerofit.simulate.knobs import Knob
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.load import RunRequest
from zerofit.spec.model_facts import Machine
from zerofit.spec.run_folder import Job
from zerofit.train.probe import probe, task_of

STEPS = 1000  # of a run that names none: only schedulers ask


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
    document = ds_document(asked.run)
    return _prepared(asked, document, ds_place(asked.run), cluster, image, progress)


def turned(
    asked: RunRequest, prepared: PreparedTarget, knob: Knob, cluster: Cluster, image: str | None
) -> PreparedTarget | None:
    """The job with a knob turned; None where zerofit or DeepSpeed would refuse it."""
    from zerofit.spec.events import Reporter

    places: Mapping[str, str] = {**asked.places, **{field: field for field in knob.fields}}
    changed = RunRequest(run=asked.run.model_copy(update=knob.fields), places=places)
    try:
        return _prepared(changed, of_data(knob.config), "ds_config", cluster, image, Reporter())
    except UserError:
        return None


def _prepared(
    asked: RunRequest, document: Document, place: str, cluster: Cluster, image: str | None, progress: Reporter
) -> PreparedTarget:
    problems, machine = Problems(), _machine(cluster)
    asked = _on_all(asked, cluster, problems)
    source = problems.attempt(lambda: find_model(asked))
    task = problems.attempt(lambda: task_of(source, asked.run)) if source else None
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
    decision = decide(asked, document, place, machine, problems)
    check_machine(decision.run, decision.layout, machine, problems)
    problems.raise_if_any()
    assert source and task
    run = decision.run.model_copy(update={"seq_len": seq_len_of(decision.run, source, task)})
    if run.data is not None:
        inputs = open_data(run, task, run.seq_len, progress).inputs
    else:
        inputs = assumed_inputs(source, task, run.seq_len, image, dict(run.model_args))
    facts = probe(source, task, inputs, run)
    check_model(run, decision.layout, facts, problems)
    steps = run.steps or STEPS
    ds_config = resolve(document.config, replace(decision, run=run), facts, machine, steps, problems)
    problems.raise_if_any()
    job = Job(run=run, layout=decision.layout, batch=decision.batch, steps=steps, facts=facts, ds_config=ds_config)
    return PreparedTarget(job=job, inputs=inputs, written=dict(document.config))


def _on_all(asked: RunRequest, cluster: Cluster, problems: Problems) -> RunRequest:
    """One rank a device of the cluster, unless the run names another number."""
    ranks = asked.run.ranks
    if ranks and ranks > cluster.ranks:
        message = f"{ranks} ranks on {cluster.ranks} devices ({cluster.nodes} x {cluster.gpus})"
        problems.add("ranks", message, "raise --gpus or --nodes, or leave --ranks out", asked.place("ranks"))
    return RunRequest(run=asked.run.model_copy(update={"ranks": ranks or cluster.ranks}), places=asked.places)


def _machine(cluster: Cluster) -> Machine:
    """The cluster in the words of the run's checks."""
    device = cluster.device
    if cluster.on_cpu:
        return replace(this_machine(), accelerator="cpu", devices=cluster.ranks)
    return Machine(
        accelerator="cuda",
        devices=cluster.ranks,
        cores=cluster.ranks,
        device_name=device.name,
        fp16="fp16" in device.tflops,
        bf16="bf16" in device.tflops,
        here=False,
    )


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
