"""What autocast casts: run as a script, it prints for each call the types of the outputs and how many casts it made.

`python autocast_calls.py simgpu cuda` first calls our kernels, then torch's own for CUDA devices, on fakes of one.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Casts(TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def plain_attention(*inputs: Tensor) -> Tensor:
    """Compute attention by the only kernel that torch chooses for fakes of a CUDA device."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*inputs)


def calls(device: str) -> dict[str, Any]:
    """Name of a call -> what it gives, all on float32 and lower inputs alike."""

    def a(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    half, double, kept = a(4, 4, dtype=torch.bfloat16), a(4, 4, dtype=torch.float64), nn.Parameter(a(4, 4))
    labels, image = torch.zeros(4, dtype=torch.long, device=device), a(2, 3, 8, 8, dtype=torch.bfloat16)
    index, heads = torch.zeros(4, 4, dtype=torch.long, device=device), a(1, 2, 4, 8, dtype=torch.bfloat16)
    return {
        "mm": lambda: a(4, 4) @ a(4, 4),
        "linear twice": lambda: (functional.linear(a(4, 4), kept), functional.linear(half, kept)),
        "view of a weight": lambda: functional.linear(half, kept.T),
        "double": lambda: (double @ double, double.softmax(0)),
        "einsum": lambda: torch.einsum("ij,jk->ik", a(4, 4), half),
        "conv2d": lambda: functional.conv2d(a(2, 3, 8, 8), a(5, 3, 3, 3)),
        "conv_transpose2d": lambda: functional.conv_transpose2d(a(2, 3, 8, 8), a(3, 5, 3, 3)),
        "layer_norm": lambda: functional.layer_norm(half, (4,), a(4), a(4)),
        "group_norm": lambda: functional.group_norm(image, 3),
        "batch_norm": lambda: functional.batch_norm(image, a(3), a(3), training=True),
        "softmax": lambda: (half.softmax(-1), half.log_softmax(-1), half.softmax(-1, dtype=torch.bfloat16)),
        "sums": lambda: (half.sum(), half.sum(0), half.cumsum(0), half.prod(), half.mean()),
        "pow": lambda: (half**2, half.exp(), half.rsqrt(), half.sqrt(), half.log()),
        "norm": lambda: (half.norm(), half.norm(dim=0), half.norm(2), torch.linalg.vector_norm(half)),
        "losses": lambda: (functional.cross_entropy(half, labels), functional.mse_loss(half, a(4, 4))),
        "promote": lambda: (
            torch.addcmul(half, half, a(4, 4)),
            torch.atan2(half, half),
            half.scatter_add(0, index, a(4, 4)),
            torch.dot(half[0], a(4)),
        ),
        "not listed": lambda: (half + a(4, 4), functional.gelu(half), torch.cat([half, a(4, 4)]), half.relu()),
        "attention": lambda: plain_attention(a(1, 2, 4, 8), a(1, 2, 4, 8), heads),
        "upsample": lambda: functional.interpolate(image, scale_factor=2.0, mode="bilinear"),
        "host": lambda: torch.ones(4, 4, device="cpu") @ torch.ones(4, 4, device="cpu"),
    }


def main(device: str) -> None:
    """Make each call by itself, then all in one autocast with and without the cache."""
    if device == "simgpu":
        from torch import _dynamo  # noqa: F401  # looks at what is patched

        from zerofit.simulate.fakes import device as simulated
        from zerofit.simulate.fakes import gpu_patches

        simulated.register(SimpleNamespace(failed=None))
        gpu_patches.backend_keys()
        gpu_patches.attention()
        gpu_patches.autocast()
    name = "privateuseone" if device == "simgpu" else device
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        table = calls(device)
        for cached in (True, False):
            for call, run in table.items():
                with Casts() as casts:
                    torch.set_autocast_enabled(name, True)
                    torch.set_autocast_dtype(name, torch.bfloat16)
                    torch.set_autocast_cache_enabled(cached)
                    out = [str(t.dtype) for t in tree_leaves(run())]
                    torch.set_autocast_enabled(name, False)
                    torch.clear_autocast_cache()
                found[f"{call}, cache {cached}"] = [out, casts.count]
    print(json.dumps(found))


if __name__ == "__main__":
    for device in sys.argv[1:]:  # each in a process of its own, forked from one that has imported torch
        if not os.fork():
            main(device)
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0, device
