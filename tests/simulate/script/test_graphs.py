"""CUDA graphs, and what a library compiles."""

from __future__ import annotations

from tests.simulate.script.scripts import facts, simulated
from zerofit.spec.overhead import CUBLAS_HOPPER_BYTES

GRAPH = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
x = torch.randn(4096, 512, device="cuda")
net(x).square().mean().backward()
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
pool = torch.cuda.graph_pool_handle()
taken = []
for _ in range(2):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
        out = net(x)
    taken.append((graph, out))
    # two activations of 4096 x 2048 were there at once, later one and the output; the second graph has the same pool
    used = (2 * 2048 + (len(taken) - 1) * 512) * 4096 * 4 + CUBLAS
    assert torch.cuda.memory_allocated() - before == used
for _ in range(50):
    graph.replay()
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# as torch's docs capture a step: warm-up on a side stream, then everything in one graph
WHOLE_STEP = """\
import torch
from torch import nn

net = nn.Linear(512, 2048).cuda()
optimizer = torch.optim.AdamW(net.parameters(), capturable=True)
x = torch.randn(64, 512, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        net(x).square().mean().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    net(x).square().mean().backward()
    optimizer.step()
for step in range(50):
    x.copy_(torch.randn(64, 512))
    graph.replay()
    assert step < 2
"""
# transformers and torchtitan compile attention themselves, whatever the script compiles
ATTENTION = """\
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

library = "attend, masked = torch.compile(flex.flex_attention), torch.compile(flex.create_block_mask)"
exec(compile(library, "<library>", "exec"))
net = nn.Linear(16, 48).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(50):
    mask = masked(lambda b, h, q, k: q >= k, 16, None, 4096, 4096, device="cuda")
    x = net(torch.randn(16, 4096, 16, device="cuda"))
    q, k, v = (t.unflatten(-1, (1, 16)).transpose(1, 2) for t in x.chunk(3, -1))
    attend(q, k, v, block_mask=mask).square().mean().backward()
    assert torch.cuda.max_memory_allocated() < 16 * 4096 * 4096  # a mask of one byte for each pair of tokens
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_pool_of_a_graph_keeps_what_its_ops_used(folder):
    result = simulated(GRAPH.replace("CUBLAS", str(CUBLAS_HOPPER_BYTES)), gpus=1)
    kept = (2 * 2048 - 512) * 4096 * 4
    assert result.breakdown["workspaces"] == kept + 3 * CUBLAS_HOPPER_BYTES  # of both threads and the graphs' stream
    assert any(note.text.startswith("CUDA graph: captured") and note.count == 2 for note in facts(result).facts.notes)


def test_a_script_stops_after_replays_not_while_it_warms_up(folder):
    result = simulated(WHOLE_STEP, gpus=1)
    assert any(note.text.startswith("CUDA graph: captured") for note in facts(result).facts.notes)
    assert facts(result).facts.accumulation == 1
    assert result.breakdown["gradients"] == (512 + 1) * 2048 * 4  # in the pool: replays write into the same gradients


def test_attention_that_a_library_compiles_stores_no_scores(folder):
    assert not facts(simulated(ATTENTION, gpus=1)).is_upper_bound
