"""List changes to a run that reduce its memory, so that each changed run can be simulated."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from zerofit.check.dotted import get, put
from zerofit.spec.profile import offered
from zerofit.spec.run_folder import Job

PLAIN = ("zero0", "zero1", "zero2", "zero3")  # bundled JSONs that differ only in their stage
OFFLOADED = ("zero2_offload", "zero3_offload")
SMALL_BUCKET = 10_000_000  # elements: smaller buckets cost bandwidth on fast links
STATE, PARAMETERS, BUCKETS = "optimizer state", "parameters", "buckets"  # kinds that a change reduces on the device
SHOWN = {
    STATE: "offload_optimizer to the host",
    PARAMETERS: "offload_optimizer and offload_param to the host",
    BUCKETS: f"buckets of {SMALL_BUCKET:,} elements",
}
HALVED = "--micro-batch"  # the beginning of a change


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One change to a run: to fields of Run, or to the user's DeepSpeed JSON."""

    change: str  # as on the command line or in the JSON
    fields: Mapping[str, object]  # of Run
    config: dict[str, object] | str  # or the name of a bundled JSON

    @property
    def halves(self) -> bool:
        """Whether the change is a smaller micro batch."""
        return self.change.startswith(HALVED)

    @property
    def offloads(self) -> bool:
        """Whether the change moves tensors to host memory."""
        return "offload" in self.change

    @property
    def combines(self) -> bool:
        """Whether this change may be combined with others.

        Shorter samples and smaller buckets may not.
        """
        return "seq_len" not in self.fields and BUCKETS not in self.change


# The order is that of the slowdown: smaller kernels (micro batch, chunks), then more communication (stages), then more
# computation (checkpointing), then copies to the host. Only the last change, shorter samples, alters what is trained.
def knobs(job: Job, written: dict[str, object], named: str | None = None) -> list[Knob]:
    """Return changes to try for a job, roughly from the least to the most slowdown.

    Changes that DeepSpeed or zerofit refuses for this model are dropped later, when they are resolved. `written`: the
    job's DeepSpeed JSON. `named`: the name of the JSON, if it is a bundled one. In this case other bundled JSONs are
    tried, since a flag selects them.
    """
    run, layout, zero = job.run, job.layout, job.ds_config.get("zero_optimization", {})
    found = _half_the_micro_batch(job, written)

    def flag(change: str, **fields: object) -> None:
        found.append(Knob(change=change, fields=fields, config=written))

    chunks, length = offered(job.facts.task, job.facts.model_type), run.seq_len or 0
    chunk, tile = chunks.loss_chunk, chunks.mlp_chunk
    # with one or two chunks, almost as much lives at once
    if chunk and run.loss_chunk is None and job.batch.micro * length > 2 * chunk:
        flag(f"--loss-chunk {chunk}", loss_chunk=chunk)
    if tile and run.mlp_chunk is None and length // layout.sp > 2 * tile:
        flag(f"--mlp-chunk {tile}", mlp_chunk=tile)
    # DeepSpeed refuses stages 2 and 3 in a pipeline (PipelineEngine.__init__), and a stage needs ranks to divide among
    stages = range(layout.zero_stage + 1, 2 if layout.pp > 1 else 4) if layout.dp * layout.sp > 1 else ()
    if named in PLAIN:
        found += [_bundled(f"zero{s}") for s in stages]
    else:
        found += [_edited(written, f"ZeRO stage {s}", **{"zero_optimization.stage": s}) for s in stages]
    if run.activation_checkpointing is not True:
        flag("--activation-checkpointing", activation_checkpointing=True)
    if run.activation_checkpointing and not run.activation_offload:
        flag("--activation-offload", activation_offload=True)
    changes = less_on_device(zero, layout.zero_stage)
    if named in PLAIN and layout.pp == 1:  # a flag selects a bundled JSON, so these JSONs replace the first two changes
        found += [_bundled(name) for name in OFFLOADED if name >= named]
        changes = {name: values for name, values in changes.items() if name == BUCKETS}
    found += [_edited(written, SHOWN[name], **values) for name, values in changes.items()]
    if run.seq_len and run.seq_len > 1:
        flag(f"--seq-len {run.seq_len // 2} (shorter sequences)", seq_len=run.seq_len // 2)
    return found


def less_on_device(zero: dict[str, object], stage: int) -> dict[str, dict[str, object]]:
    """Return changes to a JSON's `zero_optimization`, fastest first.

    A change maps dotted paths to values. A change is left out if the JSON already has it, or if this ZeRO stage
    does not support it.
    """
    state: dict[str, object] = {"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True}}
    found: dict[str, dict[str, object]] = {}
    if stage and get(zero, "offload_optimizer.device", "none") == "none":
        found[STATE] = state
    if stage == 3 and get(zero, "offload_param.device", "none") == "none":
        found[PARAMETERS] = {**state, "zero_optimization.offload_param": {"device": "cpu", "pin_memory": True}}
    bucket = get(zero, "reduce_bucket_size", 500_000_000)
    if stage and (bucket == "auto" or bucket > SMALL_BUCKET):
        found[BUCKETS] = {f"zero_optimization.{key}_bucket_size": SMALL_BUCKET for key in ("reduce", "allgather")}
    return found


def _half_the_micro_batch(job: Job, written: dict[str, object]) -> list[Knob]:
    """Return the change to half the micro batch with more accumulation.

    Return [] if this would change the global batch.
    """
    half = job.batch.micro // 2
    steps = job.batch.total // (half * job.batch.dp) if half else 0
    if not half or half * steps * job.batch.dp != job.batch.total:
        return []
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # a size in the JSON must equal its flag, so it is left to the flag
    config = {**written, **{key: "auto" for key in sizes if key in written}}
    fields = {"gradient_accumulation_steps": steps, "micro_batch": half}
    text = f"{HALVED} {half} --gradient-accumulation-steps {steps}"
    return [Knob(change=text, fields=fields, config=config)]


def _bundled(name: str) -> Knob:
    return Knob(change=f"--ds-config {name}", fields={}, config=name)


def edited(written: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of a DeepSpeed JSON. `values`: dotted path -> new value."""
    config = copy.deepcopy(written)
    for path, value in values.items():
        put(config, path, value)
    return config


def _edited(written: dict[str, object], change: str, **values: object) -> Knob:
    return Knob(change=change, fields={}, config=edited(written, values))
