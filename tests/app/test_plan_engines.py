"""Layouts of FSDP2: what plan forecasts and writes, against Accelerate itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from click.testing import CliRunner

import zerofit as zf
from zerofit.app.planning.output_files import write_accelerate
from zerofit.cli.main import main

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
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.load(open("model.json"))), dtype=torch.float32)
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
@pytest.mark.parametrize("each", [False, True], ids=["once a step", "after each micro batch"])
def test_a_forecast_is_the_peak_of_accelerates_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: bool):
    """With two replicas on one node of four; the file is read by Accelerate, and its run simulated.

    `each`: when gradients are reduced.
    """
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))
    Path("train.py").write_text(SCRIPT)
    cluster = zf.Cluster("h100-80gb", gpus=2, nodes=2)
    batch = {"micro_batch": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": False, "offload": "none"}
    plan = zf.plan("model.json", cluster, engines=["fsdp2"], seq_len=64, **batch)
    wanted = (True, 2, each)
    planned = next(
        run for run in plan.layouts if (run.layout.reshard, run.layout.replicas, run.layout.sync_each_batch) == wanted
    )
    (file,) = write_accelerate(tmp_path / "out", planned.layout, cluster)
    read = ClusterConfig.from_yaml_file(str(file))
    assert (read.num_processes, read.num_machines, read.mixed_precision) == (4, 2, "bf16")
    assert read.parallelism_config == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    place = "--machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
    command = f"accelerate launch --config_file {file} {place} train.py {each}".split()
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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--engine", "torchtitan"], "torchtitan trains its own models"),
        (["--engine", "megatron"], "no engine 'megatron'; there are: deepspeed, fsdp2"),
        (["--engine", "fsdp2", "--loss-chunk", "512"], "--engine fsdp2 with --loss-chunk"),
    ],
)
def test_what_is_not_forecast_is_refused(more: list[str], words: str):
    result = CliRunner().invoke(main, ["plan", "llama-tiny", "--gpus", "2", "--gpu", "l4", "--seq-len", "64", *more])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
