"""What `zerofit plan --json` says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerofit.plan.layout import PlannedLayout
from zerofit.plan.search import PlanResult, RankedLayout, Rejected, plainest
from zerofit.spec.cluster import Cluster
from zerofit.spec.profile import Profile


def answer_json(answer: PlanResult, profile: Profile, precision: str) -> dict[str, Any]:
    """The whole answer for one cluster."""
    nearest = answer.nearest
    return {
        "model": profile.model,
        "parameters": profile.parameters,
        "seq_len": profile.seq_len,
        "precision": precision,
        "cluster": cluster_json(answer.cluster),
        "layouts": [layout_json(one, profile) for one in answer.best],
        "plainest": plainest(answer.best),
        "fitting": answer.fitting,
        "considered": answer.considered,
        "rejected": {one.reason: one.count for one in answer.rejected},
        "rejections": [rejection_json(one) for one in answer.rejected],
        "nearest_miss": rejection_json(nearest) if nearest and not answer.best else None,
        "rates": {name: getattr(answer.rates, name) for name in answer.rates.sources},
        "rate_sources": answer.rates.sources,
        "seconds": round(answer.seconds, 4),
    }


def layout_json(one: RankedLayout, profile: Profile) -> dict[str, Any]:
    """One layout that fits."""
    tokens = None if profile.seq_len is None else one.samples_per_s * profile.seq_len
    return {
        **choice_json(one.choice),
        "peak_bytes": one.memory.peak_bytes,
        "peak_phase": one.memory.peak_phase,
        "breakdown": one.memory.breakdown,
        "margin_bytes": round(one.fit.margin_bytes),
        "device_total_bytes": one.fit.device_there_bytes,
        "host_bytes": one.memory.host_bytes,
        "nvme_bytes": one.memory.nvme_bytes,
        "step_s": one.choice.global_batch / one.samples_per_s,
        "time": {name: value for name, value in asdict(one.time).items() if name != "step_s"},
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": tokens,
        "mfu": one.mfu,
        "fits": True,
    }


def choice_json(choice: PlannedLayout) -> dict[str, Any]:
    """A layout's own knobs."""
    return {
        "zero_stage": choice.zero_stage,
        "offload": offload_name(choice),
        "micro_batch": choice.micro_batch,
        "gradient_accumulation_steps": choice.accumulation,
        "global_batch": choice.global_batch,
        "dp": choice.dp,
        "tp": choice.tp,
        "pp": choice.pp,
        "sp": choice.sp,
        "activation_checkpointing": choice.checkpointing,
        "precision": choice.precision,
        "bucket_elements": choice.bucket,
        "overlap_comm": choice.overlap,
        "prefetch_elements": choice.prefetch,
        "persistence_elements": choice.persistence,
    }


def offload_name(choice: PlannedLayout) -> str:
    """ "none", "optimizer:cpu", "optimizer:cpu+param:cpu", ..."""
    places = {"optimizer": choice.offload_optimizer, "param": choice.offload_param}
    return "+".join(f"{what}:{where}" for what, where in places.items() if where != "none") or "none"


def rejection_json(one: Rejected) -> dict[str, Any]:
    """Why layouts were rejected, by the one that came nearest."""
    return {
        "reason": one.reason,
        "count": one.count,
        "message": one.message,
        "hint": one.hint,
        "layout": choice_json(one.choice) if one.choice else None,
        "lacks_share": round(one.fit.over - 1, 4) if one.fit else None,
    }


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """The hardware, and what was assumed of it."""
    return {
        "gpu": cluster.device.kind,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "device_bytes": cluster.device.memory_bytes,
        "host_bytes": cluster.host_bytes,
        "nvme_bytes": cluster.nvme_bytes,
        "assumed": list(cluster.notes),
    }
