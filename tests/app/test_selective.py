"""Selective checkpointing from the command line to the forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerofit as zf
from tests.app.test_plan_engines import CONFIG
from zerofit.cli.main import main
from zerofit.spec.run import load_run

H100 = zf.Cluster("h100-80gb", gpus=4)
SELECTIVE = "--selective-activation-checkpointing"


@pytest.mark.parametrize("stage", [2, 3])
def test_plan_is_the_peak_of_the_engine(tmp_path: Path, stage: int):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(CONFIG))
    found = {}
    for kind in (False, "selective", True):
        options = {"seq_len": 512, "micro_batch": 4, "activation_checkpointing": kind}
        pins = {"zero_stage": stage, "offload": "none", "tensor_parallel": 1, "gradient_accumulation_steps": 1}
        planned = zf.plan(str(model), H100, **options, **pins).layouts[0]
        run = zf.Run(model=str(model), data="synthetic", ranks=4, precision="bf16", ds_config=f"zero{stage}", **options)
        assert planned.peak_bytes == pytest.approx(zf.simulate(run, H100).peak_bytes, rel=1e-5)
        assert planned.layout.checkpointing == kind
        found[kind] = planned
    assert found[True].peak_bytes < found["selective"].peak_bytes < found[False].peak_bytes
    assert str(found["selective"].layout).endswith("selective checkpointing")


def test_the_last_flag_counts_and_a_written_run_has_the_word(tmp_path: Path):
    words = ["plan", "llama-tiny", "--gpus", "2", "--gpu", "l4", "--seq-len", "64", "--micro-batch", "1", "--json"]
    words += ["--tensor-parallel", "1", "--no-activation-checkpointing", SELECTIVE, "--write", str(tmp_path / "out")]
    answer = json.loads(CliRunner().invoke(main, words).stdout)
    assert {row["activation_checkpointing"] for row in answer["layouts"]} == {"selective"}
    assert load_run(tmp_path / "out" / "run.yaml", {}).run.activation_checkpointing == "selective"
