"""Phases of scripts without an engine, and what divides their work."""

from __future__ import annotations

import pytest

from tests.simulate.script.scripts import facts, simulated
from zerofit.cli.simulate_show import _facts

# torchtitan's way: the head runs chunk by chunk, each with its backward, and the rest of the model follows
CHUNKED = """\
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 1000)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)

mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp_shard",))
net = Net().cuda()
WRAP
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(50):
    for _ in range(2):
        hidden = net(torch.randn(32, 64, device="cuda"))
        leaf = hidden.detach().requires_grad_()
        for rows in leaf.chunk(4):
            net.head(rows).square().mean().backward()
        hidden.backward(leaf.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
SHARDED = {
    "fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))": "FSDP2 (dp_shard 2)",
    "from torch.distributed.fsdp import FullyShardedDataParallel as F; net.body = F(net.body)": "FSDP",
    "net.body = DistributedDataParallel(net.body)": "DDP",
    "": "",
}


@pytest.mark.parametrize("wrap", SHARDED)
def test_chunks_of_a_loss_are_one_backward(folder, wrap):
    result = simulated(CHUNKED.replace("WRAP", wrap), "torchrun --nproc_per_node 2 train.py")
    assert [p.name for p in result.phases if p.step >= 0] == 2 * ["forward", "backward", "step"]
    seen = facts(result).facts
    assert seen.accumulation == 2 and seen.sharding == SHARDED[wrap]
    assert seen.precision == ("bf16" if "bfloat16" in wrap else "fp32")
    said = dict(_facts(result))["run"]
    assert "ZeRO" not in said and said.endswith(f"rank 0 of 2{wrap and f', {SHARDED[wrap]}'}")
