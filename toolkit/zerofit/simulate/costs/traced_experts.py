"""Divide experts among ranks in a trace, on the meta device and without process groups.

As in a simulation (`simulate.fakes.experts`), all experts get equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from deepspeed import comm
from deepspeed.module_inject import auto_ep, auto_ep_layer
from deepspeed.moe import ep_kernels
from torch import Tensor, nn

from zerofit.models.build import bincount
from zerofit.models.catalog import ModelError
from zerofit.simulate.fakes.experts import even_split_plan, gather_rows, grouped_product, unfilled_indices
from zerofit.train.tensor_split import convert, expert_layers

# ops without a meta kernel, or whose meta kernel refuses float32 before torch 2.15
STAND_INS = {
    torch.ops.aten._grouped_mm.default: partial(grouped_product, None, None),
    torch.ops.aten.bincount.default: partial(bincount, None, torch.ops.aten.bincount.default),
}


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

    stand_ins = [
        (comm, "all_to_all_single", exchange),
        (auto_ep_layer, "compute_split_plan", even_split_plan),
        (ep_kernels, "fill_indices_cpu", unfilled_indices),
        (ep_kernels, "fill_indices_wrapper", unfilled_indices),
        (ep_kernels, "permute_rows_supported", lambda rows: device == "cuda"),
        (ep_kernels, "gather_rows", gather_rows),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
