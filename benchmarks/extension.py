"""How far a simulation that is extended from few layers is from one of all layers, on random models and layouts.

python benchmarks/extension.py [--count N] [--seed N] [--out FILE]

Every kind of memory on the device at its peak, and every place (device, page-locked and pageable host memory, NVMe), of
the same rank. What `zerofit simulate` would not extend is drawn again. Exit code 1 where a figure is above its target.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofit.app.simulation.runs import PreparedSimulation, prepare_simulation
from zerofit.simulate.forecast.run import SimulatedRank, layer_counts, simulate_ranks
from zerofit.simulate.record import RankRecord
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run, RunRequest

MOST = 0.005  # target of each difference: of a place relative to it, of a kind relative to the device's peak
AT_ONCE = 2  # triples whose simulations share a process

# model -> tokens or None
MODELS: dict[str, int | None] = {
    "llama-3.1-70b": 2048,
    "llama-3.1-8b": 2048,
    "llama-2-13b": 2048,
    "qwen2.5-72b": 1024,
    "qwen3-32b": 1024,
    "gemma-2-27b": 1024,
    "phi-4": 2048,
    "olmo-2-13b": 1024,
    "mixtral-8x22b": 1024,
    "falcon-40b": 1024,
    "gpt2-xl": 1024,
    "opt-66b": 1024,
    "bert-large": 512,
    "t5-11b": 512,
    "whisper-large-v3": None,
    "vit-l-16-hf": None,
    "dinov2-large": None,
}
HOST = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
AIO = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One triple: bytes of all layers, and by how much the extension differs."""

    run: dict[str, Any]
    gpus: int
    gpu: str
    layers: tuple[int, ...]  # that were simulated
    bytes: dict[str, int]  # place -> bytes, all layers simulated
    differs: dict[str, float]  # place, "reserved" or "kind: NAME" -> relative; see MOST

    @property
    def worst(self) -> tuple[str, float]:
        """The largest difference of a kind or a place; what torch reserves is no straight line, and stands beside."""
        return max(((k, d) for k, d in self.differs.items() if k != "reserved"), key=lambda one: abs(one[1]))


def drawn(chance: random.Random) -> tuple[Run, Cluster]:
    """Draw a model, a layout and devices."""
    model, stage = chance.choice(list(MODELS)), chance.choice((0, 1, 2, 3, 3))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": chance.random() < 0.5}
    zero |= dict.fromkeys(SIZES, "auto") if chance.random() < 0.8 else {}
    config: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"}
    offload = chance.choice(("none", "none", "optimizer", "all", "nvme"))
    if offload == "nvme" and stage == 3:
        zero |= {"offload_optimizer": NVME} | ({"offload_param": NVME} if chance.random() < 0.5 else {})
        config["aio"] = AIO
    elif offload != "none" and stage >= 2:
        zero |= {"offload_optimizer": HOST} | ({"offload_param": HOST} if offload == "all" and stage == 3 else {})
    precision = chance.choice(("bf16", "bf16", "fp32"))
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    run = Run(
        model=model,
        ds_config=config,
        precision=precision,
        optimizer="adamw",
        micro_batch=chance.choice((1, 2, 4)),
        gradient_accumulation_steps=chance.choice((1, 2)),
        activation_checkpointing=chance.random() < 0.5,
        seq_len=MODELS[model],
    )
    gpu = chance.choice(("a100-80gb", "h100-80gb", "l40s"))
    return run, Cluster(gpu, gpus=chance.choice((2, 8)), nodes=chance.choice((1, 1, 4)), host_memory=2**43, nvme=2**45)


def compare(extended: SimulatedRank, whole: SimulatedRank, one: PreparedSimulation) -> Compared:
    """Hold two records of one rank against each other."""
    near, exact = _places(extended.record), _places(whole.record)
    differs = {place: near[place] / exact[place] - 1 if exact[place] else float(near[place] > 0) for place in exact}
    peaks = [record.peaks[0].breakdown for record in (extended.record, whole.record)]
    for kind in dict.fromkeys(name for peak in peaks for name in peak):
        differs[f"kind: {kind}"] = (peaks[0].get(kind, 0) - peaks[1].get(kind, 0)) / exact["device"]
    return Compared(
        run=one.request.run.model_dump(exclude_defaults=True, mode="json"),
        gpus=one.cluster.gpus * one.cluster.nodes,
        gpu=one.cluster.device.kind,
        layers=extended.layers,
        bytes=exact,
        differs=differs,
    )


def _places(record: RankRecord) -> dict[str, int]:
    return {
        "device": record.peaks[0].bytes,
        "reserved": record.reserved_bytes,
        "pinned": record.host["pinned"] + record.host["pinned_free"],
        "pageable": record.host["pageable"],
        "nvme": record.nvme_bytes,
    }


def main() -> int:
    """0, or 1 where a figure is above its target."""
    asked = parse()
    chance, found, drew = random.Random(asked.seed), list[Compared](), 0
    while len(found) < asked.count:
        several = []
        while len(several) < AT_ONCE:
            run, cluster = drawn(chance)
            drew += 1
            try:
                one = prepare_simulation(RunRequest.of(run), cluster)
            except UserError as error:
                print(f"{run.model}: {error}", file=sys.stderr)
                continue
            if layer_counts(one.target(0)):
                several.append(one)
        targets = [one.target(0) for one in several]
        extended = simulate_ranks(targets, lambda text: None)
        chosen = [(one, rank) for one, rank in zip(several, extended, strict=True) if isinstance(rank, SimulatedRank)]
        chosen = [(one, rank) for one, rank in chosen if rank.layers]  # else the few were no line
        wholes = simulate_ranks([rank.target for _, rank in chosen], lambda text: None, exact=True)
        for (one, rank), whole in zip(chosen, wholes, strict=True):
            if not isinstance(whole, SimulatedRank):
                print(f"{one.job.run.model}: {whole}", file=sys.stderr)
                continue
            found.append(compare(rank, whole, one))
            name, worst = found[-1].worst
            figures = " ".join(f"{place} {found[-1].differs[place]:+.3%}" for place in found[-1].bytes)
            print(f"{figures}; worst {name} {worst:+.3%} {one.job.run.model} {one.job.layout}", flush=True)
    worst = sorted(abs(one.worst[1]) for one in found)
    reserved = sorted(abs(one.differs["reserved"]) for one in found)
    result = {"triples": len(found), "drawn": drew, "seed": asked.seed, "median": statistics.median(worst)}
    result |= {"most": worst[-1], "reserved_median": statistics.median(reserved), "reserved_most": reserved[-1]}
    print(json.dumps(result))
    if asked.out:
        asked.out.write_text(json.dumps(result | {"each": [asdict(one) for one in found]}, indent=1) + "\n")
    return int(worst[-1] > MOST)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="triples to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write each triple into this JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
