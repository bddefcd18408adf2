"""Layouts of FSDP2: what plan forecasts and writes, against Accelerate itself."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from click.testing import CliRunner

import zerofit as zf
from zerofit.app.planning.output_files import write_accelerate
from zerofit.cli.main import main

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SCRIPT = """
import json, sys, torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from transformers import AutoConfig, AutoModelForCausalLM

plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sys.argv[1] == "True")
accelerator = Accelerator(gradient_accumulation_plugin=plugin)
config = AutoConfig.for_model(**json.load(open("model.json")))
model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sys.argv[2]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loader = torch.utils.data.DataLoader([{"x": torch.randint(0, 1024, (64,))} for _ in range(64)], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.versions
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("each", [False, True], ids=["once per step", "after each micro batch"])
def test_a_forecast_is_the_peak_of_accelerates_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: bool, dtype: str
):
    """With two replicas on one node of four; the file is read by Accelerate, and its run simulated.

    `each`: when gradients are reduced. `dtype`: of weights, gradients and moments.
    """
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))
    Path("train.py").write_text(SCRIPT)
    cluster = zf.Cluster("h100-80gb", gpus=2, nodes=2)
    batch = {"micro_batch": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": False, "offload": "none"}
    plan = zf.plan("model.json", cluster, engines=["fsdp2"], seq_len=64, model_args={"dtype": dtype}, **batch)
    wanted = (True, 2, each)
    planned = next(
        run for run in plan.layouts if (run.layout.reshard, run.layout.replicas, run.layout.sync_each_batch) == wanted
    )
    (file,) = write_accelerate(tmp_path / "out", planned.layout, cluster)
    read = ClusterConfig.from_yaml_file(str(file))
    assert (read.num_processes, read.num_machines) == (4, 2)
    assert read.mixed_precision == {"float32": "bf16", "bfloat16": "no"}[dtype]
    assert read.parallelism_config == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    place = "--machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
    command = f"accelerate launch --config_file {file} {place} train.py {each} {dtype}".split()
    simulation = zf.simulate_script(command, cluster)
    assert planned.peak_bytes == pytest.approx(simulation.peak_bytes, rel=1e-3)


def test_the_command_ranks_both_engines_and_writes_accelerates_file(tmp_path: Path):
    words = ["plan", "llama-tiny", "--gpus", "2", "--gpu", "l4", "--seq-len", "64", "--micro-batch", "1", "--json"]
    words += ["--engine", "deepspeed,fsdp2", "--write", str(tmp_path / "out"), "--zero-stage", "3"]
    words += ["--no-activation-checkpointing", "--tensor-parallel", "1"]
    both = json.loads(CliRunner().invoke(main, words).stdout)
    assert {row["engine"] for row in both["layouts"]} == {"deepspeed", "fsdp2"}
    mine = [row for row in both["layouts"] if row["engine"] == "fsdp2"]
    assert {row["reshard_after_forward"] for row in mine} == {True, False}
    assert len({row["layout"] for row in mine}) == len(mine)  # words that name one layout each, as a page shows them
    names = {"deepspeed": {"ds_config.json", "run.yaml"}, "fsdp2": {"accelerate.yaml"}}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names[
        both["layouts"][both["written_layout"]]["engine"]
    ]


# the shape of torchtitan's llama3_debugmodel
DEBUG = {**CONFIG, "vocab_size": 2048, "intermediate_size": 768, "num_hidden_layers": 6}
DEBUG |= {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 131072}


def debug_plan(tmp_path: Path, cluster: zf.Cluster, **more: Any) -> zf.Plan:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(DEBUG))
    return zf.plan(str(model), cluster, engines=["torchtitan"], seq_len=2048, **more)


@pytest.mark.versions(of="torch")
@pytest.mark.slow
def test_plan_is_the_peak_of_torchtitans_own_program(tmp_path: Path):
    """Peaks of `zerofit simulate -- torchrun -m torchtitan.train`, kept since torchtitan is not installed here."""
    kept = json.loads((RESULTS / "titan-accuracy.json").read_text())["cases"]
    cases = [case for case in kept.values() if case["model"] == "debug"]
    assert len(cases) >= 3
    for case in cases:
        plan = debug_plan(tmp_path, zf.Cluster("h100-80gb", gpus=case["gpus"]), **case["pins"])
        planned = next(run for run in plan.layouts if run.layout.reshard == case["reshard"])
        assert planned.peak_bytes == pytest.approx(case["simulated_bytes"], rel=1e-3), case


def test_the_written_script_has_torchtitans_options(tmp_path: Path):
    pins = {"micro_batch": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": True, "offload": "none"}
    plan = debug_plan(tmp_path, zf.Cluster("h100-80gb", gpus=4, nodes=2), tensor_parallel=2, **pins)
    (file,) = plan.write(tmp_path / "out")
    words = shlex.split(file.read_text().partition("torchrun")[2].replace("\\\n", ""))
    layout = plan.layouts[plan.chosen or 0].layout
    given = dict(itertools.pairwise(words))
    assert (given["--nproc_per_node"], given["--nnodes"], given["--config"]) == ("4", "2", "llama3_debugmodel")
    assert (given["--training.local_batch_size"], given["--training.global_batch_size"]) == ("2", "16")
    assert given["--parallelism.tensor_parallel_degree"] == "2"
    degrees = [int(given[f"--parallelism.data_parallel_{name}_degree"]) for name in ("replicate", "shard")]
    assert degrees == [layout.replicas, 4 // layout.replicas]
    assert given["--parallelism.fsdp_reshard_after_forward"] == ("default" if layout.reshard else "never")
    assert words[-2:] == ["$@", "activation-checkpoint:full"]


def test_a_model_without_a_configuration_of_torchtitan_is_ranked_but_not_written(tmp_path: Path):
    plan = zf.plan("llama-tiny", zf.Cluster("l4", gpus=2), engines=["torchtitan"], seq_len=64, micro_batch=1)
    assert {run.layout.engine for run in plan.layouts} == {"torchtitan"}
    with pytest.raises(zf.UserError, match="no configuration of llama-tiny"):
        plan.write(tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--engine", "megatron"], "no engine 'megatron'; there are: deepspeed, fsdp2, torchtitan"),
        (["--engine", "torchtitan", "--sequence-parallel", "2"], "not forecast with pipeline, sequence"),
        (["--engine", "torchtitan", "--lora", "8"], "with all weights trained"),
        (["--engine", "fsdp2", "--loss-chunk", "512"], "--engine fsdp2 with --loss-chunk"),
    ],
)
def test_what_is_not_forecast_is_refused(more: list[str], words: str):
    result = CliRunner().invoke(main, ["plan", "llama-tiny", "--gpus", "2", "--gpu", "l4", "--seq-len", "64", *more])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
