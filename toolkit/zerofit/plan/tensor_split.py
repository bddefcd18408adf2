"""Tensor parallelism that also splits the sequence between products, as Megatron-LM and torch's DTensor do."""

from __future__ import annotations

from dataclasses import replace

from zerofit.spec.profile import Kernel, LayerCost, Linear, Profile


# DeepSpeed's AutoTP runs norms, residuals, embedding and loss on all tokens of each tensor rank. With sequence
# parallelism inside tensor parallelism (Korthikanti et al., 2022), each rank runs them on a share of the tokens, and
# embedding, head and loss on a share of the vocabulary. All-gathers and reduce-scatters send the bytes of all-reduces.
def with_split_sequence(profile: Profile) -> Profile:
    """Return the profile with the kernels of such tensor ranks. Memory stays that of AutoTP, an upper bound."""
    costs = dict(profile.costs)
    for key in costs:
        tp = int(key.partition("/tp=")[2].partition("/")[0])
        whole = profile.costs.get(key.replace(f"/tp={tp}/", "/tp=1/"))
        if tp > 1 and whole:
            rows = zip(whole, costs[key], profile.layers, strict=True)
            costs[key] = tuple(_layer(all_of, mine, run.name == "block", tp) for all_of, mine, run in rows)
    return replace(profile, costs=costs)


def _layer(whole: LayerCost, mine: LayerCost, block: bool, tp: int) -> LayerCost:
    directions = ("forward_kernels", "backward_kernels")
    found = {name: _kernels(getattr(whole, name), getattr(mine, name), block, tp) for name in directions}
    return replace(mine, **found)


def _kernels(whole: tuple[Kernel, ...], mine: tuple[Kernel, ...], block: bool, tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of one rank.

    For a block these are its own products and a share of its other kernels. For other layers they are a share of all
    kernels.
    """
    split = (kernel for kernel in whole if not (block and kernel.shape))
    return (*(_share(kernel, tp) for kernel in split), *(kernel for kernel in mine if block and kernel.shape))


def _share(kernel: Kernel, tp: int) -> Kernel:
    return replace(kernel, moved_bytes=_part(kernel.moved_bytes, tp), flops=_part(kernel.flops, tp))


def _part(line: Linear, tp: int) -> Linear:
    return Linear(fixed=line.fixed / tp, per_sample=line.per_sample / tp)
