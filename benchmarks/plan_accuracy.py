"""How far `zerofit plan` is from `zerofit simulate`, on random models, layouts and devices; see README.md.

python benchmarks/plan_accuracy.py [--pipeline SCHEDULE] [--count N] [--seed N] [--minutes M] [--out FILE]

Each triple is forecast and simulated (the rank that needs most; nothing is trained), and simulate's verdict is asked
for on the smallest device that plan would call large enough. Exit code 1 where a figure misses its target.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from meter.planned import planned

from zerofit.app.simulation.runs import PreparedSimulation, prepare_simulation
from zerofit.plan.fit import check_fit
from zerofit.plan.layout import PlannedLayout
from zerofit.simulate.forecast.assess import assess
from zerofit.simulate.forecast.result import FITS
from zerofit.simulate.forecast.run import SimulatedRank, heaviest_of, simulate_ranks
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.mesh import largest_batch_of_stages
from zerofit.spec.run import PipelineSchedule, Run, RunRequest

MEDIAN, MOST = 0.01, 0.04  # targets of |plan / simulate - 1|
PRECISION = 0.01  # of the smallest device that fits
AT_ONCE = 3  # simulations that share a process

# widths as published, few layers: what a layer takes is what counts
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"num_hidden_layers": 3},
    "qwen2.5-0.5b": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4},
    "bert-base": {"num_hidden_layers": 4},
    "vit-b-16-hf": {"num_hidden_layers": 4},
    "t5-base": {"num_layers": 3, "num_decoder_layers": 3},
    "bart-base": {"encoder_layers": 3, "decoder_layers": 3},
    "whisper-base": {"encoder_layers": 3, "decoder_layers": 3},
    "clip-vit-base-patch32": {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 3}},
    "dit-xl-2": {"num_layers": 3},
    "resnet50": {},
}
TEXT = {
    "llama-3.2-1b": 512,
    "qwen2.5-0.5b": 512,
    "qwen3-0.6b": 512,
    "gpt2": 512,
    "bert-base": 256,
    "t5-base": 256,
    "bart-base": 256,
}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
KINDS = ("a100-40gb", "h100-80gb", "l4", "v100-16gb")
# layers for two parts on each of four stages; the number of heads and of key-value heads is even
PIPELINED = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "gpt2", "bert-base", "vit-b-16-hf")
SPLIT = PIPELINED[:3]  # models that tensor and sequence parallel ranks take beside a pipeline


@dataclass(frozen=True, kw_only=True)
class Found:
    """One triple."""

    model: str
    layout: dict[str, Any]
    gpu: str
    planned_bytes: int
    simulated_bytes: int
    planned_device_bytes: int  # of the smallest device that plan calls large enough
    simulated_device_bytes: int  # of the smallest with which simulate says that it fits, to PRECISION
    denied: bool  # simulate does not say so of plan's smallest device

    @property
    def error(self) -> float:
        return self.planned_bytes / self.simulated_bytes - 1


def drawn(chance: random.Random) -> tuple[Run, Cluster]:
    """Draw a model, a layout and a device."""
    model, gpu = chance.choice(list(MODELS)), chance.choice(KINDS)
    stage, precision = chance.choice((0, 1, 2, 3)), "fp32" if gpu == "v100-16gb" else chance.choice(("fp32", "bf16"))
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": chance.random() < 0.5}
    zero |= dict.fromkeys(SIZES, "auto") if chance.random() < 0.8 else {}  # without them DeepSpeed's own count
    if stage >= 2 and chance.random() < 0.3:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", precision: {"enabled": True}}
    if precision == "fp32":
        del config["fp32"]
    run = Run(
        model=model,
        model_args=MODELS[model],
        ds_config=config,
        precision=precision,
        optimizer="adamw",
        micro_batch=chance.choice((1, 2, 4, 8)),
        gradient_accumulation_steps=chance.choice((1, 1, 2)),
        activation_checkpointing=chance.random() < 0.4,
        seq_len=TEXT.get(model),
    )
    return run, Cluster(gpu, gpus=chance.choice((1, 2, 4, 8)), nodes=chance.choice((1, 1, 2)))


def drawn_pipeline(chance: random.Random, schedule: PipelineSchedule) -> tuple[Run, Cluster]:
    """Draw a model, a layout with a pipeline, and a device."""
    model, gpu = chance.choice(PIPELINED), chance.choice(KINDS[:3])
    stages, others = chance.choice((2, 4)), [chance.choice((1, 2)), chance.choice((1, 1, 2)), chance.choice((1, 2))]
    tensor, sequence, data = others if model in SPLIT else (1, 1, others[2])
    run = Run(
        model=model,
        model_args={"n_layer" if model == "gpt2" else "num_hidden_layers": 10},
        ds_config="pipeline",
        pipeline=stages,
        pipeline_schedule=schedule,
        tensor_parallel=tensor,
        sequence_parallel=sequence,
        precision=chance.choice(("fp32", "bf16")),
        optimizer="adamw",
        micro_batch=chance.choice((1, 2, 4)),
        gradient_accumulation_steps=2 * stages + chance.choice((0, 1, 3)),
        activation_checkpointing=chance.random() < 0.4,
        seq_len=TEXT.get(model),
    )
    return run, Cluster(gpu, gpus=stages * tensor * sequence * data, nodes=1)


def forecast(prepared: PreparedSimulation) -> tuple[int, Cluster, PlannedLayout]:
    """The peak, and the cluster with the smallest device that would be called large enough."""
    cluster, layout, memory = prepared.cluster, PlannedLayout.of(prepared.job), planned(prepared.target(0))
    needed = round(check_fit(memory, layout, cluster).device_bytes) + 1
    smallest = Cluster(cluster.kind, gpus=cluster.gpus, nodes=cluster.nodes, device_memory=needed)
    return memory.peak_bytes, smallest, layout


def smallest_that_fits(rank: SimulatedRank, cluster: Cluster) -> int:
    """Return the bytes of the smallest device with which simulate says that the rank fits."""
    too_small, enough = rank.record.peaks[0].bytes, 2 * cluster.device.memory_bytes
    while enough - too_small > PRECISION * enough:
        middle = (too_small + enough) // 2
        if assess(rank, replace(cluster, device_memory=middle)).verdict == FITS:
            enough = middle
        else:
            too_small = middle
    return enough


def found_of(several: list[PreparedSimulation], show: Any) -> Iterator[Found]:
    """Forecast and simulate these."""
    exactly = partial(simulate_ranks, show=show, exact=True)
    stages = [[one.target(rank) for rank in largest_batch_of_stages(one.job.layout, one.job.batch)] for one in several]
    ranks = iter(heaviest_of(exactly([target for targets in stages for target in targets]), exactly))
    for one, targets in zip(several, stages, strict=True):
        found = [next(ranks) for _ in targets]
        simulated = [rank for rank in found if isinstance(rank, SimulatedRank)]
        if len(simulated) < len(found):
            print(f"{one.job.run.model}: {found}", file=sys.stderr)
            continue
        rank = max(simulated, key=lambda one: one.record.peaks[0].bytes)
        peak_bytes, smallest, layout = forecast(one)
        verdict = assess(rank, smallest)
        yield Found(
            model=one.job.run.model,
            layout=layout.to_dict() | {"world_size": layout.world_size},
            gpu=one.cluster.device.kind,
            planned_bytes=peak_bytes,
            simulated_bytes=rank.record.peaks[0].bytes,
            planned_device_bytes=smallest.device.memory_bytes,
            simulated_device_bytes=smallest_that_fits(rank, smallest),
            denied=verdict.reserved_bytes > 0 and not verdict.fits and verdict.host_node_bytes <= smallest.host_bytes,
        )


def main() -> int:
    """0, or 1 where a figure misses its target."""
    asked = parse()
    chance, found, started = random.Random(asked.seed), [], time.monotonic()
    drew = 0
    while drew < asked.count and time.monotonic() - started < 60 * asked.minutes:
        several = []
        while len(several) < AT_ONCE and drew < asked.count:
            run, cluster = drawn_pipeline(chance, asked.pipeline) if asked.pipeline else drawn(chance)
            drew += 1
            try:
                several.append(prepare_simulation(RunRequest.of(run), cluster))
            except UserError as error:
                print(f"{run.model}: {error}", file=sys.stderr)
        for one in found_of(several, lambda text: None):
            found.append(one)
            print(
                f"{one.error:+8.3%} {one.simulated_device_bytes / one.planned_device_bytes - 1:+8.2%} "
                f"{'DENIED ' if one.denied else ''}{one.model} on {one.gpu} {one.layout}",
                flush=True,
            )
    errors = sorted(abs(one.error) for one in found)
    result = {"triples": len(found), "seed": asked.seed, "median": statistics.median(errors), "most": errors[-1]}
    result["denied"] = sum(one.denied for one in found)
    print(json.dumps(result))
    if asked.out:
        asked.out.write_text(json.dumps(result | {"each": [asdict(one) for one in found]}, indent=1) + "\n")
    return int(result["median"] > MEDIAN or result["most"] > MOST or result["denied"] > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--pipeline", choices=get_args(PipelineSchedule), help="draw layouts with a pipeline in this order"
    )
    parser.add_argument("--count", type=int, default=500, help="triples to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="draw no more after so long")
    parser.add_argument("--out", type=Path, help="write each triple into this JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
