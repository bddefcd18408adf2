"""Define what GPU kernels return and keep if torch has no shape rule for them.

Scripts call these kernels. cuDNN runs all steps of a recurrent layer in one kernel, and keeps a reserve.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers.utils
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.attention import _registry
from torch.nn.functional import pad
from torch.nn.modules._functions import SyncBatchNorm

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value, on_host

_ROWS = 128  # flash_attn's backward rounds lengths to a multiple of this
_NARROW, _WIDE = 32, 64  # and widths of heads to these, up to 128 and above
# Elements of cuDNN's reserve for each step, sample, layer and hidden unit. Between two layers it has one element more.
# The values follow from sizes that cuDNN returned for 4 layers of 320 units and 25,000 steps: 736,000,000 bytes of an
# LSTM are 4 * 5 + 3 elements, 864,000,000 bytes of a GRU are 4 * 6 + 3 elements
# (github.com/pytorch/pytorch/issues/2895). The value for a plain RNN is an upper bound.
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 2, "rnn_relu": 2}
_HOST_WORK = 10**9  # multiply-adds of a layer that is run to ask oneDNN for its workspace
_WORKSPACES = 2  # times the weights; 1.46 and 1.45 times in that issue


def _set_rule(outputs: Callable[..., object], *ops: OpOverload) -> None:
    """Set the shape rule of ops. `outputs` gets an op's arguments, and allocates what the op returns."""

    def rule(mode: FakeTensorMode, _: OpOverload, *args: object, **kwargs: object) -> object:
        with mode:
            return outputs(*args, **kwargs)

    for op in ops:
        fake_impls.op_implementations_dict[op] = rule


def _alike(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)


def synchronized_norms(meter: ScriptTracker) -> None:
    """Give the CUDA-only kernels of torch.nn.SyncBatchNorm their output shapes.

    SyncBatchNorm leaves out ranks without samples. In a simulation every rank has as many samples as this one.
    (torch/nn/modules/_functions.py: SyncBatchNorm.forward; aten/src/ATen/native/cuda/Normalization.cu)
    """
    original = SyncBatchNorm.forward

    def forward(*args: object) -> object:
        meter.all_true = True
        try:
            return original(*args)
        finally:
            meter.all_true = False

    # mean and inverse deviation, which the kernels compute in float32 even for 16-bit inputs
    def statistics(x: Tensor, *_: object, **__: object) -> object:
        return tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))

    def sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: object) -> object:
        kind = x.dtype if weight is None else weight.dtype
        return tuple(x.new_empty(x.shape[1], dtype=dtype) for dtype in (torch.float32, torch.float32, kind, kind))

    aten = torch.ops.aten
    _set_rule(statistics, aten.batch_norm_stats.default, aten.batch_norm_gather_stats_with_counts.default)
    _set_rule(_alike, aten.batch_norm_elemt.default, aten.batch_norm_backward_elemt.default)
    _set_rule(sums, aten.batch_norm_backward_reduce.default)
    replace_in(SyncBatchNorm, "forward", staticmethod(forward))


def missing_shapes(meter: ScriptTracker) -> None:
    """Give ops for which torch has no shape rule the shapes of their outputs, mostly those of the first argument.

    Beta and Dirichlet distributions, fake quantization, CTC and fused optimizers use them. CTC reads its lengths on
    the host, but not those of fakes. (aten/src/ATen/native/LossCTC.cpp)
    (torch._subclasses.fake_impls.op_implementations_dict, torch.ctc_loss)
    """
    aten, loss_of = torch.ops.aten, torch.ctc_loss

    def numbers(lengths: Tensor | list[int], most: int) -> list[int]:
        known = meter.read(lengths, shapes=True) if isinstance(lengths, FakeTensor) else lengths
        if known is None:
            meter.note("ctc_loss of unknown lengths: assumed to be the longest", bound=True, here=True)
        return [most] * len(lengths) if known is None else list(map(int, known))

    def ctc_loss(
        scores: Tensor, targets: Tensor, inputs: Tensor | list[int], lengths: Tensor | list[int], *rest: Any
    ) -> object:
        return loss_of(scores, targets, numbers(inputs, len(scores)), numbers(lengths, targets.shape[-1]), *rest)

    # the loss of each sample, and alpha: a score for each place in the targets with blanks between the labels
    def ctc(scores: Tensor, targets: Tensor, _: object, lengths: list[int], *__: int) -> object:
        steps, samples, _classes = scores.shape
        return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * max(lengths) + 1)

    def with_mask(x: Tensor, *_: object, **__: object) -> object:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    _set_rule(ctc, aten._ctc_loss.default)
    _set_rule(lambda loss, scores, *_: torch.empty_like(scores), aten._ctc_loss_backward.default)
    replace_in(torch, "ctc_loss", ctc_loss)
    _set_rule(_alike, aten._sample_dirichlet.default, aten._standard_gamma_grad.default)
    _set_rule(_alike, aten._dirichlet_grad.default, aten.binomial.default)
    _set_rule(with_mask, aten.fake_quantize_per_tensor_affine_cachemask.default)
    _set_rule(with_mask, aten.fake_quantize_per_channel_affine_cachemask.default)
    # torch has rules for Adam and AdamW, but not if the learning rate is a tensor
    steps = [aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr, aten._fused_sgd_.default]
    steps += [aten._fused_sgd_.tensor_lr, aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr]
    _set_rule(lambda *_, **__: None, *steps)


def sparse_gradients(meter: ScriptTracker) -> None:
    """Make sparse gradients of embeddings dense, since fakes cannot be sparse.

    Their memory is then an upper bound. (torch.embedding, torch.embedding_bag; torch.optim.SparseAdam.step, which
    refuses dense gradients)
    """

    def dense(original: Callable[..., object], position: int) -> Callable[..., object]:
        """Return `original` with False as the argument `sparse`, which has this position."""

        def embed(*args: object, **kwargs: object) -> object:
            if args[position : position + 1] == (True,):
                meter.note("sparse gradients: assumed to be dense", bound=True, here=True)
                args = (*args[:position], False, *args[position + 1 :])
            return original(*args, **kwargs)

        return embed

    def step(self: torch.optim.SparseAdam, closure: Callable[[], object] | None = None) -> object:
        loss = None if closure is None else closure()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            # dense moments, as SparseAdam has them
            for name in () if state else ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        return loss

    replace_in(torch, "embedding", dense(torch.embedding, 4))
    replace_in(torch, "embedding_bag", dense(torch.embedding_bag, 5))
    replace_in(torch.optim.SparseAdam, "step", step)


class _FlashAttention(torch.autograd.Function):
    """Forward and backward of flash_attn 2.

    They keep the output and the scores' log-sum-exp, but no scores.

    (csrc/flash_attn/flash_api.cpp: mha_fwd, mha_varlen_fwd, mha_bwd, mha_varlen_bwd)
    """

    @staticmethod
    def forward(ctx: Any, packed: int, sequences: int, *inputs: Tensor) -> Tensor:
        """Return the output.

        `packed`: how many of q, k and v are in the last tensor. `sequences`: number of sequences; 0 unless varlen.
        """
        query = inputs[0][..., 0, :, :] if packed == 3 else inputs[0]
        width = query.shape[-1]
        if width % 8:  # the kernels need widths of heads in multiples of 8
            inputs = tuple(pad(t, (0, 8 - width % 8)) for t in inputs)
            query = inputs[0][..., 0, :, :] if packed == 3 else inputs[0]
        rows = (query.shape[1], query.shape[0]) if sequences else (query.shape[0], query.shape[2], query.shape[1])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        log_sum_exp = torch.empty(rows, dtype=torch.float32, device=query.device)
        rng_state = torch.empty(2, dtype=torch.int64, device=query.device)  # dropout's seed and offset
        ctx.save_for_backward(*inputs, out, log_sum_exp, rng_state)
        ctx.packed, ctx.sequences, ctx.width = packed, sequences, width
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, _, _ = ctx.saved_tensors
        heads, width = out.shape[-2:]
        unit = _NARROW if width <= 128 else _WIDE
        if ctx.sequences:
            rows: tuple[int, ...] = (out.shape[0] + _ROWS * ctx.sequences,)
        else:
            rows = (out.shape[0], _up(out.shape[1], _ROWS))
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]
        # in fp32: row sums, and gradients of queries
        scratch = [out.new_empty((*rows, heads), dtype=torch.float32)]
        scratch += [out.new_empty((*rows, heads, _up(width, unit)), dtype=torch.float32)]
        keys = inputs[-1][..., 0, :, :] if ctx.packed else inputs[-1]
        if keys.shape[-2] != heads:  # gradients of shared heads are summed at the end
            scratch += [keys.new_empty((*keys.shape[:-2], heads, width)) for _ in range(2)]
        del scratch
        return None, None, *(t[..., : ctx.width] for t in gradients)


def flash_attention_package(meter: ScriptTracker) -> None:
    """Replace the flash_attn package (installed or not), which needs a GPU to build and import.

    (sys.modules; transformers.utils: is_flash_attn_2_available)

    The replacement has only the functions for attention, padding and gathering. Other names raise an ImportError.
    """

    def attention(packed: int, varlen: bool) -> object:
        names = {0: ("q", "k", "v"), 2: ("q", "kv"), 3: ("qkv",)}[packed]
        tensors = len(names)

        def function(*args: Tensor, return_attn_probs: bool = False, **kwargs: Tensor) -> object:
            inputs = [*args[:tensors], *(kwargs[name] for name in names[len(args[:tensors]) :])]
            sequences = 0
            if varlen:
                name = "cu_seqlens" if packed == 3 else "cu_seqlens_q"
                ends = args[tensors] if len(args) > tensors else kwargs[name]  # of sequences, after a leading 0
                sequences = ends.shape[0] - 1
            meter.note("flash_attn: the memory of its kernels is computed from shapes")
            inputs = [t if t.stride(-1) == 1 else t.contiguous() for t in inputs]
            out = _FlashAttention.apply(packed, sequences, *inputs)
            return (out, None, None) if return_attn_probs else out

        return function

    def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_gather_tensor_autograd(x, 0, group)

    functions = {
        f"flash_attn{lengths}{kind}_func": attention(packed, bool(lengths))
        for lengths in ("", "_varlen")
        for kind, packed in (("", 0), ("_kvpacked", 2), ("_qkvpacked", 3))
    }
    functions["flash_attn_with_kvcache"] = attention(0, False)  # q, k_cache and v_cache come first
    contents: dict[str, dict[str, object]] = {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": _padding_functions(),
        "flash_attn.utils": {},
        "flash_attn.utils.distributed": {"all_gather": all_gather},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)  # find_spec raises an error for modules without one
        vars(module).update(content, __version__="2.8.3", __path__=[])  # transformers needs 2.3.3
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        vars(sys.modules.get(parent, module))[last] = module
    for module in (transformers.utils, transformers.utils.import_utils):
        replace_in(module, "is_flash_attn_2_available", lambda *_, **__: True)


def newer_flash_attention(meter: ScriptTracker) -> None:
    """Let scripts activate FlashAttention 3 or 4 without its package.

    Shapes and scratch are of FlashAttention 2. (torch.nn.attention.activate_flash_attention_impl)
    """
    for name in _registry.list_flash_attention_impls():

        def activate(name: str = name) -> Any:
            meter.note(f"{name}: memory as with FlashAttention 2")
            return SimpleNamespace(remove=lambda: None)  # no kernels were registered

        _registry.register_flash_attention_impl(name, register_fn=activate)


def _padding_functions() -> dict[str, object]:

    def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
        return x[indices]

    def pad_input(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
        rows = x.new_zeros((batch * seqlen, *x.shape[1:]))
        return rows.index_put((indices,), x).unflatten(0, (batch, seqlen))

    def unpad_input(x: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[object, ...]:
        mask = attention_mask if unused_mask is None else attention_mask + unused_mask
        lengths, used = (m.sum(-1, dtype=torch.int32) for m in (mask, attention_mask))
        indices = mask.flatten().nonzero().flatten()
        ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return x.flatten(0, 1)[indices], indices, ends, lengths.max().item(), used

    functions = {"index_first_axis": index_first_axis, "pad_input": pad_input, "unpad_input": unpad_input}
    einops = find_spec("einops")  # flash_attn needs it, and packages import `rearrange` from here
    return {**functions, "rearrange": import_module("einops").rearrange} if einops else {**functions}


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """The recurrent layers that one call runs."""

    kind: str
    number: int  # of layers
    directions: int
    dropout: bool
    trains: bool
    dtype: torch.dtype  # of the kernel; autocast's, if it is on


class _Recurrent(torch.autograd.Function):
    """cuDNN's kernels for (steps, samples, width) or packed rows.

    (ATen/native/cudnn/RNN.cpp, _cudnn_rnn)
    """

    @staticmethod
    def forward(
        ctx: Any, layers: _Layers, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs. The gradients of all weights are parts of one tensor."""
        x, hx, cx, _, _, _, *weights = ctx.saved_tensors
        output = None if grads[0] is None else grads[0].contiguous()
        workspace = _workspace(ctx.layers, weights)
        of_x, of_states = x.new_empty(x.shape), [None if t is None else t.new_empty(t.shape) for t in (hx, cx)]
        # cuDNN adds to gradients of weights, so torch fills them with zeros (_cudnn_rnn_backward_weight)
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

    # of `rest`: [4] is the state, [9] the hidden size, and [-1] whether the layer trains
    def layer(x: Tensor, *rest: Any) -> object:
        size = _host_workspace(tuple(x.shape), rest[9], x.dtype) if rest[-1] else 0
        out, state = x.new_empty(*x.shape[:2], rest[9]), rest[4].shape
        return out, x.new_empty(state), x.new_empty(state), torch.empty(size, dtype=torch.uint8)

    _set_rule(layer, torch.ops.aten.mkldnn_rnn_layer.default)
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
        # as torch's method: weights of several types, or that share memory, stay as they are
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
