"""Rates of fused attention by kernel, GPU and length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from zerofit.plan.rate_catalog import rate_catalog
from zerofit.spec.model_facts import AttentionKernel
from zerofit.spec.profile import Kernel

ROWS = 128  # queries of a block of a fused attention kernel (flash_fwd_launch_template.h)
NARROW = 64  # elements of a head up to which kernels are slower


# A kernel's rate is plateau / ((1 + half / keys) (1 + blocks / its blocks)). Blocks on the diagonal of a mask are
# computed in full, each block has start-up costs, and few blocks leave multiprocessors idle. Forward and backward
# have one common rate; separate rates change a step by 2 %.
@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """How an attention kernel's rate depends on its shape."""

    # FLOPs that a causal mask skips do not count
    share: float  # of the peak, forward and backward together, for many long sequences and heads of 128
    half: float = 500.0  # keys at which a causal mask halves the rate
    full_half: float = 200.0  # keys at which the rate is half without a mask
    narrow: float = 0.88  # rate of heads of 64 elements, relative to 128
    blocks: float = 180.0  # number of blocks that half fill a GPU (MooreThreads/SimuMax, a100_pcie, sdp by heads)
    how: str

    def slower(self, kernel: Kernel, micro_batch: int) -> float:
        """Return the factor by which a kernel's shape slows the kernel; 1 if the shape is unknown."""
        if not kernel.shape:
            return 1.0
        heads, queries, keys, width = (max(1.0, size.at(micro_batch)) for size in kernel.shape)
        length = 1 + (self.half if kernel.causal else self.full_half) / keys
        filled = 1 + self.blocks / (heads * max(1.0, queries / ROWS))
        return length * filled / (self.narrow if width <= NARROW else 1.0)


PLAIN = AttentionRate(share=1.0, half=0.0, full_half=0.0, narrow=1.0, blocks=0.0, how="plain matrix multiplications")


@cache
def attention_rate(kernel: AttentionKernel, device: str) -> AttentionRate:
    """Return a kernel's rate on a device. `device` is the name that torch reports."""
    rates = rate_catalog()["attention"]
    family = next((name for name, devices in rates["families"].items() if device in devices), "")
    entries, times = rates["kernels"][kernel], 1.0
    # a kernel without measurements on this family is `times` as fast as another kernel
    while family not in entries and "like" in entries:
        times *= entries.get("times", 1.0)
        entries = rates["kernels"][entries["like"]]
    entry = entries.get(family)
    if entry is None:
        entry, times = rates["other"], 1.0
    shape = {name: entry[name] for name in ("half", "full_half", "narrow") if name in entry}
    return AttentionRate(share=times * entry["share"], how=entry["source"], **shape)
