"""Other estimators of training memory and zerofit on the same published runs: the error of each.

python benchmarks/peers.py [--cases FILE] [--case ID ...] [--output FILE.json]

A peer gets what it can express of a run; what it cannot express it leaves out, as it does for its users.
Runs that publish a lower bound only are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import field_cases
import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

import zerofit as zf
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import find, source_config
from zerofit.spec.run import RunRequest

GIB = 2**30
# the figure that an estimate answers best, where a run has several
QUANTITIES = ("peak allocated", "nvidia-smi", "peak reserved")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What estimators ask for of a published run; `parameters` without adapters."""

    parameters: int
    largest_layer: int  # parameters
    float32_bytes: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    ranks: int
    stage: int
    offload: tuple[bool, bool]  # of the optimizer, of parameters
    tokens: int  # of a micro batch
    seq_len: int
    checkpointing: bool


def published_run(case: dict[str, Any]) -> PublishedRun:
    """Build the model of a case on the meta device and read off it and the job what estimators ask for."""
    job = prepare_simulation(RunRequest.of(field_cases.asked(case)[0]), field_cases.asked(case)[1]).target(0).job
    source = find(case["model"])
    config = source_config(source) | case["model_args"]
    with torch.device("meta"):
        model = build(source, None, case["model_args"])
    zero = job.ds_config.get("zero_optimization", {})
    return PublishedRun(
        parameters=parameter_count(model),
        # as DeepSpeed's model_to_params, which needs a model in memory: the most that one module has by itself
        largest_layer=max(sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules()),
        float32_bytes=calculate_maximum_sizes(model)[0],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        ranks=case["gpus"],
        stage=job.layout.zero_stage,
        offload=(_leaves(zero, "offload_optimizer"), _leaves(zero, "offload_param")),
        tokens=case["micro_batch"] * case["seq_len"],
        seq_len=case["seq_len"],
        checkpointing=case["activation_checkpointing"],
    )


def _leaves(zero: dict[str, Any], key: str) -> bool:
    return (zero.get(key) or {}).get("device", "none") != "none"


def deepspeed(run: PublishedRun) -> int | None:
    """Ask DeepSpeed's estimators (model states; there is none for stages 0 and 1, so stage 1 gets stage 2's)."""
    optimizer, parameters = run.offload
    if run.stage == 3:
        arguments = (run.parameters, run.largest_layer, run.ranks, 1, optimizer, parameters)
        return estimate_zero3_model_states_mem_needs(*arguments)[1]
    if run.stage:
        return estimate_zero2_model_states_mem_needs(run.parameters, run.ranks, 1, optimizer)[1]
    return None


def accelerate(run: PublishedRun) -> int:
    """Return the column "Training using Adam" of `accelerate estimate-memory`, dtype float16."""
    return max(estimate_training_usage(run.float32_bytes, "float16").values())


def megatron(run: PublishedRun) -> int:
    """Return what Megatron-LM prints, with its distributed optimizer where ZeRO divides states.

    Source: NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py, without sequence parallelism. It has
    no recomputation of all activations, no ZeRO 3, no offload, no adapters.
    """
    states = run.parameters * (18 if run.stage == 0 else 6 + 12 / run.ranks)
    layers = run.layers * run.tokens * run.hidden * 34
    ends = run.tokens * (8 + run.hidden) + 2 * run.tokens * (run.vocabulary + run.hidden)
    return int(states + 1.05 * (layers + ends))


def eleuther(run: PublishedRun) -> int:
    """Return what EleutherAI's calculator prints with its defaults (gradients in float32), no offload, no adapters.

    Source: EleutherAI/cookbook, calc/calc_transformer_mem.py; activations by Table 2 of arXiv 2205.05198.
    """
    weights = 2 * run.parameters / (run.ranks if run.stage == 3 else 1)
    gradients = 4 * run.parameters / (run.ranks if run.stage >= 2 else 1)
    optimizer = 12 * run.parameters / (run.ranks if run.stage else 1)
    buffers = 2 * 5e8 * (run.stage > 0) + 2 * 1e9 * (run.stage == 3) if run.ranks > 1 else 0
    scores = 0 if run.checkpointing else 5 * run.heads * run.seq_len / run.hidden
    activations = run.tokens * run.hidden * run.layers * (34 + scores)
    return int(weights + gradients + optimizer + buffers + activations)


PEERS: dict[str, Callable[[PublishedRun], int | None]] = {
    "DeepSpeed": deepspeed,
    "Accelerate": accelerate,
    "Megatron-LM": megatron,
    "EleutherAI": eleuther,
}


def row_of(case: dict[str, Any]) -> dict[str, Any] | None:
    """Return the measured bytes of a case and every estimate of them; None where only bounds are known."""
    exact = {m["quantity"]: m["bytes"] for m in case["measured"] if not m.get("at_least")}
    quantity = next((name for name in QUANTITIES if name in exact), None)
    if quantity is None:
        return None
    result = field_cases.simulate(case)
    if isinstance(result, zf.UserError):
        raise result
    run = published_run(case)
    estimates = {"zerofit": field_cases.OURS[quantity](result)} | {name: ask(run) for name, ask in PEERS.items()}
    return {
        "case": case["id"],
        "source": case["source"],
        "trained": "adapters" if case.get("adapters") else "all weights",
        "quantity": quantity,
        "bytes": exact[quantity],
        "estimates": estimates,
    }


def error(row: dict[str, Any], name: str) -> float | None:
    """Return estimate / measured - 1; None where the estimator has no answer."""
    estimate = row["estimates"][name]
    return None if estimate is None else estimate / row["bytes"] - 1


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of errors, with the median and the largest of each estimator below."""
    names = list(rows[0]["estimates"])
    lines = [f"| run | measured | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for row in rows:
        cells = ["-" if (e := error(row, name)) is None else f"{e:+.0%}" for name in names]
        lines.append(f"| {row['case']} | {row['quantity']} {row['bytes'] / GIB:.1f} GiB | {' | '.join(cells)} |")
    for trained in ("all weights", "adapters"):
        those = [row for row in rows if row["trained"] == trained]
        errors = {name: [abs(e) for row in those if (e := error(row, name)) is not None] for name in names}
        for label, pick in (("median error", statistics.median), ("largest error", max)):
            cells = [f"{pick(found):.0%}" if (found := errors[name]) else "-" for name in names]
            lines.append(f"| **{label}**, {trained} ({len(those)} runs) | | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=field_cases.HERE / "field_cases.json")
    parser.add_argument("--case", nargs="*", help="ids of some cases only")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    rows = []
    for case in json.loads(options.cases.read_text())["cases"]:
        if not options.case or case["id"] in options.case:
            print(f"{case['id']} ...", file=sys.stderr)
            rows += [row for row in [row_of(case)] if row]
    print(table(rows))
    if options.output:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
