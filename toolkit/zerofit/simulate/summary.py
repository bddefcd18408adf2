"""A simulation in the form that `zerofit simulate --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerofit.simulate.context import Communicator, Overhead, overheads
from zerofit.simulate.run import Simulation
from zerofit.simulate.target import SimulationTarget
from zerofit.simulate.verdict import FitVerdict, judge, judge_events
from zerofit.spec.cluster import Cluster
from zerofit.spec.overhead import HOST_PROCESS_BYTES, HOST_RESERVE
from zerofit.spec.units import shown_bytes

UNSURE = 0.25  # of an extension's reserved bytes


def summary(simulation: Simulation, cluster: Cluster) -> dict[str, Any]:
    """Everything but the knobs and the seconds. Bytes are one rank's, `host_node_bytes` a node's."""
    answer, target = simulation.answer, simulation.target
    peak = answer["moments"][0]
    beside = overheads(cluster.device, _groups(answer["groups"]))
    verdict, reserved = _verdict(simulation, beside, cluster)
    host = _host(answer["host"], cluster)
    last = max(phase["step"] for phase in answer["phases"])
    return {
        "world_size": target.job.layout.world_size,
        "rank": target.rank,
        "layout": target.job.layout.as_dict(),
        "run": _run(target),
        "phases": _merged(answer["phases"]),
        "peak_bytes": peak["bytes"],
        "peak_phase": peak["phase"],
        "peak_step": peak["step"],
        "peak_at": {"module": peak["module"], "line": peak["at"]},
        "breakdown": peak["breakdown"],
        "reserved_bytes": reserved,
        "overheads": [_overhead(o) for o in beside],
        "smi_bytes": reserved + sum(o.bytes for o in beside),
        "device": cluster.device.kind,
        "device_total_bytes": cluster.device.memory_bytes,
        "host_bytes": answer["host"],
        "host_node_bytes": host["bytes"],
        "host_total_bytes": cluster.host_bytes,
        "nvme_bytes": answer["nvme_bytes"],
        "comm": [
            {key: row[key] for key in ("op", "bytes", "group_size", "phase", "count")}
            for row in answer["sent"]
            if row["step"] == last
        ],
        "flops": sum(row["flops"] for row in answer["flops"] if row["step"] == last),
        "fits": verdict.fits and host["fits"],
        "verdict": verdict.word if host["fits"] else "does not fit",
        "margin_bytes": verdict.margin_bytes,
        "because": " ".join([verdict.sentence, host["sentence"]]).strip(),
        "layers_simulated": list(simulation.layers),
        "extension_error": simulation.check_error,
    }


def _run(target: SimulationTarget) -> dict[str, Any]:
    """What was simulated, as far as memory depends on it."""
    run, job = target.job.run, target.job
    fields = ("model", "precision", "seq_len", "activation_checkpointing", "loss_chunk", "optimizer", "ds_config")
    figures = {name: getattr(run, name) for name in fields}
    figures["input"] = asdict(target.inputs)
    return {**figures, "micro_batch": job.batch.micro, "gradient_accumulation_steps": job.batch.accumulation}


def open_question(simulation: Simulation, cluster: Cluster) -> bool:
    """Whether an extension leaves open if the rank fits: what torch reserves is no straight line in the layers."""
    if not simulation.layers or cluster.on_cpu:
        return False
    answer, there = simulation.answer, cluster.device.memory_bytes
    beside = sum(o.high for o in overheads(cluster.device, _groups(answer["groups"])))
    return answer["moments"][0]["bytes"] < there < (1 + UNSURE) * answer["reserved_bytes"] + beside


def _verdict(simulation: Simulation, beside: list[Overhead], cluster: Cluster) -> tuple[FitVerdict, int]:
    """The verdict on the device, and the reserved peak that it rests on."""
    there = cluster.device.memory_bytes
    if cluster.on_cpu:  # no caching allocator: what is released is gone
        taken = simulation.answer["moments"][0]["bytes"]
        return judge(taken, beside, there), taken
    if "events" in simulation.answer:
        verdict, found = judge_events(simulation.answer["events"], beside, there)
        return verdict, found.peak_reserved_bytes
    reserved = simulation.answer["reserved_bytes"]
    return judge(reserved, beside, there), reserved


def _groups(rows: list[dict[str, Any]]) -> list[Communicator]:
    found = []
    for row in rows:
        peers = row["ranks"] - 1 if any(op.startswith("alltoall") for op in row["ops"]) else 0
        peers = peers or (2 if {"send", "recv"} & set(row["ops"]) else 0)
        found.append(Communicator(name="+".join(row["ops"]), ranks=row["ranks"], direct_peers=peers))
    return found


def _host(host: dict[str, int], cluster: Cluster) -> dict[str, Any]:
    """What a node's ranks take of its memory besides the device's, and whether it is there."""
    if cluster.on_cpu:
        return {"bytes": 0, "fits": True, "sentence": ""}
    wanted = (sum(host.values()) + HOST_PROCESS_BYTES) * cluster.gpus
    there = round(cluster.host_bytes * (1 - HOST_RESERVE))
    ranks = "1 rank takes" if cluster.gpus == 1 else f"the {cluster.gpus} ranks of a node take"
    sentence = (
        f"Host memory: {ranks} {shown_bytes(wanted)} with their processes ({shown_bytes(HOST_PROCESS_BYTES)} each), "
        f"of {shown_bytes(cluster.host_bytes)} less {HOST_RESERVE:.0%}."
    )
    return {"bytes": wanted, "fits": wanted <= there, "sentence": sentence}


def _merged(phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a phase of each step: a step's micro batches together."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for phase in phases:
        row = rows.setdefault((phase["name"], phase["step"]), dict(phase))
        row["peak_bytes"] = max(row["peak_bytes"], phase["peak_bytes"])
        row["end_bytes"] = phase["end_bytes"]
    return list(rows.values())


def _overhead(overhead: Overhead) -> dict[str, Any]:
    return {"name": overhead.name, "low_bytes": overhead.low, "high_bytes": overhead.high, "source": overhead.source}
