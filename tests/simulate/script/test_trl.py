"""TRL's trainers, peft and bitsandbytes, as far as they are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.meter.script_cases import SCRIPTS, save_tokenizer
from zerofit.app.simulation.scripts import simulate_script
from zerofit.simulate.forecast.result import SimulatedScript, Simulation
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError

HIDDEN, LAYERS, VOCABULARY, INNER = 256, 2, 512, 640
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # elements of a layer's linear weights
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 512,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARGUMENTS = "--model llama --output_dir out --report_to none --bf16 True --per_device_train_batch_size 2"


@pytest.fixture(scope="module", autouse=True)
def installed():
    """TRL takes seconds to import, which workers that only collect these tests save."""
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl")
    save_tokenizer(path / "llama")
    (path / "llama" / "config.json").write_text(json.dumps(LLAMA))  # and no weights
    return path


def simulated(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, more: str = "", stage: int = 2) -> Simulation:
    monkeypatch.chdir(folder)
    launcher = f"accelerate launch --use_deepspeed --zero_stage {stage} --num_processes 2"
    words = f"{launcher} {SCRIPTS}/{script} {ARGUMENTS} {more}"
    return simulate_script(words.split(), Cluster("h100-80gb", gpus=2))


def script(result: Simulation) -> SimulatedScript:
    assert isinstance(result.run, SimulatedScript)
    return result.run


def test_preferences_with_a_reference_model(folder, monkeypatch):
    result = simulated(folder, monkeypatch, "preferences.py dpo")
    seen = script(result).facts
    assert (seen.engines, seen.zero_stage, seen.trainer) == (2, 2, True)
    assert seen.parameters == seen.trained_parameters
    both = 2 * (2 * seen.parameters)  # weights of 2 bytes: the one that trains and its reference
    assert result.breakdown["parameters"] == pytest.approx(both, rel=0.05)
    assert max(p.step for p in result.phases) == 1


def test_adapters_on_weights_of_four_bits(folder, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    whole = simulated(folder, monkeypatch, "sft.py", "--lora True")
    packed = simulated(folder, monkeypatch, "sft.py", "--lora True --four_bits True")
    seen = [script(result).facts for result in (whole, packed)]
    assert seen[0].parameters == seen[1].parameters and seen[0].trained_parameters == seen[1].trained_parameters
    saved = whole.breakdown["parameters"] - packed.breakdown["parameters"]
    assert saved == pytest.approx(1.5 * LAYERS * LAYER, rel=0.05)  # 2 bytes an element become half a byte


def test_quantization_that_is_refused(folder, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    with pytest.raises(UserError, match="4-bit weights under ZeRO-3 cannot be simulated"):
        simulated(folder, monkeypatch, "sft.py", "--lora True --four_bits True", stage=3)


GRPO = """\
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

rows = Dataset.from_dict({"prompt": [f"count to {n}" for n in range(16)]})
sizes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=200, beta=0.04)
args = GRPOConfig(output_dir="out", report_to="none", bf16=True, **sizes)
reward = lambda completions, **kwargs: [float(len(text)) for text in completions]
GRPOTrainer(model="llama", reward_funcs=reward, args=args, train_dataset=rows).train()
"""


def test_generated_completions_have_their_longest_length(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("grpo.py").write_text(GRPO)
    result = simulate_script(["python", "grpo.py"], Cluster("h100-80gb"))
    names = {p.name for p in result.phases if p.step == 1}
    assert names == {"generation", "log-probs", "forward", "backward", "step"}
    notes = [note.text for note in script(result).facts.notes]
    assert "generation: each sequence gets 200 new tokens, the limit; 3 of these tokens were computed" in notes


def rollout(folder, monkeypatch, **changed: object) -> Simulation:
    """Simulate GRPO beside vLLM in the same process, with these arguments of GRPOConfig."""
    monkeypatch.chdir(folder)
    arguments = {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 400,
        **changed,
    }
    shown = "".join(f", {name}={value!r}" for name, value in arguments.items())
    Path("rollout.py").write_text(GRPO.replace("**sizes", f"use_vllm=True{shown}, **sizes"))
    return simulate_script(["python", "rollout.py"], Cluster("h100-80gb"))


def test_vllm_beside_the_trainer_holds_its_share_of_the_gpu_in_each_phase(folder, monkeypatch):
    result = rollout(folder, monkeypatch)
    phases = {(phase.name, phase.step): phase for phase in result.phases}
    assert {("weight sync", 0), ("generation", 0), ("weight sync", 1), ("step", 1)} <= {*phases}
    share = 0.3 * 80e9
    assert all(0.95 * share < phase.peak_bytes < 1.1 * share for (_, step), phase in phases.items() if step >= 0)
    assert max(result.breakdown, key=lambda kind: result.breakdown[kind]) == "inference engine"


def test_a_sleeping_vllm_leaves_its_memory_to_the_step(folder, monkeypatch):
    result = rollout(folder, monkeypatch, vllm_enable_sleep_mode=True)
    phases = {(phase.name, phase.step): phase for phase in result.phases}
    assert phases["generation", 1].peak_bytes > 0.9 * 0.3 * 80e9
    names = [p.name for p in result.phases if p.step == 0]
    assert names.index("generation") == names.index("weight sync") + 1  # vLLM's weights stay awake in between
    awake = ("weight sync", "generation", "build", "init")
    assert all(4 * p.peak_bytes < 0.9 * 0.3 * 80e9 for p in result.phases if p.step == 1 and p.name not in awake)


def test_a_share_without_room_for_a_sequence_ends_the_script_as_vllm_does(folder, monkeypatch):
    with pytest.raises(UserError, match="No available memory for the cache blocks"):
        rollout(folder, monkeypatch, vllm_gpu_memory_utilization=0.005)


def test_a_vllm_server_needs_only_the_buffers_of_the_weight_update(folder, monkeypatch):
    result = rollout(folder, monkeypatch, vllm_mode="server")
    phases = {(phase.name, phase.step): phase for phase in result.phases}
    sync, generation = phases["weight sync", 1], phases["generation", 1]
    assert sync.peak_bytes - sync.start_bytes == 4 * script(result).facts.parameters  # one buffer with all weights
    assert generation.peak_bytes == generation.start_bytes == sync.start_bytes
    assert "inference engine" not in result.breakdown
