"""Replace Mamba's kernels by functions that allocate and save the same tensors.

The functions (stand-ins) compute nothing. Training on GPUs uses these kernels. If the kernels' packages are missing,
transformers runs Mamba token by token. The stand-ins create the same tensors in the same order as
mamba_ssm/ops/selective_scan_interface.py (2.2) and csrc/selective_scan.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from zerofit.models.autograd import Context

# From csrc/selective_scan/selective_scan.cpp: n_chunks is the length / 2048, rounded up.
CHUNK = 2048  # tokens per state that the scan keeps
_INNER = ("transformers.models.mamba.modeling_mamba",)
_SCANS = (*_INNER, "transformers.models.falcon_mamba.modeling_falcon_mamba", "transformers.models.jamba.modeling_jamba")


# Only sizes and lifetimes of tensors matter here, not their values: memory is what a simulation measures. In the
# autograd functions below, each `empty` or `zeros` stands for a tensor that the CUDA kernels allocate.
@contextmanager
def mamba_kernels() -> Iterator[None]:
    """Make the imported Mamba modules of transformers use the stand-ins inside this context."""
    with ExitStack() as stack:
        for module, name, function in _replacements():
            stack.enter_context(patch.object(module, name, function))
        yield


def install_mamba_kernels() -> None:
    """Make transformers' Mamba modules use the stand-ins for the rest of this process."""
    for name in _SCANS:
        importlib.import_module(name)
    for module, name, function in _replacements():
        setattr(module, name, function)


def _replacements() -> list[tuple[ModuleType, str, Callable[..., object]]]:
    """Return (module, attribute, stand-in) for the modules that are already imported."""
    stand_ins: list[tuple[str, str, Callable[..., object]]] = [(name, "mamba_inner_fn", inner) for name in _INNER]
    stand_ins += [(name, "mamba_selective_scan", selective_scan) for name in _SCANS]
    return [
        (sys.modules[module], name, function)
        for module, name, function in stand_ins
        if hasattr(sys.modules.get(module), name)
    ]


def inner(xz: Tensor, *weights: Tensor | None, delta_bias: Tensor | None = None, **_: object) -> Tensor:
    """Replace mamba_inner_fn: convolution, scan, gate and output are one node of the graph.

    Maps (batch, 2 x dim, length) to (batch, length, hidden_size). `weights`: the weights of the convolution and of
    three projections, and A, B, C and D. B and C are None, since they depend on the input.
    """
    *projections, A, _B, _C, D = weights
    return _Inner.apply(xz, *projections, A, D, delta_bias)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    *matrices: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    return_last_state: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Replace selective_scan_fn. `matrices`: A (dim, states); B, C (batch, states, length)."""
    out, states = _Scan.apply(hidden_states, dt, *matrices, D, z, delta_bias)
    # As in SelectiveScanFn, the second number of each pair is the state after the last token.
    return (out, states[:, :, -1, 1::2]) if return_last_state else out


def _states(u: Tensor, A: Tensor) -> Tensor:
    """Return the states that the scan saves: two per chunk."""
    return torch.zeros(u.shape[0], u.shape[1], -(-u.shape[2] // CHUNK), 2 * A.shape[1], dtype=A.dtype, device=u.device)


def _last_dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scan_gradients(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of u, delta, A, B and C. Those of B and C are summed in float32."""
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)
    dB, dC = torch.zeros_like(B, dtype=torch.float32), torch.zeros_like(C, dtype=torch.float32)
    return du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype)


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)


class _Scan(torch.autograd.Function):
    """SelectiveScanFn. Saves its inputs, two states per chunk, and its output before the gate."""

    @staticmethod
    def forward(
        ctx: Context, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *optional: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        u, delta, B, C = (_last_dense(t) for t in (u, delta, B, C))
        D, z, bias = (t if t is None else _last_dense(t) for t in optional)
        out, states = torch.empty_like(delta), _states(u, A)
        gated = out if z is None else torch.empty_like(z)
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, states, out)
        ctx.mark_non_differentiable(states)
        return gated, states

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, D, z, bias, _, _ = ctx.saved_tensors
        _last_dense(grads[0])
        return (*_scan_gradients(u, delta, A, B, C), _like(D), None if z is None else torch.empty_like(z), _like(bias))


class _Inner(torch.autograd.Function):
    """MambaInnerFn. Saves its inputs, the projections and the scan's output."""

    @staticmethod
    def forward(ctx: Context, xz: Tensor, *tensors: Any) -> Tensor:
        _, _, x_proj, delta_proj, out_proj, out_bias, A, _, _ = tensors
        batch, _, length = xz.shape
        rank, states = delta_proj.shape[1], A.shape[1]
        xz = _last_dense(xz)
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        projected = functional.linear(convolved.transpose(1, 2).reshape(batch * length, -1), x_proj)
        delta = _delta(delta_proj, projected, batch)
        # (batch x length, states) becomes (batch, 1, states, length)
        columns = (projected[:, rank : rank + states], projected[:, -states:])
        B, C = (t.reshape(batch, -1, states).transpose(1, 2).unsqueeze(1).contiguous() for t in columns)
        out, scanned, gated = torch.empty_like(delta), _states(x, A), torch.empty_like(z)
        del convolved, delta
        ctx.save_for_backward(xz, projected, B, C, scanned, out, *tensors)
        return functional.linear(gated.transpose(1, 2), out_proj, out_bias)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        xz, projected, B, C, _, out, conv, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, D, bias = (
            ctx.saved_tensors
        )
        # As in mamba_ssm, forward does not save the convolution's result and delta: backward computes them again.
        batch, _, length = xz.shape
        rank, states = delta_proj.shape[1], A.shape[1]
        grad = _last_dense(grads[0])
        x, _ = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        delta = _delta(delta_proj, projected, batch)
        dxz = torch.empty_like(xz)
        flat = grad.permute(2, 0, 1).reshape(grad.shape[2], batch * length)
        dout = (out_proj.t() @ flat).reshape(-1, batch, length).permute(1, 0, 2)
        gated = torch.empty_like(out)
        du, ddelta, dA, dB, dC = _scan_gradients(convolved, delta, A, B, C)
        dD, dbias = _like(D), _like(bias)
        dout_proj = torch.einsum("eB,dB->ed", flat, _flat(gated))
        dout_bias = None if out_bias is None else grad.sum(dim=(0, 1))
        # the gradients of time steps, B and C fill one tensor, as their values are columns of one projection
        dprojected = torch.empty_like(projected)
        dprojected[:, rank : rank + states] = dB.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        dprojected[:, -states:] = dC.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        del dB, dC
        ddelta = _flat(ddelta)
        ddelta_proj = torch.einsum("dB,Br->dr", ddelta, projected[:, :rank])
        dprojected[:, :rank] = torch.einsum("dB,dr->Br", ddelta, delta_proj)
        du = _flat(du)
        dx_proj = torch.einsum("Br,Bd->rd", dprojected, convolved.transpose(1, 2).reshape(batch * length, -1))
        du.addmm_(x_proj.t(), dprojected.t())
        du = du.reshape(-1, batch, length).permute(1, 0, 2)
        du = _last_dense(du)
        del dout
        return dxz, _like(conv), _like(conv_bias), dx_proj, ddelta_proj, dout_proj, dout_bias, dA, dD, dbias


def _delta(delta_proj: Tensor, projected: Tensor, batch: int) -> Tensor:
    """Return the time steps (batch, dim, length), with dim outermost in memory."""
    steps = delta_proj @ projected[:, : delta_proj.shape[1]].t()
    return steps.reshape(steps.shape[0], batch, -1).permute(1, 0, 2)


def _flat(tensor: Tensor) -> Tensor:
    """Reshape (batch, dim, length) to (dim, batch x length), which may copy."""
    return tensor.permute(1, 0, 2).reshape(tensor.shape[1], -1)
