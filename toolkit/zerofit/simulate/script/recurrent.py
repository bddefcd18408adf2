"""Simulate recurrent layers as cuDNN runs them: one kernel for all steps, and a reserve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value, on_host

# Elements of cuDNN's reserve for each step, sample, layer and hidden unit. Between two layers it has one element more.
# The values follow from sizes that cuDNN returned for 4 layers of 320 units and 25,000 steps: 736,000,000 bytes of an
# LSTM are 4 * 5 + 3 elements, 864,000,000 bytes of a GRU are 4 * 6 + 3 elements
# (github.com/pytorch/pytorch/issues/2895). The value for a plain RNN is an upper bound.
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 2, "rnn_relu": 2}
_HOST_WORK = 10**9  # multiply-adds of a layer that is run to ask oneDNN for its workspace
_WORKSPACES = 2  # times the weights; 1.46 and 1.45 times in that issue


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """The recurrent layers that one call runs."""

    kind: str
    number: int  # of layers
    directions: int
    dropout: bool
    trains: bool
    dtype: torch.dtype  # of the kernel; autocast's, if it is on


class _RecurrentContext(Protocol):
    """What forward keeps for backward."""

    saved_tensors: tuple[Any, ...]  # tensors, and None for what a kind of layer lacks
    layers: _Layers

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Recurrent(torch.autograd.Function):
    """cuDNN's kernels for (steps, samples, width) or packed rows.

    (ATen/native/cudnn/RNN.cpp, _cudnn_rnn)
    """

    @staticmethod
    def forward(
        ctx: _RecurrentContext, layers: _Layers, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, hx = x.contiguous(), hx.contiguous()
        hidden = weights[1].shape[1]  # of the projection, if there is one
        units = (cx if cx is not None else hx).shape[-1]
        # autocast casts all weights into one tensor
        flat = None if weights[0].dtype == layers.dtype else torch.cat([w.flatten() for w in weights]).to(layers.dtype)
        out = x.new_empty((*x.shape[:-1], hidden * layers.directions))
        states = hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape)
        workspace = _workspace(layers, weights)
        rows = x.numel() // x.shape[-1]
        kept = _KEPT[layers.kind] * layers.number + (1 + layers.dropout) * (layers.number - 1)
        reserve = x.new_empty(rows * units * layers.directions * kept if layers.trains else 0)
        del workspace
        ctx.layers = layers
        ctx.save_for_backward(x, hx, cx, out, reserve, flat, *weights)
        return out, *states

    @staticmethod
    def backward(ctx: _RecurrentContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs. The gradients of all weights are parts of one tensor."""
        x, hx, cx, _, _, _, *weights = ctx.saved_tensors
        output = None if grads[0] is None else grads[0].contiguous()
        workspace = _workspace(ctx.layers, weights)
        of_x, of_states = x.new_empty(x.shape), [None if t is None else t.new_empty(t.shape) for t in (hx, cx)]
        flat = x.new_zeros(sum(w.numel() for w in weights))
        del workspace, output
        parts = [part.view(w.shape) for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
        return None, of_x, *of_states, *(part.to(w.dtype) for part, w in zip(parts, weights, strict=True))


def _workspace(layers: _Layers, weights: Sequence[Tensor]) -> Tensor:
    return weights[0].new_empty(_WORKSPACES * sum(w.numel() for w in weights), dtype=layers.dtype)


def host_layers() -> None:
    """Add the workspace that oneDNN keeps for an LSTM's backward on the host.

    torch's shape rule lacks it. (aten::mkldnn_rnn_layer)
    """
    op = torch.ops.aten.mkldnn_rnn_layer.default

    # of `rest`: [4] is the state, [9] the hidden size, and [-1] whether the layer trains
    def layer(mode: FakeTensorMode, func: OpOverload, x: Tensor, *rest: Any) -> object:
        size = _host_workspace(tuple(x.shape), rest[9], x.dtype) if rest[-1] else 0
        with mode:
            out, state = x.new_empty(*x.shape[:2], rest[9]), rest[4].shape
            return out, x.new_empty(state), x.new_empty(state), torch.empty(size, dtype=torch.uint8)

    fake_impls.op_implementations_dict[op] = layer
    replace_in(torch._VF, "_pack_padded_sequence", partial(_pack, torch._VF._pack_padded_sequence))


def _pack(
    original: Callable[..., tuple[Tensor, Tensor]], rows: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Pack fake rows of known lengths, which decide the shape. (torch._VF._pack_padded_sequence)"""
    known = known_value(lengths)
    if not isinstance(rows, FakeTensor) or known is None:
        return original(rows, lengths, batch_first)
    counts = [sum(length > step for length in known.tolist()) for step in range(int(known.max()))]
    samples, steps = rows.shape[:2] if batch_first else rows.shape[1::-1]
    places = [(step, sample) for step, count in enumerate(counts) for sample in range(count)]
    flat = [b * steps + t if batch_first else t * samples + b for t, b in places]
    with on_host():  # a CPU keeps no index
        index = torch.tensor(flat)
    return rows.reshape(-1, *rows.shape[2:]).index_select(0, index.to(rows.device)), torch.tensor(counts)


@cache
def _host_workspace(shape: tuple[int, int, int], hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes of oneDNN's workspace for one layer.

    Long sequences are extrapolated from two short ones: the workspace grows linearly with the steps.
    """
    steps, samples, width = shape
    layer = cast("Callable[..., tuple[Tensor, ...]]", torch.mkldnn_rnn_layer)
    with on_host(), torch.enable_grad():  # without gradients oneDNN keeps nothing
        weights = [torch.zeros(4 * hidden, n, dtype=dtype) for n in (width, hidden)]
        biases, states = torch.zeros(2, 4 * hidden, dtype=dtype), torch.zeros(2, samples, hidden, dtype=dtype)

        def of(number: int) -> int:
            x = torch.zeros(number, samples, width, dtype=dtype)
            kind = (False, [], 2, hidden, 1, True, False, False, True)  # an LSTM with biases, in training
            return layer(x, *weights, *biases, *states, *kind)[3].numel()

        most = max(4, _HOST_WORK // (8 * samples * hidden * (width + hidden)))
        return of(steps) if steps <= most else of(most) + (of(most) - of(2)) * (steps - most) // (most - 2)


def recurrent_layers(meter: ScriptTracker) -> None:
    """Make LSTM, GRU and RNN layers on the device allocate the tensors that cuDNN allocates.

    A layer's weights become parts of one tensor. torch's C++ code finds no CUDA device here, and would run the
    layers step by step. C++ code would also read the lengths of packed sequences, so packing is replaced too.
    (torch._VF.lstm, gru, rnn_tanh, rnn_relu; torch._VF._pack_padded_sequence; torch.nn.RNNBase.flatten_parameters)
    """

    # arguments: (x, states, weights, ...), or for packed rows (x, batch sizes, states, weights, ...)
    def layers(kind: str, original: Callable[..., object], x: Tensor, second: Any, third: Any, *rest: Any) -> object:
        if not isinstance(x, FakeTensor) or x.device.type == "cpu":
            return original(x, second, third, *rest)
        packed = isinstance(rest[0], list)  # then `second` has the number of samples of each step
        hx, weights, rest = (third, rest[0], rest[1:]) if packed else (second, third, rest)
        _, number, dropout, trains, both, *batch_first = rest
        first = bool(batch_first and batch_first[0])
        meter.note(f"cuDNN's {kind}: its workspace is an upper bound", bound=True)
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
        first_states, cells = hx if kind == "lstm" else (hx, None)
        states = first_states.to(dtype), None if cells is None else cells.to(dtype)
        described = _Layers(
            kind=kind, number=number, directions=1 + both, dropout=trains and dropout > 0, trains=trains, dtype=dtype
        )
        x = (x.transpose(0, 1) if first else x).to(dtype)
        out, *last = _Recurrent.apply(described, x, *states, *weights)
        return out.transpose(0, 1) if first else out, *(state for state in last if state is not None)

    def flatten_parameters(self: nn.RNNBase) -> None:
        weights = [w for w in self._flat_weights if isinstance(w, FakeTensor) and w.device.type != "cpu"]
        alike = len({w.dtype for w in weights}) == 1 and len({w.data_ptr() for w in weights}) == len(weights)
        if len(weights) == len(self._flat_weights_names) and alike:
            flat = weights[0].data.new_empty(sum(w.numel() for w in weights))
            for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
                weight.data = part.view(weight.shape)

    for kind in _KEPT:
        replace_in(torch._VF, kind, partial(layers, kind, getattr(torch._VF, kind)))
    replace_in(nn.RNNBase, "flatten_parameters", flatten_parameters)
    replace_in(torch._VF, "_pack_padded_sequence", partial(_pack, torch._VF._pack_padded_sequence))
