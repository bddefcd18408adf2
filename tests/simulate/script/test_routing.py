"""Mixtures that route tokens by values on the device, compared with steps whose routing is written out."""

from __future__ import annotations

import pytest

from tests.simulate.script.scripts import facts, refused, simulated

MIXTURE = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
EXPERTS, CHOSEN, TOKENS, WIDTH = 8, 2, 4096, 256

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        own = EXPERTS // dist.get_world_size()
        expert = lambda: nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))
        self.experts = nn.ModuleList(expert() for _ in range(own))

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        # written out: equal shares or, in the last step, the first experts for all tokens
        numbers = torch.arange(TOKENS * CHOSEN, device="cuda").view(TOKENS, CHOSEN)
        written = numbers % (CHOSEN if step == 3 else EXPERTS)
        chosen = chosen if step == 1 else written
        taken = nn.functional.one_hot(chosen, EXPERTS).sum(dim=(0, 1))
        order = chosen.reshape(-1).argsort()
        received = torch.empty_like(taken)
        dist.all_to_all_single(received, taken)
        ranks = dist.get_world_size()
        sent, got = (counts.view(ranks, -1).sum(1).tolist() for counts in (taken, received))
        rows = x[order // CHOSEN]
        mine = x.new_empty((sum(got), WIDTH))
        dist.all_to_all_single(mine, rows.detach(), got, sent)
        parts = mine.split(received.view(ranks, -1).sum(0).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return out.square().mean() + scores.sum()

net = Mixture().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    net(torch.randn(TOKENS, WIDTH, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("folder")
def test_equal_shares_and_the_worst_routing():
    found = simulated(MIXTURE, "torchrun --nproc_per_node 2 train.py", steps=4)
    seen, worst = facts(found), facts(found).worst_routing
    peaks = {step: [phase.peak_bytes for phase in found.phases if phase.step == step] for step in range(4)}
    assert len(peaks[1]) == 3 and peaks[1] == peaks[2]
    assert worst and worst.fits and found.peak_bytes == worst.peak_bytes == max(peaks[3]) > 1.5 * max(peaks[1])
    assert seen.to_dict()["worst_routing"]["peak_bytes"] == worst.peak_bytes
    assert any(note.text.startswith("the router's choice of experts is unknown") for note in seen.facts.notes)


MASKS = """\
import sys, torch
from torch import nn

EXPERTS, CHOSEN, TOKENS, WIDTH = 128, 8, 16384, 64

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        if sys.argv[1] == "map":
            taken = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device=x.device).scatter_(-1, chosen, True)
        else:
            taken = nn.functional.one_hot(chosen, EXPERTS).amax(1) > 0
        counts, equal = taken.sum(0), [TOKENS * CHOSEN // EXPERTS] * EXPERTS
        counts = counts.tolist() if sys.argv[2] == "read" else equal
        parts = x[chosen.view(-1).argsort() // CHOSEN].split(counts)
        out = torch.cat([part @ weight for part, weight in zip(parts, self.experts)])
        ends = torch.tensor([len(part) for part in parts], device="cuda").cumsum(0, dtype=torch.int32)
        grouped = nn.functional.grouped_mm(torch.cat(parts), self.experts, offs=ends)  # of fp32, also under autocast
        return out.sum() + grouped.sum() + scores.sum()

net = Mixture().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    net(torch.randn(TOKENS, WIDTH, device="cuda")).backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", ["map", "one_hot"])
def test_masks_of_choices_with_millions_of_elements(kind):
    """A map has 2 million elements and a one-hot mask 17 million."""
    read, written = (simulated(MASKS, f"python train.py {kind} {how}", gpus=1) for how in ("read", "written"))
    assert read.peak_bytes == written.peak_bytes and not facts(read).is_upper_bound


LEAF = """\
import deepspeed, torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

net = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64))
set_z3_leaf_modules(net[0], [nn.Sequential])
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
engine.backward(engine(torch.randn(4, 64).to(engine.device)).square().mean())
"""


@pytest.mark.usefixtures("folder")
def test_a_leaf_module_of_zero_3_whose_inputs_need_no_gradient():
    """Real ranks of DeepSpeed 0.19.8 fail in the same backward, and train if the inputs require a gradient."""
    problem = refused(LEAF)
    assert "aten::add_" in problem.message and "SystemError" not in problem.message and problem.where == "train.py:9"
    assert "call x.requires_grad_() on these inputs" in problem.hint
