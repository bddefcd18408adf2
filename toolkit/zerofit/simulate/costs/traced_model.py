"""Build the model for a trace: one rank's shard with few of the equal blocks.

For a transformers model, the shard equals the one from DeepSpeed's AutoTP (deepspeed/module_inject/auto_tp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from deepspeed import comm
from deepspeed.module_inject import auto_ep, auto_ep_layer
from deepspeed.moe import ep_kernels
from torch import Tensor, nn

from zerofit.features.checkpointing import Checkpointing
from zerofit.models.batch_norm import BatchNorm
from zerofit.models.build import bincount, build, parameter_count
from zerofit.models.catalog import ModelError, ModelSource
from zerofit.models.checkpointing import keep_on_host
from zerofit.models.denoisers import is_denoiser
from zerofit.models.depth import with_depths
from zerofit.models.dtypes import DTYPES
from zerofit.models.equal_layers import equal_layers, few_layers
from zerofit.models.hf_config import make_config
from zerofit.models.inputs import Inputs, TextInputs
from zerofit.models.liger import use_liger
from zerofit.models.quantized import compute_in
from zerofit.models.sections import ModelSection, block_lists, block_sections, stage_sections
from zerofit.models.tiled_mlp import tile_mlps
from zerofit.models.titan import TitanModel
from zerofit.simulate.fakes.experts import even_split_plan, gather_rows, grouped_product, unfilled_indices
from zerofit.spec.model_facts import Precision
from zerofit.spec.profile import NOTHING_SAVED, Savings
from zerofit.train.build import batch_norm_in_fp32
from zerofit.train.tensor_split import convert, expert_layers

# linear layers whose inputs are split and whose outputs are all-reduced (AutoTP's all_reduce_linears)
_ROWS = ("o_proj", "down_proj", "output.dense")
# ops without a meta kernel, or whose meta kernel refuses float32 before torch 2.15
STAND_INS = {
    torch.ops.aten._grouped_mm.default: partial(grouped_product, None, None),
    torch.ops.aten.bincount.default: partial(bincount, None, torch.ops.aten.bincount.default),
}


class TraceSetting(NamedTuple):
    """The settings that a trace depends on, besides the model and its inputs."""

    precision: str
    checkpointing: Checkpointing = False
    tp: int = 1
    sp: int = 1
    ep: int = 1
    savings: Savings = NOTHING_SAVED
    zero3: bool = False  # trace as ZeRO-3 does, which partitions the model while it is built
    whole: bool = False  # trace every layer, even equal ones
    liger: bool = False  # with the memory of Liger's kernels
    titan: bool = False  # torchtitan's model

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype for `precision`."""
        return DTYPES[cast("Precision", self.precision)]


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model on the meta device, ready to be traced."""

    model: nn.Module
    units: list[ModelSection]
    parameters: int  # of the full model; with tensor or expert parallelism, of one rank's shard
    config: Any = None  # transformers' config of the full model


def make_subject(
    source: ModelSource,
    inputs: Inputs | None,
    args: dict[str, Any],
    setting: TraceSetting,
) -> TracedModel:
    """Return one rank's model. Parameters have the setting's dtype. Buffers keep their own.

    Raises ModelError if the model has no tensor or expert parallel form.
    """
    config = make_config(source, inputs, args) if source.family == "transformers" else None
    equal = {} if setting.whole else equal_layers(source, inputs, args)
    small = with_depths(args, {path: few_layers(config, path) for path in equal})
    with torch.device("meta"):
        if setting.titan:
            assert isinstance(inputs, TextInputs)
            few = make_config(source, inputs, small)
            model = TitanModel(few, setting.checkpointing, inputs.seq_len, setting.tp)
        else:
            model = build(source, inputs, small, checkpointing=setting.checkpointing)
    found = block_lists(model, inputs) if config is not None else []
    if setting.tp > 1 and not setting.titan:
        if len(found) != 1:
            raise ModelError("profile-tp", f"{source.name} has no blocks that tensor parallelism splits")
        _shard(model, found[0][0], setting.tp)
    if setting.ep > 1:
        spread(model, setting.ep)
    if setting.savings.activation_offload and setting.checkpointing:
        keep_on_host(model)
    if setting.liger:
        use_liger(model)
    if setting.savings.mlp_chunk:  # tiles run the plain MLP
        tile_mlps(model, setting.savings.mlp_chunk)
    if setting.dtype != torch.float32:
        for parameter in model.parameters():  # buffers keep their dtype (deepspeed/runtime/engine.py:1851)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(setting.dtype)
        compute_in(model, setting.dtype)
        batch_norm_in_fp32(model)
    equal_lists = [(blocks, equal.get(path)) for blocks, path in found]
    units = block_sections(equal_lists) if found else stage_sections(model)
    stood_for = sum(
        (equal[path] - len(blocks)) * parameter_count(blocks[-1]) for blocks, path in found if path in equal
    )
    parameters = parameter_count(model) + stood_for
    return TracedModel(model=model.train(), units=units, parameters=parameters, config=config)


def cast_by_zero3(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the float buffers (module and name) that ZeRO-3 casts to 16 bits.

    An example is BART's bias of logits.
    """
    # transformers partitions a model while it is built, and zero.Init casts all tensors that the constructor makes.
    # Exceptions are rotary frequencies (models/hf.py) and norms' statistics (train/build.py).
    if not hasattr(model, "config") or is_denoiser(model):
        return []
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.dtype == torch.float32
        and "Rotary" not in type(module).__name__
        and not isinstance(module, BatchNorm)
    ]


# Tensor parallelism of a block (Shoeybi and others, Megatron-LM, 2019), for the first of `degree` ranks:
#
#   attention, MLP     columns: x (in) -> W[: out / degree]      each rank computes a part of the outputs
#   o_proj, down_proj  rows:    W[:, : in / degree] -> sum       partial sums of all ranks, all-reduced in place
#   lm_head            columns, then all ranks' logits are gathered
def _shard(model: Any, blocks: nn.ModuleList, degree: int) -> None:
    """Replace the blocks' linear layers and an untied `lm_head` by one rank's shards, in place.

    Raises ModelError if `degree` does not divide a layer, or if a block has matrices outside of linear layers.
    """
    for block in blocks:
        linears = [(path, module) for path, module in block.named_modules() if isinstance(module, nn.Linear)]
        if {id(p) for p in block.parameters() if p.dim() > 1} != {id(linear.weight) for _, linear in linears}:
            message = f"tensor parallelism splits linear layers only, but {type(block).__name__} has other matrices"
            raise ModelError("profile-tp", message)
        for path, linear in linears:
            made = _RowLinear if path.endswith(_ROWS) else _ColumnLinear
            block.set_submodule(path, made(linear, degree))
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
        model.lm_head = _ColumnLinear(head, degree, gather=True)


class _ColumnLinear(nn.Module):
    """A linear layer with 1/degree of the outputs.

    With `gather` it concatenates the outputs of all ranks (as DeepSpeed's LinearLayer).
    """

    def __init__(self, linear: nn.Linear, degree: int, gather: bool = False):
        super().__init__()
        self.degree, self.gather = degree, gather
        self.weight = _part(linear.weight, 0, degree)
        self.bias = None if linear.bias is None else _part(linear.bias, 0, degree)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out / degree), or to (..., out) with `gather`."""
        out = torch.matmul(x, self.weight.transpose(-1, -2))
        if self.bias is not None:
            out = out + self.bias
        return _Gather.apply(out, self.degree) if self.gather else out


class _RowLinear(nn.Module):
    """A linear layer with 1/degree of the inputs.

    Its outputs are all-reduced before the bias is added (as in DeepSpeed's LinearAllreduce).
    """

    def __init__(self, linear: nn.Linear, degree: int):
        super().__init__()
        self.weight, self.bias = _part(linear.weight, 1, degree), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in / degree) to (..., out)."""
        out = torch.matmul(x, self.weight.transpose(-1, -2))
        return out if self.bias is None else out + self.bias


class _Gather(torch.autograd.Function):
    """Receive the shards of all ranks in one buffer, and concatenate them (last dimension)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:
        ctx.width = x.shape[-1]
        received = torch.empty(degree, *x.shape, dtype=x.dtype)
        return torch.cat(list(received), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., : ctx.width].contiguous(), None


def _part(parameter: Tensor, dim: int, degree: int) -> nn.Parameter:
    size = parameter.shape[dim]
    if size % degree:
        raise ModelError("profile-tp", f"tensor parallel degree {degree} does not divide a layer of width {size}")
    shape = [*parameter.shape]
    shape[dim] = size // degree
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=parameter.device))


def spread(model: nn.Module, degree: int) -> None:
    """Reduce a model's experts to the first rank's share, in place.

    The model is on the meta device. Raises ModelError if AutoEP finds no experts, or if `degree` does not divide
    them.
    """
    try:
        quiet = patch.object(auto_ep.logger, "disabled", True)  # its warnings are about a real run, on standard output
        with quiet, patch.object(auto_ep, "_gate_activation_matches", lambda experts_module: None):
            convert(model, degree, 0)
    except (ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ModelError("profile-ep", f"expert parallel degree {degree}: {error}") from error
    layers = expert_layers(model)
    if not layers:
        raise ModelError("profile-ep", f"DeepSpeed's AutoEP finds no experts in {type(model).__name__}")
    for layer in layers.values():
        layer.tokens_per_expert = torch.zeros(layer.num_experts, device="meta")


@contextmanager
def without_ranks(device: str, sent: Callable[[int], None]) -> Iterator[None]:
    """Within this context, AutoEP's layers run without other ranks.

    `sent` is called with the bytes of each exchange.
    """

    def exchange(output: Tensor, given: Tensor, *_: object, **__: object) -> None:
        if given.is_floating_point():
            sent(given.nbytes)

    rows = {"permute_rows_supported": lambda rows: device == "cuda", "gather_rows": gather_rows}
    indices = dict.fromkeys(("fill_indices_cpu", "fill_indices_wrapper"), unfilled_indices)
    sends = patch.object(comm, "all_to_all_single", exchange)
    plan = patch.object(auto_ep_layer, "compute_split_plan", even_split_plan)
    with sends, plan, patch.multiple(ep_kernels, **rows, **indices):
        yield
