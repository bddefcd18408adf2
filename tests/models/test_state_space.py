"""Mamba's kernels that are not there: the same shapes and gradients as the scan token by token, and what they keep."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from zerofit.models.state_space import mamba_kernels

BATCH, LENGTH, WIDTH, INNER, STATES, RANK = 2, 24, 16, 32, 4, 3
pytestmark = pytest.mark.versions


def mixer() -> MambaMixer:
    config = MambaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, state_size=STATES, time_step_rank=RANK, num_hidden_layers=1
    )
    return MambaMixer(config, 0).train()


def test_shapes_are_those_of_the_scan_token_by_token():
    model = mixer()
    expected = model(torch.randn(BATCH, LENGTH, WIDTH))
    with mamba_kernels():
        x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        out = model(x)
        out.sum().backward()
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_bytes_that_are_kept_by_hand():
    """MambaInnerFn keeps what enters it, one projection, B and C, the chunk's states and the scan's output."""
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(), mamba_kernels():
        model, x = mixer(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(x)
        kept.pop(out.untyped_storage()._cdata, None)
    tokens = BATCH * LENGTH
    both_halves, projected, out_of_scan = 2 * INNER * tokens, (RANK + 2 * STATES) * tokens, INNER * tokens
    b_and_c, states = 2 * STATES * tokens, BATCH * INNER * 2 * STATES
    expected = WIDTH * tokens + both_halves + projected + b_and_c + states + out_of_scan
    of_a = 2 * INNER * STATES  # -exp(A_log), and exp(A_log) for its gradient
    saved_weights = weights - 4 * INNER * STATES  # A_log is not kept by the scan
    assert sum(kept.values()) - saved_weights == 4 * (expected + of_a)
