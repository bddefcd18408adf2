"""`zerofit.hf`: a training of the Hugging Face Trainer simulated, and the callbacks in the real Trainer."""

from __future__ import annotations

import gc
import json
import mmap
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback, TrainerControl, TrainerState

import zerofit as zf
from tests.app.trainer_ranks import CONFIG, LENGTH, POISON, POISONED, Sleeper, arguments, trainer

ROOT = Path(__file__).parents[2]
TAKEN = 512 << 20  # bytes
CLUSTER = zf.Cluster("l4", gpus=4)
JSON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


@pytest.fixture(autouse=True)
def no_deepspeed_left() -> None:
    """A TrainingArguments with a JSON says so to all of transformers as long as it lives."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def test_the_json_is_filled_as_the_trainer_does(tmp_path):
    args = arguments(tmp_path, deepspeed=json.loads(json.dumps(JSON)), bf16=True, learning_rate=3e-4)
    run = zf.hf.run_of(LlamaForCausalLM(CONFIG), args, CLUSTER, seq_len=LENGTH)
    config = run.ds_config
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert config["optimizer"]["params"]["lr"] == 3e-4 and config["bf16"]["enabled"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == CONFIG.hidden_size**2
    assert (run.ranks, run.steps, run.seq_len) == (4, 6, LENGTH) and not run.activation_checkpointing
    assert args.hf_deepspeed_config.config["train_batch_size"] == 4  # the Trainer's own, of one process
    assert JSON["bf16"]["enabled"] == "auto"


def test_what_the_trainer_would_refuse_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = {**JSON, "train_micro_batch_size_per_gpu": 3}
    with pytest.raises(zf.UserError, match="per_device_train_batch_size=2"):
        zf.hf.run_of(CONFIG, args, CLUSTER)
    args.deepspeed = {**JSON, "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}
    with pytest.raises(zf.UserError, match=r"allgather_bucket_size is .auto., and the Trainer does not fill"):
        zf.hf.run_of(CONFIG, args, CLUSTER)
    with pytest.raises(zf.UserError, match="adafactor cannot be simulated"):
        zf.hf.run_of(CONFIG, arguments(tmp_path, optim="adafactor"), CLUSTER)
    with pytest.raises(zf.UserError, match="no-such-model"):
        zf.hf.run_of("no-such-model", arguments(tmp_path), CLUSTER)


def test_it_needs_what_the_same_run_needs(tmp_path, cache):
    args = arguments(tmp_path, deepspeed=json.loads(json.dumps(JSON)), bf16=True)
    found = zf.hf.simulate(CONFIG, args, CLUSTER, seq_len=LENGTH)
    (tmp_path / "config.json").write_text(CONFIG.to_json_string())
    zero = {"stage": 2, "reduce_bucket_size": CONFIG.hidden_size**2}
    run = zf.Run(
        model=str(tmp_path / "config.json"),
        ds_config={"zero_optimization": zero},
        micro_batch=2,
        gradient_accumulation_steps=2,
        seq_len=LENGTH,
        precision="bf16",
        weight_decay=0.0,  # the Trainer's default; else zerofit's matrices are a parameter group of their own
    )
    same = zf.simulate(run, CLUSTER)
    assert found.peak_bytes == same.peak_bytes


class Taker(TrainerCallback):
    """Takes host memory in the first step, and keeps it."""

    def on_step_begin(self, args, state, control, **_):
        self.taken = getattr(self, "taken", None) or b"\x01" * TAKEN


def test_callbacks_in_the_trainer(tmp_path):
    nan, hang = zf.hf.NanReport(stop=True), zf.hf.HangWatch(0.5)
    gc.collect()  # what other tests left in this process would hide what this training takes
    memory, ample = zf.hf.MemoryAgainstForecast(TAKEN // 2), zf.hf.MemoryAgainstForecast(10**13)
    callbacks = [Taker(), nan, hang, memory, ample, Sleeper(2.0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trainer(arguments(tmp_path), callbacks).train()
    words = [str(warning.message) for warning in caught]
    finding = json.loads((tmp_path / "nan-rank-0.json").read_text())
    assert POISONED in finding["indices"] and finding["loss"] == "nan" and result.global_step == finding["step"] + 1
    batch = torch.load(tmp_path / "nan-rank-0.pt")
    assert POISON in batch["input_ids"][finding["indices"].index(POISONED)]
    assert sum("the loss is nan" in word for word in words) == 1
    stacks = (tmp_path / "hang-rank-0.txt").read_text()
    assert "no step has ended" in stacks and "on_step_begin" in stacks and any("stacks of all" in w for w in words)
    assert 1.05 < memory.ratio < 10 and 0 < ample.ratio < 0.01
    assert [word for word in words if "than the forecast" in word] and sum("than the forecast" in w for w in words) == 1


def test_pages_of_files_are_no_memory_of_a_training(tmp_path):
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    memory, args = zf.hf.MemoryAgainstForecast(10**13), arguments(tmp_path)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert any(mapped[:: mmap.PAGESIZE])
        memory.on_step_end(args, TrainerState(), TrainerControl())
    assert memory.measured_bytes < library.stat().st_size / 4


def test_a_healthy_training_is_left_alone(tmp_path):
    nan, hang = zf.hf.NanReport(), zf.hf.HangWatch(60, folder=tmp_path)
    assert trainer(arguments(tmp_path, max_steps=2), [nan, hang], poisoned=False).train().global_step == 2
    assert nan.finding is None and hang.file is None and not list(tmp_path.glob("*-rank-*"))


def test_callbacks_on_ranks_under_deepspeed(tmp_path):
    """Two ranks with their own samples: the one that drew the poisoned sample first names it."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}  # else an op is compiled
    (tmp_path / "ds.json").write_text(json.dumps({**JSON, "optimizer": optimizer}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "tests.app.trainer_ranks", str(tmp_path), str(tmp_path / "ds.json")]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert kept == [{"measured": True, "hung": None}] * 2
    found = [json.loads(path.read_text()) for path in tmp_path.glob("nan-rank-*.json")]
    first = min(found, key=lambda one: one["micro_batch"])
    assert POISONED in first["indices"] and len(first["indices"]) == 2
