"""Inject nine causes of a loss that is not finite into runs of two CPU ranks, and compare what a replay names.

    python -m benchmarks.replay_nans [NAME ...]

Each run stops before the faulty step (--check-loss), and `zerofit.replay` repeats it from its checkpoint. The ranks
wait in a pool, as in the tests: a launch takes longer than a run. Results: benchmarks/results/replay_nans.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.ranks.pool import RankPool
from tests.train.own_models import fingerprint
from zerofit.app import replaying
from zerofit.checkpoint.store import marks_of, read_manifest
from zerofit.data.loader import Order
from zerofit.data.opening import open_data
from zerofit.explain.not_finite import Replay
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter
from zerofit.spec.foreign import read_json
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "replay_nans.json"
MODELS = "tests.train.nan_models"
COMMON = {"data": "digits", "steps": 9, "micro_batch": 4, "save_every": 3, "optimizer": "sgd", "lr": 0.01}
DIGITS = open_data(Run(data="digits"), "image", None, Reporter())
CULPRIT = int(Order.of(DIGITS.train, 0).indices(45, 46)[0])  # in the sixth step, on rank 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and what a replay has to name."""

    model: str
    cause: str
    step: int | None  # None: any
    options: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)  # other fields of the answer
    before: Callable[[RankPool, Path], None] | None = None  # prepares the run folder


def damage_checkpoint(pool: RankPool, folder: Path) -> None:
    """Train six steps, and write NaN into a weight of the newest checkpoint, whose checksums are right."""
    pool.train(folder, **COMMON | {"model": f"{MODELS}:Plain", "ds_config": "zero0", "steps": 6})
    checkpoint = folder / "checkpoints" / "step-00000006"
    for file in checkpoint.glob("state/mp_rank_*_model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["module"]["head.weight"][3, 5] = torch.nan
        torch.save(content, file)
    manifest = read_manifest(checkpoint)
    replace(manifest, files=marks_of(checkpoint, list(manifest.files))).write(checkpoint)


FP16 = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
STATIC = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale": 2.0**24}}
BLANK = fingerprint(DIGITS.train.batch([CULPRIT], [0])["inputs"]).item()
CASES = {
    "a sample with infinity": Case(
        model="Damaged",
        cause="sample",
        step=6,
        options={"model_args": {"sample": CULPRIT, "what": "inputs"}, "ds_config": "zero2"},
        names={"samples": (CULPRIT,), "tensor": "inputs", "rank": 1},
    ),
    "a label that is no class": Case(
        model="Ordinal",
        cause="sample",
        step=6,
        options={"model_args": {"sample": CULPRIT, "what": "labels"}, "ds_config": "zero1"},
        names={"samples": (CULPRIT,), "tensor": "labels", "rank": 1, "op": "log"},
    ),
    "an image that its normalisation divides by zero": Case(
        model="Normalising",
        cause="sample",
        step=6,
        options={"model_args": {"blank": BLANK}, "ds_config": "zero3"},
        names={"samples": (CULPRIT,), "op": "div", "rank": 1},
    ),
    "fp16 overflows in one layer": Case(
        model="Wide",
        cause="fp16-overflow",
        step=1,
        options={"ds_config": FP16, "precision": "fp16"},
        names={"op": "pow", "phase": "forward", "module": "Wide"},
    ),
    "a loss scale that is too high": Case(
        model="Plain",
        cause="loss-scale",
        step=1,
        options={"ds_config": STATIC, "precision": "fp16"},
        names={"phase": "backward"},
    ),
    "a learning rate that is too high": Case(
        model="Plain",
        cause="learning-rate",
        step=None,
        options={"ds_config": "zero2", "lr": 1e6, "gradient_clipping": 0.0},
        names={"phase": "forward"},
    ),
    "a rank that differs after a collective": Case(
        model="FaultyLink", cause="collective", step=None, options={"ds_config": "zero0"}, names={"phase": "step"}
    ),
    "bad weights in the checkpoint": Case(
        model="Plain",
        cause="bad-weights",
        step=7,
        options={"ds_config": "zero0"},
        names={"tensor": "head.weight", "phase": "start"},
        before=damage_checkpoint,
    ),
    "the log of zero in a layer": Case(
        model="Logarithm",
        cause="operation",
        step=1,
        options={"ds_config": "zero3"},
        names={"op": "log", "module": "Logarithm"},
    ),
}


def found(case: Case, pool: RankPool, folder: Path) -> Replay:
    """Run a case until it stops, and replay it."""
    if case.before:
        case.before(pool, folder)
    words = pool.fail(folder, **COMMON | {"model": f"{MODELS}:{case.model}", "check_loss": True} | case.options)
    problem = Problem(**words[0])
    print(f"  the run: {problem.message}")
    RunFolder(folder).rank_error(0).write_text(json.dumps({"rank": 0, "problems": [problem.as_dict()]}))

    def in_pool(target: RunFolder, *_: Any) -> dict[str, Any]:
        assert pool._submit(target) == ["ok", "ok"]
        return read_json(target.result)

    with patch.object(replaying, "run_ranks", in_pool):
        return replaying.replay(folder, trust_model_code=True)


def main(names: list[str]) -> None:
    """Run the cases, print what is found, and write the results of all."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        patch.object(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True),
    ):
        pool = RankPool(2, Path(scratch))
        for number, (name, case) in enumerate(CASES.items()):
            if names and name not in names:
                continue
            print(name)
            start = time.monotonic()
            answer = found(case, pool, Path(scratch) / f"run-{number}")
            wanted = {"cause": case.cause, **({"step": case.step} if case.step else {}), **case.names}
            wrong = {key: getattr(answer, key) for key, value in wanted.items() if getattr(answer, key) != value}
            print(f"  {answer.cause}, step {answer.step}: {answer.summary}")
            print(f"  {f'WRONG: {wrong}' if wrong else 'as injected'}\n")
            shown = {
                key: getattr(answer, key) for key in ("cause", "step", "phase", "module", "op", "tensor", "summary")
            }
            same = f"{answer.equal_losses} of {answer.compared_losses}"
            row = {"fault": name, **shown, "samples": answer.samples, "right": not wrong, "equal_losses": same}
            rows.append({**row, "seconds": round(time.monotonic() - start, 1)})
        pool.close()
    if not names:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} causes are named as injected")


if __name__ == "__main__":
    main(sys.argv[1:])
