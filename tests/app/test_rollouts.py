"""`zerofit plan --method`: phases that add up, the safe utilization at its edge, and a config that TRL reads."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.rollouts import plan_rollouts
from zerofit.cli.main import main
from zerofit.rollout.methods import METHODS, RolloutSettings
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError

CASE = ("qwen2.5-0.5b", "--gpu", "l4", "--gpus", "4", "--zero-stage", "2", "--offload", "none")


def run(*args: str) -> tuple[int, dict]:
    done = CliRunner().invoke(main, ["plan", *CASE, *args, "--json"])
    return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("grpo") / "out"
    code, found = run("--method", "grpo", "--rollout", "beta=0.04", "--write", str(folder))
    assert code == 0
    return found


def test_phases_come_in_the_order_of_a_step(grpo):
    best = grpo["arrangements"][0]
    assert list(best["phases"]) == ["generate", "log-probs", "train", "sync weights", "checkpoint"]
    sums = {name: sum(parts.values()) for name, parts in best["phases"].items()}
    assert best["highest_bytes"] == max(sums.values()) == sums[best["highest"]]
    asleep = best["phases"]["train"]["vLLM asleep"]
    assert "vLLM KV cache" not in best["phases"]["train"] and asleep < best["phases"]["generate"]["vLLM weights"]
    # a reference in 16 bits beside ZeRO-2 is whole on each GPU
    assert best["phases"]["train"]["reference"] == pytest.approx(2 * 494_032_768, rel=0.001)
    fitting = [row["fits"] for row in grpo["arrangements"]]
    assert fitting == sorted(fitting, reverse=True)


def test_the_largest_utilization_is_the_edge(grpo):
    colocated = next(row for row in grpo["arrangements"] if row["largest_utilization"])
    sleeps = "level" in colocated["name"]
    fixed = f"beta=0.04,vllm_mode=colocate,vllm_enable_sleep_mode={str(sleeps).lower()}"
    layout = colocated["layout"]
    pins = ["--micro-batch", str(layout["micro_batch"]), "--method", "grpo"]
    pins += ["--activation-checkpointing" if layout["activation_checkpointing"] else "--no-activation-checkpointing"]
    for more, code in ((0.0, 0), (0.02, 1)):
        share = round(colocated["largest_utilization"] + more, 2)
        assert run(*pins, "--rollout", f"{fixed},vllm_gpu_memory_utilization={share}")[0] == code


def test_trl_reads_what_is_written(grpo):
    from trl import GRPOConfig, ModelConfig, ScriptArguments

    ds_config, config = (Path(path) for path in grpo["written"])
    values = yaml.safe_load(config.read_text())
    assert values["deepspeed"] == str(ds_config)
    zero = json.loads(ds_config.read_text())["zero_optimization"]
    assert zero["stage"] == 2 and zero["allgather_bucket_size"] == zero["reduce_bucket_size"] == 50_000_000
    names = {field.name for kind in (ScriptArguments, GRPOConfig, ModelConfig) for field in fields(kind)}
    assert values.keys() <= names
    batch = 4 * values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert batch % values["num_generations"] == 0 and values["model_name_or_path"].startswith("Qwen/")


def test_trl_reads_the_files_of_other_methods(tmp_path):
    from trl import DistillationConfig, DPOConfig, ModelConfig, RLOOConfig, ScriptArguments
    from trl.experimental.online_dpo import OnlineDPOConfig

    configs = {"rloo": RLOOConfig, "dpo": DPOConfig, "online-dpo": OnlineDPOConfig, "distill": DistillationConfig}
    for method, kind in configs.items():
        mode = ("--rollout", "vllm_mode=colocate") if METHODS[method].generates else ()
        code, found = run("--method", method, *mode, "--write", str(tmp_path / method))
        names = {field.name for of in (ScriptArguments, kind, ModelConfig) for field in fields(of)}
        assert code == 0 and yaml.safe_load(Path(found["written"][1]).read_text()).keys() <= names


# the highest peaks of phases of TRL 1.16 in `zerofit simulate`; see benchmarks/rollout_accuracy.py
SIMULATED = {
    "rloo": {"generate": 33825246403, "log-probs": 8933281579, "train": 11546826541, "sync weights": 11286877985},
    "dpo": {"train": 11466361376},
    "online-dpo": {"generate": 36943756673, "train": 14002267602, "sync weights": 14389282127},
    "distill": {"generate": 33825246347, "train": 11546826485, "sync weights": 11286877929},
    # the teacher's head is gathered for the loss
    "distill zero3": {"generate": 30835845520, "train": 10000950258, "sync weights": 8831337454},
    "distill zero3 lora": {"generate": 26478128268, "train": 5618394862, "sync weights": 6501041898},
    # the same engine runs the reference between forward and backward; in DPO, all weights are gathered after that
    "dpo zero3 lora": {"train": 3523474745},
    "online-dpo zero3 lora": {"generate": 26483642498, "train": 3831338554, "sync weights": 6580099152},
}


@pytest.mark.parametrize("case", SIMULATED)
def test_phases_are_those_of_trls_script(case):
    method, *words = case.split()
    pins: Any = {"seq_len": 1024, "micro_batch": 2, "gradient_accumulation_steps": 4, "offload": "none"}
    pins |= {"precision": "bf16", "activation_checkpointing": True, "zero_stage": 3 if "zero3" in words else 2}
    pins |= {"lora": 16} if "lora" in words else {}
    values = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}
    values = {"max_completion_length": 512, **values} if METHODS[method].generates else {}
    request = PlanningRequest(model="llama-3.2-1b", pins=pins)
    memory = plan_rollouts(method, request, Cluster("h100-80gb", gpus=4), values).best.memory
    beside = memory.resident["margin"] + (memory.engine.outside if memory.engine else 0)
    phases = {phase.name: phase.bytes - beside for phase in memory.phases if phase.name != "checkpoint"}
    assert phases == pytest.approx(SIMULATED[case], rel=0.015 if "zero3" in words else 0.001)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "grpo"])
def test_every_method_has_its_models(method):
    code, found = run("--method", method)
    best = found["arrangements"][0]
    assert code in (0, 1) and ("generate" in best["phases"] or best["server_gpus"] or method == "dpo")
    train = best["phases"]["train"]
    assert ("critic" in train) is METHODS[method].critic
    assert ("reward model or teacher" in train) is METHODS[method].scorer
    assert ("reference" in train) is METHODS[method].reference


def test_a_server_gets_the_weights_in_buffers():
    _, found = run("--method", "grpo", "--rollout", "vllm_mode=server")
    best = found["arrangements"][0]
    assert best["server_gpus"] and "generate" not in best["phases"]
    assert best["phases"]["sync weights"]["weight buffers"] == pytest.approx(2 * 494_032_768, rel=0.001)


def test_adapters_beside_a_frozen_tied_head_have_no_logits(tmp_path):
    pins = ["--lora", "16", "--lora-dropout", "0.1", "--micro-batch", "4", "--activation-checkpointing"]
    mode = ["--rollout", "vllm_mode=colocate", "--write", str(tmp_path / "out")]
    code, found = run("--method", "grpo", *pins, *mode)
    logits = 4 * 4 * found["seq_len"] * 151_936  # in float32
    phases = found["arrangements"][0]["phases"]
    assert code == 0 and phases["train"]["training step"] < 0.5 * logits
    assert phases["sync weights"]["merged adapter"] == 2 * 2 * 896 * 4864  # two copies of an MLP's matrix in 16 bits
    values = yaml.safe_load(Path(found["written"][1]).read_text())
    assert (values["lora_r"], values["lora_alpha"], values["lora_dropout"]) == (16, 32, 0.1)


def test_a_share_below_the_weights_still_counts_the_weights(tmp_path):
    folder, share = tmp_path / "trl", "vllm_mode=colocate,vllm_gpu_memory_utilization=0.01"
    code, found = run("--method", "grpo", "--rollout", share, "--write", str(folder))
    assert "written" not in found and not folder.exists()  # nothing fits, but the answer is still shown
    generate = found["arrangements"][0]["phases"]["generate"]
    assert code == 1 and found["findings"][0]["slug"] == "no-cache"
    assert generate["vLLM weights"] > 2 * 494_032_768 > 0.01 * 24e9 and generate["vLLM KV cache"] == 0


def test_bad_settings_are_reported_at_once():
    values = {"num_generations": 0, "beta": 3, "vllm_mode": "x", "sleep_level": 3, "foo": 1}
    with pytest.raises(UserError) as caught:
        RolloutSettings.read(values, "--rollout")
    assert len(caught.value.problems) == len(values)
    assert run("--method", "grpo", "--global-batch", "12")[0] == 2
    assert run("--method", "grpo", "--rollout", "max_completion_length=1024")[0] == 2
    assert run("--method", "grpo", "--engine", "fsdp2")[0] == 2
    assert run("--method", "ppo", "--write", "trl")[1]["error"]["where"] == "--write"
    assert run("--method", "distill", "--rollout", "num_generations=4")[0] == 2
    for own in ("server_gpus=4", "server_gpus=1,vllm_tensor_parallel_size=2"):  # no GPU is left; half an engine
        assert run("--method", "grpo", "--global-batch", "48", "--gpus", "4", "--rollout", own)[0] == 2
    # TRL copies the model for its reference, which ZeRO-3 forbids
    assert [run("--method", "online-dpo", "--zero-stage", "3", *more)[0] for more in ((), ("--lora", "8"))] == [2, 0]


def test_only_an_engine_that_sleeps_moves_its_weights():
    pins: Any = {"seq_len": 1024, "precision": "bf16", "zero_stage": 2, "offload": "none"}
    request = PlanningRequest(model="qwen2.5-0.5b", pins=pins)
    found = plan_rollouts("grpo", request, Cluster("h100-80gb", gpus=2), {"sleep_level": 1, "vllm_mode": "colocate"})
    times = {row.name: row.time for row in found.arrangements}
    assert times["colocate, sleep level 1"].sleep_s > 0
    assert times["colocate, always awake"].sleep_s == 0
