"""Which attention a device takes, by what is kept of it; shapes against torch's own attention on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
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


HALF, DOUBLE = torch.bfloat16, torch.float64
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


@pytest.mark.versions(of="torch")
def test_keys_of_one_head_are_broadcast_on_a_gpu():
    """sdp_utils_cpp.h, check_batch_size_and_num_heads_dense: `supports_mqa` is new in torch 2.14."""
    query, key = (torch.empty(1, heads, 8, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 1))
    mask = torch.empty(8, 8, dtype=torch.bool, device="meta")
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    supported = "supports_mqa" in header.read_text()
    for kernel, more in ((FLASH, {}), (EFFICIENT, {"attn_mask": mask})):
        shape, names = attention("cuda", query, key, key, **more)
        assert shape == (1, 4, 8, 64) and {FLASH, EFFICIENT} & names == ({kernel} if supported else set())


def saved_bytes(device, query, key, *, mask=None):
    """Bytes that attention saves for backward, without its output and its inputs."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    query.requires_grad_()
    with as_on(device) if device else nullcontext(), saved_tensors_hooks(pack, lambda tensor: tensor):
        out = functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    for given in (query, key, out):
        kept.pop(given.untyped_storage()._cdata, None)
    return sum(kept.values())


def test_a_bool_mask_is_saved_as_numbers_as_by_torch():
    query, key = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 24, 16)
    mask = torch.ones(2, 1, 8, 24, dtype=torch.bool)
    real = saved_bytes(None, query, key, mask=mask)
    assert real >= 4 * mask.numel()
    assert saved_bytes("cpu", *(t.detach().to("meta") for t in (query, key)), mask=mask.to("meta")) == real


@pytest.mark.parametrize(
    ("width", "keys", "masked", "kept"),  # attention.cpp: convert_boolean_attn_mask, preprocess_mask, pad_last_dim
    [
        (16, 24, True, 2 * 2 * 8 * 24),
        (16, 20, True, 2 * 2 * 8 * 24),  # rows of the mask begin at multiples of 8 elements
        (16, 24, False, 0),
        (12, 24, False, 2 * 2 * 4 * (8 + 24 + 24) * 16),  # query, key and value of a width of 16
    ],
)
def test_what_a_gpus_attention_saves_besides_its_inputs(width, keys, masked, kept):
    query, key = (torch.empty(2, 4, length, width, dtype=HALF, device="meta") for length in (8, keys))
    mask = torch.ones(2, 1, 8, keys, dtype=torch.bool, device="meta") if masked else None
    # the logarithms of sums (the memory-efficient kernel pads their rows), and the state of the random numbers
    always = 4 * 2 * 4 * 32 + 16 if masked else 4 * 2 * 4 * 8 + 24
    assert saved_bytes("cuda", query, key, mask=mask) == kept + always


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


@pytest.mark.parametrize(("capability", "kernel"), [((8, 0), set()), ((9, 0), {FLASH}), ((10, 3), {FLASH})])
def test_cudnn_comes_before_plain_matmuls_on_hopper_and_blackwell(monkeypatch, capability, kernel):
    """sdp_utils.cpp, check_prefer_cudnn_attention and priority_order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    query = torch.empty(2, 4, 16, 64, dtype=HALF, device="meta")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        _, names = attention("cuda", query, query, query)
    assert {FLASH, EFFICIENT} & names == kernel


def test_without_a_kernel_attention_stops():
    query = torch.empty(2, 4, 16, 64, device="meta")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        attention("cuda", query, query, query)
