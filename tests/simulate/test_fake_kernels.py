"""Which attention a device takes, by what is kept of it; shapes against torch's own attention on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.simulate.fakes.kernels import as_on, fused_norms


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


def test_rms_norm_is_one_kernel_on_a_gpu_only():
    x, weight = torch.empty(2, 8, device="meta"), torch.empty(8, device="meta")
    names = {}
    for device in ("cuda", "cpu"):
        with as_on(device), Ops() as ops:
            functional.rms_norm(x, (8,), weight)
        names[device] = ops.names
    assert names["cuda"] == {"_fused_rms_norm"}
    assert "_fused_rms_norm" not in names["cpu"]


def test_the_fused_norm_gives_the_real_values_of_real_tensors():
    """In a simulated script, tensors on the host are real."""
    x, weight = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.randn(8, dtype=torch.float64)
    expected = functional.rms_norm(x, (8,), weight)
    library = fused_norms("CPU")
    try:
        found = functional.rms_norm(x, (8,), weight)
        assert "FusedRmsNorm" in type(found.grad_fn).__name__
        torch.testing.assert_close(found, expected)
    finally:
        library._destroy()
    assert "FusedRmsNorm" not in type(functional.rms_norm(x, (8,), weight).grad_fn).__name__


FLASH_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("key_heads", "value_width", "kernel"),
    [(2, 32, False), (2, 48, True), (1, 48, None)],  # keys of one head are broadcast, as Falcon's are
)
def test_attention_of_a_cpu_is_torchs(key_heads, value_width, kernel):
    query, key, value = (
        torch.zeros(1, *shape) for shape in ((2, 8, 48), (key_heads, 8, 48), (key_heads, 8, value_width))
    )
    with Ops() as ops:
        real = functional.scaled_dot_product_attention(query, key, value)
    shape, names = attention("cpu", *(t.to("meta") for t in (query, key, value)))
    assert shape == tuple(real.shape)
    if kernel is None:  # new in torch 2.14
        kernel = TorchVersion(torch.__version__) >= "2.14"
    assert (FLASH_FOR_CPU in names) == kernel == (FLASH_FOR_CPU in ops.names)


def test_keys_of_one_head_have_no_kernel_on_a_gpu():
    query, key = (torch.empty(1, heads, 8, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 1))
    shape, names = attention("cuda", query, key, key)
    assert shape == (1, 4, 8, 64) and not {FLASH, EFFICIENT} & names


HALF, DOUBLE = torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("shape", "dtype", "more", "kernel"),  # sdp_utils.cpp: can_use_flash_attention, can_use_mem_efficient_attention
    [
        ((4, 16, 64), HALF, {}, None),
        ((2, 2, 4, 16, 64), HALF, {}, None),
        ((2, 4, 16, 64), DOUBLE, {}, None),
        ((2, 4, 16, 10), torch.float32, {}, None),  # rows of 40 bytes
        ((2, 4, 16, 12), torch.float32, {}, EFFICIENT),
        ((2, 4, 16, 10), HALF, {}, FLASH),
        ((2, 4, 8, 64), HALF, {"is_causal": True}, EFFICIENT),  # fewer queries than keys
    ],
)
def test_attention_of_a_gpu_in_unusual_shapes(shape, dtype, more, kernel):
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(*shape[:-2], 16, shape[-1], dtype=dtype, device="meta")
    found, names = attention("cuda", query, key, key, **more)
    assert found == shape and {FLASH, EFFICIENT} & names == ({kernel} if kernel else set())


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        (SDPBackend.MATH, None),
        (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT),
        (SDPBackend.FLASH_ATTENTION, FLASH),
        (SDPBackend.CUDNN_ATTENTION, FLASH),  # which needs as much memory
    ],
)
def test_a_script_chooses_the_kernel(backend, kernel):
    query = torch.empty(2, 4, 16, 64, dtype=HALF, device="meta")
    with sdpa_kernel(backend):
        _, names = attention("cuda", query, query, query)
    assert {FLASH, EFFICIENT} & names == ({kernel} if kernel else set())


def test_without_a_kernel_attention_stops():
    query = torch.empty(2, 4, 16, 64, device="meta")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        attention("cuda", query, query, query)
