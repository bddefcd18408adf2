"""Model tensor parallelism that also splits the sequence between two matmuls.

Megatron-LM and torch's DTensor do this.
"""

from __future__ import annotations

from dataclasses import replace

from zerofit.spec.profile import Kernel, LayerCost, LayerRun, Linear, Profile


# DeepSpeed's AutoTP runs norms, residuals, embedding and loss on all tokens of each tensor rank. With sequence
# parallelism inside tensor parallelism (Korthikanti et al., 2022), each rank runs them on a share of the tokens, and
# embedding, head and loss on a share of the vocabulary. All-gathers and reduce-scatters send the bytes of all-reduces.
# So a rank keeps a share of all activations. During a matmul it also has the gathered input of all tokens. In
# backward it also has the gradient of this input.
def with_split_sequence(profile: Profile) -> Profile:
    """Return the profile for tensor parallel ranks that also split the sequence."""
    costs = dict(profile.costs)
    for key in costs:
        tp = int(key.partition("/tp=")[2].partition("/")[0])
        whole = profile.costs.get(key.replace(f"/tp={tp}/", "/tp=1/"))
        if tp > 1 and whole:
            rows = zip(whole, costs[key], profile.layers, strict=True)
            costs[key] = tuple(_layer(all_of, mine, run, tp) for all_of, mine, run in rows)
    return replace(profile, costs=costs)


def _layer(whole: LayerCost, mine: LayerCost, run: LayerRun, tp: int) -> LayerCost:
    block, gathered = run.name == "block", whole.output_bytes
    directions = ("forward_kernels", "backward_kernels")
    kernels = {name: _kernels(getattr(whole, name), getattr(mine, name), block, tp) for name in directions}
    bytes_of = ("saved_bytes", "output_bytes", "largest_bytes", "host_bytes")
    matrices = mine.matrices if block else tuple(-(-numel // tp) for numel in run.matrices)
    return replace(
        mine,
        **kernels,
        **{name: _part(getattr(whole, name), tp) for name in bytes_of},
        forward_peak_bytes=_part(whole.forward_peak_bytes, tp) + gathered,
        backward_peak_bytes=_part(whole.backward_peak_bytes, tp) + gathered + gathered,
        forward=tuple(_part(line, tp) + gathered for line in whole.forward),
        backward=tuple(
            replace(
                moment,
                live=tuple(_part(line, tp) + gathered + gathered for line in moment.live),
                end=_part(moment.end, tp),
            )
            for moment in whole.backward
        ),
        matrices=matrices,
        vectors=mine.vectors or run.vectors,
    )


def _kernels(whole: tuple[Kernel, ...], mine: tuple[Kernel, ...], block: bool, tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of one rank.

    In a block these are the rank's own matmuls, and a share of all other kernels. In other layers they are a share of
    each kernel.
    """
    split = (kernel for kernel in whole if not (block and kernel.shape))
    shares = (replace(k, moved_bytes=_part(k.moved_bytes, tp), flops=_part(k.flops, tp)) for k in split)
    return (*shares, *(kernel for kernel in mine if block and kernel.shape))


def _part(line: Linear, tp: int) -> Linear:
    return Linear(fixed=line.fixed / tp, per_sample=line.per_sample / tp)
