"""Targets for simulations, made as `zerofit simulate` makes them, and what their records say."""

from __future__ import annotations

from typing import Any

from zerofit.app.simulation.runs import prepare_simulation
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import cpu_device, find_device
from zerofit.spec.run import load_run

GIB = 2**30
# parameters: 2 x 64 x 32 (embedding, head) + 2 x (4 x 32 x 32 + 3 x 32 x 80 + 2 x 32) + 32
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
MATRICES = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 80)
VECTORS = 2 * 2 * 32 + 32
PARAMETERS = MATRICES + VECTORS


def cluster(gpus: int, kind: str = "cpu") -> Cluster:
    device = cpu_device(2, 64 * GIB, 1) if kind == "cpu" else find_device(kind)
    return Cluster(device, gpus=gpus, host_memory=512 * GIB)


def target(
    config: str | dict[str, Any] = "zero2",
    *,
    gpus: int = 2,
    kind: str = "cpu",
    rank: int = 0,
    image: str | None = None,
    **flags: Any,
) -> SimulationTarget:
    """A tiny Llama in fp32 with two samples of 16 tokens, unless the flags say otherwise."""
    if "model" not in flags:
        flags = {"model": "llama-tiny", "model_args": TINY, "seq_len": 16, **flags}
    flags = {"precision": "fp32", "micro_batch": 2, **flags}
    asked = load_run(None, {"ds_config": config, **flags})
    return prepare_simulation(asked, cluster(gpus, kind), image=image).target(rank)


def end_bytes(record: RankRecord) -> int:
    """Live bytes after the last step."""
    return record.phases[-1].end_bytes


def sent(record: RankRecord, phase: str) -> dict[str, int]:
    """Bytes of the last step's collectives in a phase, by op."""
    last = record.phases[-1].step
    rows = [row for row in record.sent if (row.phase, row.step) == (phase, last)]
    return {op: sum(row.bytes for row in rows if row.op == op) for op in {row.op for row in rows}}
