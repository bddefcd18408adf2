"""Phases of scripts without an engine, and what divides their work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulate.script.scripts import facts, refused, simulated
from zerofit.cli.simulate_show import _facts, _script_settings
from zerofit.spec.overhead import CUBLAS_HOPPER_BYTES

# torchtitan's way: the head runs chunk by chunk, each with its backward, and the rest of the model follows
CHUNKED = """\
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 1000)

    def forward(self, x, method):  # `method` is also a name in zerofit's wrappers
        return checkpoint(self.body, x, use_reentrant=False)

mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp_shard",))
net = Net().cuda()
WRAP
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(50):
    for _ in range(2):
        hidden = net(torch.randn(32, 64, device="cuda"), method="sum")
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


# optimizers that step as soon as a gradient is complete, layers inside torch.func, and errors of hooks
IN_BACKWARD = """\
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).cuda()
optimizers = {p: torch.optim.Adam([p]) for p in net.parameters()}

def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in optimizers:
    p.register_post_accumulate_grad_hook(update)
for _ in range(50):
    net(torch.randn(8, 64, device="cuda")).square().mean().backward()
"""
BY_SAMPLE = """\
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

net = nn.Linear(64, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for half in (torch.float32, torch.bfloat16):  # rows of different lengths, in one jagged tensor
    rows = [torch.randn(n, 64, dtype=half) for n in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda", requires_grad=True)
    heads = x.unflatten(-1, [4, 16]).transpose(1, 2)
    made = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)
    assert net(made.float()).values().shape == (8, 4) and made.offsets().tolist() == [0, 3, 8]
    made.values().sum().backward()
    assert x.grad.values().shape == (8, 64) and x.grad.device.type == "cuda"
copied = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged).to("cuda")
assert [t.tolist() for t in copied.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4]]
loss = lambda values, x: functional_call(net, values, (x,)).square().mean()
for _ in range(50):
    values = {name: p.detach() for name, p in net.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0))(values, torch.randn(8, 64, device="cuda"))
    for name, p in net.named_parameters():
        p.grad = found[name].mean(0)
    optimizer.step()
"""
BROKEN = """\
import torch

net = torch.nn.Linear(64, 64).cuda()
net.weight.register_hook(lambda gradient: [][1])
net(torch.randn(8, 64, device="cuda")).sum().backward()
"""


def test_an_optimizer_that_steps_in_backward_frees_each_gradient(folder):
    result = simulated(IN_BACKWARD)
    assert [p.name for p in result.phases if p.step >= 0] == 2 * ["forward", "backward"]
    seen, layer = facts(result).facts, 4 * 65 * 64
    assert seen.optimizer == "Adam" and seen.accumulation == 1
    # weights and two moments of three layers, the loss, and a workspace of each of two threads; no gradient
    assert result.phases[-1].end_bytes == 9 * layer + 4 + 2 * CUBLAS_HOPPER_BYTES


def test_layers_inside_torch_func_and_jagged_tensors(folder):
    seen = facts(simulated(BY_SAMPLE)).facts
    assert seen.parameters == 65 * 4 and seen.model == "Linear"


# a model for each trial; the last one is what the answer describes
TRIALS = """\
import copy
import torch

base = torch.nn.Linear(1024, 1024, bias=False)

def trial(rate):
    net = torch.nn.Linear(1024, 1024, bias=False, device="cuda") if rate > 0.01 else copy.deepcopy(base).cuda()
    optimizer = torch.optim.Adam(net.parameters(), rate)
    net(torch.randn(1, 1024, device="cuda")).sum().backward()
    optimizer.step()

for rate in (0.1, 0.03, 0.01, 0.003, 0.001):
    trial(rate)
"""


def test_a_model_that_the_script_has_released_is_free_memory(folder):
    result = simulated(TRIALS)
    seen, weights = facts(result).facts, 4 * 1024**2
    assert seen.ended == "ended by itself" and (seen.parameters, seen.optimizer) == (1024**2, "Adam")
    # and if the last one is released, too
    none = replace(seen, parameters=0, trained_parameters=0, optimizer="")
    assert _script_settings(replace(facts(result), facts=none)).split(", ")[:2] == ["fp32", "micro batch 1"]
    assert not _script_settings(replace(facts(result), facts=none)).endswith(", ")
    # weights, gradients, two moments, Adam's update, and a workspace of each of two threads
    steps = [phase.peak_bytes for phase in result.phases if phase.name == "step"]
    assert steps == 2 * [5 * weights + 2 * CUBLAS_HOPPER_BYTES]  # the first trial's, and the others'


def test_an_error_of_a_hook_is_the_scripts_error(folder):
    problem = refused(BROKEN)
    assert "IndexError: list index out of range" in problem.message and problem.where == "train.py:4"


# Lightning Fabric's way: the script steps the engine's optimizer, not the engine
DIRECT = """\
import deepspeed
import torch

class Net(torch.nn.Linear):
    def forward(self, x, method):
        return super().forward(x)

net = Net(64, 64)
config = {"train_micro_batch_size_per_gpu": MICRO, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW"}}
engine, optimizer, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(50):
    engine.backward(engine(torch.randn(8, 64, device=engine.device, dtype=torch.bfloat16), method="sum").sum())
    STEP
"""


def test_a_step_of_an_engines_optimizer_is_one_of_the_engine(folder):
    """Fabric writes a micro batch of 1 into the engine's JSON, whatever its loader has."""
    by_engine, direct = (
        simulated(DIRECT.replace("STEP", step).replace("MICRO", micro))
        for step, micro in (("engine.step()", "8"), ("optimizer.step(); optimizer.zero_grad()", "1"))
    )
    assert facts(by_engine).facts.micro_batch == facts(direct).facts.micro_batch == 8
    assert [p.name for p in direct.phases if p.step >= 0] == 2 * ["forward", "backward", "step"]
    assert [p.name for p in by_engine.phases] == [p.name for p in direct.phases]
    assert [p.peak_bytes for p in by_engine.phases] == [p.peak_bytes for p in direct.phases]
