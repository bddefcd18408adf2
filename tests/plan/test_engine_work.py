"""The engine's own work per element and parameter, against the engine itself on fake tensors."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerofit as zf
from zerofit.app.job.requests import as_request
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.config.ds_json import read_for_run
from zerofit.features.optimizer import SGD_BYTES, UNSTEPPED_BYTES
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.time import engine_work
from zerofit.simulate.record import SimulationTarget

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
    folder = tmp_path_factory.mktemp("engine")
    paths, layouts = [folder / str(number) for number in range(len(CASES))], []
    for path, case in zip(paths, CASES, strict=True):
        target = target_of(*case)
        path.write_bytes(pickle.dumps(target))
        layouts.append(PlannedLayout.of(target.job))
    argv = [sys.executable, str(Path(__file__).with_name("engine_ops.py")), *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    answers = [path.with_suffix(".json") for path in paths]
    assert all(answer.exists() for answer in answers), done.stderr[-2000:]
    counts = [json.loads(answer.read_text()) for answer in answers]
    return dict(zip(CASES, zip(layouts, counts, strict=True), strict=True))


def target_of(stage: int, precision: Any, ranks: int, accumulation: int) -> SimulationTarget:
    run = zf.Run(
        model="llama-tiny",
        model_args={**SMALL, "vocab_size": 512},
        data="synthetic",
        seq_len=32,
        ds_config=read_for_run(f"zero{stage}").config,
        precision=precision,
        optimizer="adamw",
        micro_batch=2,
        gradient_accumulation_steps=accumulation,
        steps=2,
    )
    return prepare_simulation(as_request(run), zf.Cluster("h100-80gb", gpus=ranks)).target(0)


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


class _Moved(TorchDispatchMode):
    """Bytes that ops read and write: of every tensor that they are given, and of those that they make or change."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            tensors = [one for one in (*tree_leaves((args, kwargs)), out) if isinstance(one, torch.Tensor)]
            self.bytes += sum(one.nbytes for one in tensors)
        return out


def test_sgd_moves_what_its_ops_read_and_write():
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], momentum=0.9, weight_decay=0.01, foreach=False)
    for _ in range(2):  # the first makes the momentum
        parameter.grad = torch.ones(1000)
        with _Moved() as moved:
            optimizer.step()
    assert moved.bytes == 1000 * (SGD_BYTES - UNSTEPPED_BYTES)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_autograd_reads_two_gradients_and_writes_one_where_it_adds(precision):
    """What a later micro batch takes longer than the first at stages 0 and 1 (`plan.time`)."""
    parameter, moved = torch.nn.Parameter(torch.ones(1000, dtype=precision)), []
    for _ in range(2):
        loss = (parameter * 2).sum()
        with _Moved() as mode:
            loss.backward()
        moved.append(mode.bytes)
    assert moved[1] - moved[0] == 3 * 1000 * precision.itemsize
