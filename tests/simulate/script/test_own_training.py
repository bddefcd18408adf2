"""zerofit's own training as a script: the answer is the native one, to the byte."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.targets import cluster, target
from zerofit.config.ds_json import read_for_run
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.simulate.script.command import ScriptTarget, read_command

SCRIPT = """\
import pickle, sys
from datetime import timedelta
import torch.distributed as dist
from zerofit.simulate.engine.rank import empty_batches
from zerofit.train import process_group
from zerofit.train.engines import ZeroTrainer
from zerofit.train.pipeline import PipelineTrainer
from zerofit.spec.mesh import coords_of

target = pickle.load(open(sys.argv[1], "rb"))
process_group.start(timedelta(minutes=1))
kind = PipelineTrainer if target.job.layout.pp > 1 else ZeroTrainer
driver = kind(target.job, coords_of(dist.get_rank(), target.job.layout), target.inputs)
batches = empty_batches(target.job, target.inputs)
while True:
    driver.train_step(batches)
"""


def without_saving(name: str) -> dict[str, Any]:
    """Return a JSON of stage 3 that gathers no weights at the end, which a script's training does on top."""
    config = read_for_run(name).config
    del config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    return config


RECOMPUTED = {"gradient_accumulation_steps": 2, "activation_checkpointing": True}
RUNS: dict[str, dict[str, Any]] = {
    "zero2": {"config": "zero2", "kind": "h100-80gb", "precision": "bf16", **RECOMPUTED},
    "zero3": {"config": without_saving("zero3"), "kind": "h100-80gb", "precision": "bf16", "rank": 1},
    "zero3 offload": {"config": without_saving("zero3_offload"), "kind": "h100-80gb", "precision": "bf16"},
    "cnn": {"config": "zero2", "kind": "v100-16gb", "precision": "fp16", "model": "resnet18-small"},
    "on CPUs": {"config": "zero2"},
    "first stage of a pipeline": {"config": "zero1", "kind": "l4", "precision": "bf16", "pipeline": 2},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RankRecord, RankRecord]]:
    """Name -> what is said of the run, and of the script that makes the same run."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "train.py").write_text(SCRIPT)
    natives = [target(**spec) for spec in RUNS.values()]
    kinds = [spec.get("kind", "cpu") for spec in RUNS.values()]
    scripts = [as_script(*one, folder / f"{n}.pickle") for n, one in enumerate(zip(natives, kinds, strict=True))]
    records: Any = simulate_all([*natives, *scripts], lambda text: None)
    half = len(natives)
    return dict(zip(RUNS, zip(records[:half], records[half:], strict=True), strict=True))


def as_script(native: SimulationTarget, kind: str, file: Path) -> ScriptTarget:
    file.write_bytes(pickle.dumps(native))
    return ScriptTarget(
        command=read_command(["torchrun", "--nproc_per_node", "2", str(file.parent / "train.py"), str(file)]),
        device=cluster(2, kind).device,
        gpus=2,
        nodes=1,
        rank=native.rank,
        workspace_bytes=native.workspace_bytes,
    )


def peaks(record: RankRecord) -> list[tuple[str, int, int]]:
    """Of each phase; at its ends a batch is on the device here, and there it comes with the forward."""
    return [(phase.name, phase.step, phase.peak_bytes) for phase in record.phases]


@pytest.mark.parametrize("name", RUNS)
def test_a_script_gives_the_native_answer(answers, name):
    native, script = answers[name]
    assert isinstance(native, RankRecord) and isinstance(script, RankRecord), (native, script)
    assert peaks(script) == peaks(native)
    assert script.peaks[0].bytes == native.peaks[0].bytes and script.peaks[0].at == native.peaks[0].at
    assert script.reserved_bytes == native.reserved_bytes
    assert script.host == pytest.approx(native.host, abs=1024)  # batches are real on the host
