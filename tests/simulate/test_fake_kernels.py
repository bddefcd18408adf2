"""Which attention a device takes, by what is kept of it; shapes against torch's own attention on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.simulate.fake_kernels import as_on


class Ops(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention(device, query, key, value, **more):
    with as_on(device), Ops() as ops:
        out = functional.scaled_dot_product_attention(query, key, value, **more)
    return tuple(out.shape), ops.names


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("width", "value_width", "dtype", "kernel"),  # sdp_utils.cpp: check_head_dim_size_flash and its like
    [
        (64, 64, torch.bfloat16, FLASH),
        (192, 128, torch.bfloat16, EFFICIENT),  # multi-head latent attention
        (288, 288, torch.bfloat16, EFFICIENT),
        (64, 64, torch.float32, EFFICIENT),
    ],
)
def test_attention_of_a_gpu(width, value_width, dtype, kernel):
    query, key = (torch.empty(2, 4, 16, width, dtype=dtype, device="meta") for _ in range(2))
    value = torch.empty(2, 4, 16, value_width, dtype=dtype, device="meta")
    shape, names = attention("cuda", query, key, value, is_causal=True)
    assert shape == (2, 4, 16, value_width) and kernel in names


def test_attention_of_a_cpu_is_torchs():
    query, key, value = torch.zeros(1, 2, 8, 48), torch.zeros(1, 2, 8, 48), torch.zeros(1, 2, 8, 32)
    for values, kernel in ((value, False), (key, True)):
        real, names = functional.scaled_dot_product_attention(query, key, values), set()
        with Ops() as ops:
            functional.scaled_dot_product_attention(query, key, values)
        shape, names = attention("cpu", *(t.to("meta") for t in (query, key, values)))
        assert shape == tuple(real.shape)
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        assert (flash in names) == kernel == (flash in ops.names)
