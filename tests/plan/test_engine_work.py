"""The engine's own work per element and parameter, against the engine itself on fake tensors."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerofit as zf
from zerofit.app.requests import as_request
from zerofit.app.simulation import prepare_simulation
from zerofit.config.ds_json import bundled, read_document
from zerofit.plan.engine_work import engine_work
from zerofit.plan.layout import PlannedLayout

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
ELEMENTS, PARAMETERS = 1_443_072, 21
CASES = [  # ZeRO stage, precision, ranks, gradient accumulation steps
    (0, "bf16", 4, 1),
    (0, "fp32", 1, 1),
    (1, "bf16", 1, 1),
    (2, "fp32", 4, 1),
    (2, "bf16", 4, 3),
    (3, "fp16", 4, 2),
    (3, "fp32", 1, 1),
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[tuple, tuple[PlannedLayout, dict[str, list[int]]]]:
    folder, found = tmp_path_factory.mktemp("engine"), {}
    for start in range(0, len(CASES), 2):
        running = [(case, *begin(folder / f"{case}", *case)) for case in CASES[start : start + 2]]
        for case, layout, process, answer in running:
            log, _ = process.communicate(timeout=120)
            assert process.returncode == 0, log[-2000:]
            found[case] = layout, json.loads(answer.read_text())
    return found


def begin(path: Path, stage: int, precision: Any, ranks: int, accumulation: int) -> tuple:
    run = zf.Run(
        model="llama-tiny",
        model_args={**SMALL, "vocab_size": 512},
        data="synthetic",
        seq_len=32,
        ds_config=read_document(bundled()[f"zero{stage}"]).config,
        precision=precision,
        optimizer="adamw",
        micro_batch=2,
        gradient_accumulation_steps=accumulation,
        steps=2,
    )
    target = prepare_simulation(as_request(run), zf.Cluster("h100-80gb", gpus=ranks)).target(0)
    path.write_bytes(pickle.dumps(target))
    answer = path.with_suffix(".json")
    argv = [sys.executable, str(Path(__file__).with_name("engine_ops.py")), str(path), str(answer)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return PlannedLayout.of(target.job), process, answer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_over_elements_are_the_engines(counted, case):
    layout, phases = counted[case]
    _, _, ranks, accumulation = case
    work = engine_work(layout)
    share = 1 / ranks if layout.zero_stage else 1
    reductions = accumulation if layout.zero_stage > 1 else 1
    gradients = reductions * (work.gradients + share * work.kept) + (reductions - 1) * share * work.added
    assert phases["backward"][1] / ELEMENTS == pytest.approx(gradients, rel=0.03)
    assert phases["step"][1] / ELEMENTS == pytest.approx(share * work.step, rel=0.01)


@pytest.mark.parametrize("case", [case for case in CASES if case[2] == 1 or case[0] == 0], ids=str)
def test_kernels_of_the_step_are_the_engines(counted, case):
    layout, phases = counted[case]
    work = engine_work(layout)
    assert phases["step"][0] == work.looped * PARAMETERS + work.begun
