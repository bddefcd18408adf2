"""Does a run that goes on in another layout train like the one that never stopped?

    python -m benchmarks.resume_matrix [--only WORD] [--output benchmarks/results/resume_matrix.json]

Each case trains in one layout, saves after STEPS steps and trains on; a second run takes the checkpoint up in another
layout, through the same door as `zerofit train --resume`. The losses of the next AFTER steps of both must agree. What
cannot be is refused before any rank starts, and the table has the reason. Exit code 1 if a case disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

from tests.ranks.pool import RankPool, Trained
from tests.train.small import GPT2, LLAMA
from zerofit.config.ds_json import read_for_run
from zerofit.spec.errors import UserError
from zerofit.spec.local_machine import versions

STEPS, AFTER = 4, 5
EXACT = 1e-5  # relative, fp32: sums in another order
BF16 = 1e-3  # bf16 keeps 8 bits: what is rounded where depends on the layout
MUON = 1e-4  # orthogonalising a matrix in bf16 magnifies the last bit
RANKS = [(2, 1), (1, 2), (2, 4)]
STAGES = [("1", "3"), ("3", "1"), ("2", "2 offload"), ("0", "2"), ("2", "0"), ("3", "2")]
MODES = {  # what the older and the newer run add to data parallelism
    "same": ({}, {}),
    "TP2 to 1": ({"tensor_parallel": 2}, {}),
    "1 to TP2": ({}, {"tensor_parallel": 2}),
    "PP2 to 1": ({"pipeline": 2, "micro_batch": 2}, {}),
    "1 to PP2": ({}, {"pipeline": 2, "micro_batch": 2}),
}
BASE = {
    "data": "synthetic:256",
    "seq_len": 16,
    "global_batch": 8,
    "steps": STEPS + AFTER,
    "lr": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "eval_samples": 8,
}
TIED = {**LLAMA, "model_args": {**LLAMA["model_args"], "tie_word_embeddings": True}}
# without the routers' own loss, which is one of each micro batch
MIXTRAL = {"model": "mixtral-tiny", "model_args": LLAMA["model_args"] | {"num_hidden_layers": 4}}
MIXTRAL["model_args"]["router_aux_loss_coef"] = 0.0
BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {"model": "bert-base", "model_args": BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}
# batch norm: the same micro batches in every layout, and steps so small that rounding does not decide the losses
RESNET = {"model": "resnet18-small", "data": "digits", "image_size": 16, "seq_len": None, "global_batch": 32}
RESNET |= {"micro_batch": 16, "optimizer": "sgd", "lr": 1e-4}


@dataclass(frozen=True)
class Case:
    """One change of layout: the options of both runs, and how far their losses may be apart."""

    name: str
    old: dict[str, Any]
    new: dict[str, Any]
    tolerance: float = EXACT


def cases(nvme: Path) -> Iterator[Case]:
    """The whole matrix, then precision, optimizers, models and settings that store something in a way of their own."""
    for ranks in RANKS:
        for old, new in STAGES:
            for mode, (before, after) in MODES.items():
                name = f"{ranks[0]} to {ranks[1]} ranks, stage {old} to {new}, {mode}"
                yield _fp32(name, _stage(ranks[0], old) | before, _stage(ranks[1], new) | after)
    yield from _precisions()
    yield from _others()
    yield from _combined()
    yield from _mixture()
    yield from _on_nvme(nvme)


def _precisions() -> Iterator[Case]:
    for old, new in (("1", "3"), ("3", "1"), ("0", "2"), ("2", "0"), ("2", "2 offload")):
        for one, other in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")):
            name = f"{one} to {other}, 2 to 1 ranks, stage {old} to {new}"
            before, after = _stage(2, old) | {"precision": one}, _stage(1, new) | {"precision": other}
            yield Case(name, LLAMA | before, LLAMA | after, BF16)
    pipe = {"precision": "bf16", "pipeline": 2, "micro_batch": 2}
    whole = LLAMA | {"precision": "bf16"}
    yield Case("bf16, PP2 to 1, stage 0 to 2", LLAMA | _stage(2, "0") | pipe, whole | _stage(2, "2"), BF16)
    yield Case("bf16, 1 to PP2, stage 2 to 0", whole | _stage(2, "2"), LLAMA | _stage(2, "0") | pipe, BF16)
    master = {"ds_config": "bf16_master_weights"}
    yield Case("bf16 master weights, 2 to 1 ranks", LLAMA | {"ranks": 2} | master, LLAMA | {"ranks": 1} | master, BF16)


def _others() -> Iterator[Case]:
    two, one, three = _stage(2, "2"), _stage(1, "1"), _stage(2, "3")
    sequence, tensor, pipe = {"sequence_parallel": 2}, {"tensor_parallel": 2}, {"pipeline": 2, "micro_batch": 2}
    yield _fp32("SP2 to 1, stage 1 to 3", _stage(2, "1") | sequence, three)
    yield _fp32("1 to SP2, stage 2 to 3", two, three | sequence)
    yield _fp32("TP2 to PP2", _stage(2, "1") | tensor, _stage(2, "1") | pipe)
    yield _fp32("TP2 at stage 3 to 1", three | tensor, one)
    yield _fp32("1 to TP2 at stage 3", one, three | tensor)
    yield _fp32("DP2 x TP2 at stage 3 to DP2", _stage(4, "3") | tensor, two)
    yield _fp32("DP2 to DP2 x PP2", two, _stage(4, "1") | pipe)
    yield _fp32("full offload, stage 3 to 1", _stage(2, "3 offload"), one)
    yield _fp32("full offload, stage 1 to 3", one, _stage(2, "3 offload"))
    for model, options in (("llama with tied embeddings", TIED), ("bert", BERT)):
        yield Case(f"{model}, TP2 to 1", options | _stage(2, "1") | tensor, options | one)
        yield Case(f"{model}, 1 to TP2", options | one, options | _stage(2, "1") | tensor)
    for model, options in (("gpt2", GPT2), ("bert", BERT)):
        yield Case(f"{model}, PP2 to 1", options | _stage(2, "1") | pipe, options | one)
        yield Case(f"{model}, 1 to PP2", options | one, options | _stage(2, "1") | pipe)
    yield Case("resnet, PP2 to 1", RESNET | _stage(2, "1") | {"pipeline": 2}, RESNET | one)
    yield Case("resnet, stage 3 to 1, 2 to 1 ranks", RESNET | three, RESNET | one)
    sgd = {"optimizer": "sgd", "lr": 0.02}
    yield _fp32("sgd, stage 2 to 0", two | sgd, _stage(1, "0") | sgd)
    yield _fp32("sgd, stage 0 to 3", _stage(1, "0") | sgd, three | sgd)
    muon = LLAMA | {"optimizer": "muon"}
    for old, new in (("0", "2"), ("1", "3"), ("3", "1"), ("2", "0"), ("2", "2 offload"), ("2 offload", "1")):
        yield Case(f"muon, stage {old} to {new}", muon | _stage(2, old), muon | _stage(2, new), MUON)
    for key in ("round_robin_gradients", "parameter_alignment", "elastic_checkpoint"):
        special = {"ds_config": _with("zero2", key, True)}
        yield _fp32(f"{key}, 2 to 1 ranks", two | special, one)
        yield _fp32(f"{key}, 1 to 2 ranks", one, two | special)
    for key, value in (("sub_group_size", 2000), ("zero_hpz_partition_size", 2)):
        special = {"ds_config": _with("zero3", key, value)}
        yield _fp32(f"{key}, 2 to 1 ranks", three | special, one)
        yield _fp32(f"{key}, 1 to 2 ranks", one, three | special)
    scheduler = {"ds_config": _with_scheduler(), "warmup_steps": None}
    yield _fp32("DeepSpeed's own scheduler, 2 to 1 ranks", two | scheduler, {"ranks": 1} | scheduler)


def _on_nvme(folder: Path) -> Iterator[Case]:
    """With matrices of 1 MiB a rank and more: DeepSpeed keeps smaller ones in memory."""
    if not AsyncIOBuilder().is_compatible():
        return
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    wide = LLAMA | {"model_args": LLAMA["model_args"] | wide}
    config = json.loads(json.dumps(read_for_run("zero3_nvme").config).replace("/local_nvme", str(folder)))
    swapped, small = {"ranks": 2, "ds_config": config}, {"ranks": 2, "ds_config": json.loads(json.dumps(config))}
    small["ds_config"]["zero_optimization"]["sub_group_size"] = 700000
    yield Case("all on NVMe, unchanged", wide | swapped, wide | swapped)
    yield Case("all on NVMe, to stage 1 on one rank", wide | swapped, wide | _stage(1, "1"))
    yield Case("stage 1 on one rank to all on NVMe", wide | _stage(1, "1"), wide | swapped)
    yield Case("stage 3 to all on NVMe, in small groups", wide | _stage(2, "3"), wide | small)


def _combined() -> Iterator[Case]:
    """Between layouts of more than one dimension, each to one rank, from one rank, and to each other one."""
    model = LLAMA | {"model_args": {**LLAMA["model_args"], "num_attention_heads": 4, "tie_word_embeddings": True}}
    pipe, tensor, sequence = {"pipeline": 2, "micro_batch": 2}, {"tensor_parallel": 2}, {"sequence_parallel": 2}
    degrees = {"PP2 x TP2": pipe | tensor, "PP2 x SP2": pipe | sequence, "TP2 x SP2": tensor | sequence}
    layouts = {
        f"{name} at stage {stage}": _stage(4, stage) | flags
        for name, flags in degrees.items()
        for stage in (("0", "1") if "pipeline" in flags else ("0", "1", "2", "3"))
    }
    layouts["PP4 at stage 0"] = _stage(4, "0") | pipe | {"pipeline": 4}
    dual = _stage(4, "1") | {"pipeline": 2, "pipeline_schedule": "dualpipev"}
    layouts["DualPipeV x TP2"] = dual | {"micro_batch": 2} | tensor
    layouts["DualPipeV x SP2"] = dual | {"micro_batch": 2} | sequence
    layouts["DualPipeV x DP2"] = dual | {"micro_batch": 1}
    for name, flags in layouts.items():
        yield Case(f"combined, {name} to one rank", model | flags, model | _stage(1, "2"))
        yield Case(f"combined, one rank to {name}", model | _stage(1, "2"), model | flags)
    for name, other in permutations(layouts, 2):
        yield Case(f"combined, {name} to {other}", model | layouts[name], model | layouts[other])


def _mixture() -> Iterator[Case]:
    """A mixture of experts: on the stages of a pipeline to itself and to other layouts, and back."""
    pipe, spread = {"pipeline": 2, "micro_batch": 2}, {"expert_parallel": 2}
    piped = MIXTRAL | _stage(4, "1") | pipe | spread
    others = {
        "itself": piped,
        "PP2 x SP2 x EP2": piped | {"sequence_parallel": 2},
        "DualPipeV x EP2": piped | {"pipeline_schedule": "dualpipev", "micro_batch": 1},
        "PP2 with whole experts": MIXTRAL | _stage(2, "1") | pipe,
        "EP4 at stage 3": MIXTRAL | _stage(4, "3") | {"expert_parallel": 4},
        "one rank": MIXTRAL | _stage(1, "2"),
    }
    for name, other in others.items():
        yield Case(f"mixture, PP2 x EP2 to {name}", piped, other)
        if other is not piped:
            yield Case(f"mixture, {name} to PP2 x EP2", other, piped)


def _fp32(name: str, old: dict[str, Any], new: dict[str, Any]) -> Case:
    """On the small Llama."""
    return Case(name, LLAMA | old, LLAMA | new)


def _stage(ranks: int, stage: str) -> dict[str, Any]:
    return {"ranks": ranks, "ds_config": f"zero{stage.replace(' ', '_')}"}


def _with(name: str, key: str, value: Any) -> dict[str, Any]:
    config = read_for_run(name).config
    return config | {"zero_optimization": config["zero_optimization"] | {key: value}}


def _with_scheduler() -> dict[str, Any]:
    config = read_for_run("zero2").config
    curve = {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 4, "warmup_type": "linear"}
    return config | {"scheduler": {"type": "WarmupLR", "params": curve}}


class Matrix:
    """Runs cases on ranks that wait for them; what several cases begin with is trained once."""

    def __init__(self, folder: Path):
        self._folder, self._number = folder, 0
        self._pools: dict[int, RankPool] = {}
        self._trained: dict[str, Trained | str] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """The case's row: how far the losses are apart, or why one of its runs is refused."""
        row: dict[str, Any] = {"case": case.name, "tolerance": case.tolerance}
        old = self._older(case.old)
        if isinstance(old, str):
            return row | {"refused": f"the older run: {old}"}
        checkpoint = old.folder.checkpoints / f"step-{STEPS:08}"
        try:
            new = self._train(case.new | {"resume": str(checkpoint)})
        except UserError as error:
            return row | {"refused": str(error)}
        pairs = list(zip(old.losses[STEPS:], new.losses, strict=True))
        worst = max(abs(b - a) / abs(a) for a, b in pairs)
        return row | {"difference": worst, "agrees": worst <= case.tolerance, "losses": pairs}

    def close(self) -> None:
        """End the ranks."""
        for pool in self._pools.values():
            pool.close()

    def _older(self, options: dict[str, Any]) -> Trained | str:
        key = json.dumps(options, sort_keys=True)
        if key not in self._trained:
            try:
                self._trained[key] = self._train(options | {"save_every": str(STEPS)})
            except UserError as error:
                self._trained[key] = str(error)
        return self._trained[key]

    def _train(self, options: dict[str, Any]) -> Trained:
        self._number += 1
        given = {k: v for k, v in (BASE | options).items() if v is not None}
        ranks = given.pop("ranks")
        pool = self._pools.setdefault(ranks, RankPool(ranks, self._folder / f"ranks-{ranks}"))
        return pool.train(self._folder / f"run-{self._number}", **given)


def main() -> None:
    """Run the cases, print each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases whose name this regular expression finds")
    parser.add_argument("--output", type=Path, help="write the table as JSON; cases that it has already are kept")
    arguments = parser.parse_args()
    kept = json.loads(arguments.output.read_text())["rows"] if arguments.output and arguments.output.exists() else []
    rows = {row["case"]: row for row in kept}
    with tempfile.TemporaryDirectory() as name:
        matrix = Matrix(Path(name))
        (nvme := Path(name) / "nvme").mkdir()
        for case in cases(nvme):
            if case.name not in rows and re.search(arguments.only, case.name):
                rows[case.name] = matrix.run(case)
                print(_line(rows[case.name]), flush=True)
                _write(arguments.output, list(rows.values()))
        matrix.close()
    apart = [row for row in rows.values() if row.get("agrees") is False]
    agreed = [row for row in rows.values() if row.get("agrees")]
    print(f"{len(agreed)} agree, {len(apart)} do not, {len(rows) - len(agreed) - len(apart)} are refused")
    sys.exit(1 if apart else 0)


def _write(output: Path | None, rows: list[dict[str, Any]]) -> None:
    if output is None:
        return
    result = {
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": versions(),
        "steps_before": STEPS,
        "steps_compared": AFTER,
        "largest_difference": max((row["difference"] for row in rows if row.get("agrees")), default=None),
        "rows": rows,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['case']}: refused ({row['refused']})"
    return f"{row['case']}: {row['difference']:.1e} {'' if row['agrees'] else 'IS MORE THAN'} {row['tolerance']:.0e}"


if __name__ == "__main__":
    main()
