"""A start without torch's compiler: what need not be compiled runs, and whoever compiles gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

# each case in a process of its own, forked from one that has imported torch
USED = """
import os, sys, torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from zerofit.models.without_dynamo import without_dynamo

x = torch.arange(6.0).reshape(2, 3)

def use(inside):
    with without_dynamo():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert nn.Linear(3, 4)(torch.empty(2, 3)).flatten().shape == (8,)
        with FlopCounterMode(display=False) as counter:
            torch.mm(x, x.T)
        assert counter.get_total_flops() == 2 * 2 * 3 * 2
        weight = nn.Parameter(x.clone())
        weight.grad = torch.ones_like(x)
        torch.optim.SGD([weight], lr=0.5).step()
        assert torch.equal(weight.data, x - 0.5)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        nn.parallel.DistributedDataParallel(nn.Linear(3, 1))(x).sum().backward()
        mode = torch._dynamo.utils.get_optimize_ddp_mode()
        import torchvision.ops
        with without_dynamo():
            pass
        assert "torch._dynamo.eval_frame" not in sys.modules
        exec(inside)
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    assert torchvision.ops.roi_align(x.reshape(1, 1, 2, 3), [boxes], 1).shape == (1, 1, 1, 1)
    double = torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)
    assert torch.equal(double(x), x * 2)
    assert type(sys.modules["torch._dynamo"]).__name__ == "module"
    assert torch._dynamo.utils.get_optimize_ddp_mode() == mode
    torch._dynamo.trace_rules.clear_lru_cache()

for inside in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        use(inside)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, inside
"""
INSIDE = [
    "assert torch.equal(torch.compile(lambda t: t + 1, backend='eager')(x), x + 1)",
    "from torch._dynamo.utils import counters; assert len(counters) >= 0",
    "import torch._dynamo as dynamo; dynamo.reset()",
    "from torch._dynamo import config; assert config.cache_size_limit > 0",
]


@pytest.mark.versions(of="torch")
def test_only_what_compiles_imports_it():
    subprocess.run([sys.executable, "-c", USED, *INSIDE], check=True)


@pytest.mark.versions
def test_transformers_does_not_import_it():
    inside = "import transformers.models.llama.modeling_llama; assert 'torch._dynamo.eval_frame' not in sys.modules"
    subprocess.run([sys.executable, "-c", USED, inside], check=True)
