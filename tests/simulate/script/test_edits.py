"""Changes of a script's own lines: each needs what the script needs after its user has made the change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.simulate.script.scripts import facts, only, simulated
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.script.command import SHARDED as FSDP2
from zerofit.simulate.script.command import ScriptTarget, read_command
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem

PLAIN = """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

torch.distributed.init_process_group("nccl")
model = Net().cuda()
wrapped = DDP(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
for (x,) in DataLoader(TensorDataset(torch.randn(64, 256, 256)), batch_size=16):
    wrapped(x.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TWO = "torchrun --nproc_per_node 2 train.py"
RECOMPUTED = "for block in model.blocks:\n    block.forward = partial(checkpoint, block.forward, use_reentrant=False)\n"
SHARDED = "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)\nwrapped = model\n"
IMPORTS = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
"""
LATE = "wrapped = DDP(model)\nfor (x,)"
SECOND = "    if n % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n"
BY_HAND = {  # words of a change -> what its user replaces
    "half the": {
        "for (x,) in DataLoader": "for n, (x,) in enumerate(DataLoader",
        "batch_size=16)": "batch_size=8))",
        "    optimizer.step()\n    optimizer.zero_grad()\n": SECOND,
    },
    "Zero": {
        "AdamW(wrapped.parameters()": "AdamW, lr=1e-3)#",
        "torch.optim.": "Zero(wrapped.parameters(), torch.optim.",
    },
    "checkpoint fully_shard": {"wrapped = DDP(model)\n": SHARDED + RECOMPUTED},
}
ACCELERATED = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(mixed_precision="bf16")
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=256)
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader([torch.zeros(64).long()] * 64, batch_size=8))
for batch in rows:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def by_hand(change: str) -> str:
    text = PLAIN
    for old, new in BY_HAND[change].items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return IMPORTS + text.replace("Zero(", "ZeroRedundancyOptimizer(")


@pytest.mark.slow
def test_changes_of_a_plain_loop_need_what_the_changed_script_needs(folder, monkeypatch):
    only(monkeypatch, "half", "checkpoint", "Zero", "fully_shard")
    result = simulated(PLAIN, TWO)
    seen = facts(result).facts
    assert (seen.blocks, seen.block, seen.sharding) == ("blocks", "Block", "DDP")
    rows = result.knobs()
    assert len(rows) == len(BY_HAND) + 2  # to recompute or to shard alone
    assert all(row.peak_bytes < result.peak_bytes and row.slowdown is not None for row in rows), rows
    for change in BY_HAND:
        words = change.split()
        row = min((row for row in rows if all(word in row.change for word in words)), key=lambda row: len(row.change))
        changed = simulated(by_hand(change), TWO)
        assert (row.peak_bytes, row.reserved_bytes) == (changed.peak_bytes, changed.reserved_bytes), row.change


def test_an_optimizer_from_before_the_sharding_is_not_simulated(folder):
    """fully_shard replaces parameters, so such a script would train nothing."""
    early = PLAIN.replace("wrapped = DDP(model)\n", "").replace("(wrapped.", "(model.").replace("for (x,)", LATE)
    Path("train.py").write_text(early)
    cluster = Cluster("h100-80gb", gpus=2)
    target = ScriptTarget(command=read_command(TWO.split()), device=cluster.device, gpus=2, nodes=1, edits=(FSDP2,))
    (problem,) = simulate_all([target], lambda text: None)
    assert isinstance(problem, Problem) and "before fully_shard" in problem.message


def test_files_for_accelerate_are_those_that_were_simulated(folder, monkeypatch):
    only(monkeypatch, "fsdp2.yaml", "zero2.yaml")
    result = simulated(ACCELERATED, "accelerate launch --multi_gpu --num_processes 2 train.py")
    rows = {row.change: row for row in result.knobs()}
    for name in ("fsdp2.yaml", "zero2.yaml"):
        row = rows[f"accelerate launch --config_file {name}"]
        Path(name).write_text(yaml.safe_dump(row.file))
        changed = simulated(ACCELERATED, f"accelerate launch --config_file {name} train.py")
        assert (row.peak_bytes, row.reserved_bytes) == (changed.peak_bytes, changed.reserved_bytes)
        assert row.peak_bytes != result.peak_bytes
    file = rows["accelerate launch --config_file fsdp2.yaml"].file
    assert file and file["fsdp_config"]["fsdp_version"] == 2
    assert "accelerate launch --config_file fsdp2.yaml and model.gradient_checkpointing_enable()" in rows
