"""A start without torch's compiler: what need not be compiled runs, and whoever compiles gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

USED = """
import sys, torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from zerofit.models.without_dynamo import without_dynamo

x = torch.arange(6.0).reshape(2, 3)
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
    {inside}
boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
assert torchvision.ops.roi_align(x.reshape(1, 1, 2, 3), [boxes], 1).shape == (1, 1, 1, 1)
double = torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)
assert torch.equal(double(x), x * 2)
assert type(sys.modules["torch._dynamo"]).__name__ == "module"
assert torch._dynamo.utils.get_optimize_ddp_mode() == mode
torch._dynamo.trace_rules.clear_lru_cache()
"""
INSIDE = [
    "import transformers.models.llama.modeling_llama; assert 'torch._dynamo.eval_frame' not in sys.modules",
    "assert torch.equal(torch.compile(lambda t: t + 1, backend='eager')(x), x + 1)",
    "from torch._dynamo.utils import counters; assert len(counters) >= 0",
    "import torch._dynamo as dynamo; dynamo.reset()",
    "from torch._dynamo.utils import is_compile_supported; assert is_compile_supported('cpu') in (True, False)",
    "from torch._dynamo import config; assert config.cache_size_limit > 0",
]


@pytest.mark.versions
@pytest.mark.parametrize("inside", INSIDE)
def test_only_what_compiles_imports_it(inside):
    subprocess.run([sys.executable, "-c", USED.format(inside=inside)], check=True)
