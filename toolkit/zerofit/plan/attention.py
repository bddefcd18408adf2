"""Rates of fused attention by kernel, GPU and length."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofit.spec.model_facts import AttentionKernel
from zerofit.spec.profile import Kernel

ROWS = 128  # queries of a block of a fused attention kernel (flash_fwd_launch_template.h)
NARROW = 64  # elements of a head up to which kernels are slower


# A kernel's rate is plateau / ((1 + half / keys) (1 + blocks / its blocks)). Blocks on the diagonal of a mask are
# computed whole, each block has a beginning and an end, and few blocks leave multiprocessors idle. Forward and backward
# have one common rate; separate rates change a step by 2 %.
@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """The rate of a kernel by its shape, for the FLOPs that it really computes."""

    share: float  # of the peak, forward and backward together, for many long sequences and heads of 128
    half: float = 500.0  # keys at which a causal mask halves the rate
    full_half: float = 200.0  # keys at which the rate is half without a mask
    narrow: float = 0.88  # rate of heads of 64 elements, relative to 128
    blocks: float = 180.0  # number of blocks that half fill a GPU (MooreThreads/SimuMax, a100_pcie, sdp by heads)
    how: str

    def slower(self, kernel: Kernel, micro_batch: int) -> float:
        """Return the factor by which a kernel's shape slows it; 1 for a kernel without a shape."""
        if not kernel.shape:
            return 1.0
        heads, queries, keys, width = (max(1.0, size.at(micro_batch)) for size in kernel.shape)
        length = 1 + (self.half if kernel.causal else self.full_half) / keys
        filled = 1 + self.blocks / (heads * max(1.0, queries / ROWS))
        return length * filled / (self.narrow if width <= NARROW else 1.0)


PLAIN = AttentionRate(share=1.0, half=0.0, full_half=0.0, narrow=1.0, blocks=0.0, how="plain matrix multiplications")
_FA2 = "measured: FlashAttention-2 paper (2023), figures 4 to 6, A100, 512 to 16k tokens"
_FA3 = "measured: FlashAttention-3 paper (2024), figures 5 and 6, H100, 512 to 16k tokens"
_MEASURED = "measured: torch's SDPA (cuDNN) on an H100 (benchmarks/results/gpu-environment.json)"
_A100 = AttentionRate(share=0.68, how=_FA2)
_H100 = AttentionRate(share=0.35, half=400, how=f"{_FA3}: FlashAttention-2")
_CUDNN = AttentionRate(share=0.62, half=900, full_half=100, narrow=0.75, how=_MEASURED)
_FIRST = AttentionRate(share=0.36, half=400, how="measured: FlashAttention-2 paper (2023), FlashAttention on an A100")
_OTHER = AttentionRate(share=0.55, how="assumed: FlashAttention-2 between A100 and H100")
_HOPPER = ("H100", "H100 PCIe", "H200", "H800", "H20", "GH200")
_BLACKWELL = ("B200", "B300", "GB200")
_CDNA = ("MI250X", "MI300X", "MI325X", "MI355X")
_FA2_RATES = {
    **dict.fromkeys(("A100", "A800"), _A100),
    **dict.fromkeys(_HOPPER, _H100),
    **dict.fromkeys(_BLACKWELL, replace(_H100, share=0.2, how="assumed: FlashAttention-2, made for Ampere")),
    **dict.fromkeys(_CDNA, AttentionRate(share=0.3, how="assumed: AOTriton")),
    "V100": AttentionRate(share=0.25, how="assumed: the memory-efficient kernel, without FlashAttention"),
}
_SIMUMAX = "measured: MooreThreads/SimuMax configs/system, b200_bf16_ceperm, sdp"
_SDPA_RATES = {
    **_FA2_RATES,
    **dict.fromkeys(_HOPPER, _CUDNN),
    **dict.fromkeys(_BLACKWELL, replace(_CUDNN, share=0.55, how=_SIMUMAX)),
}
_FA3_RATES = {**_SDPA_RATES, **dict.fromkeys(_HOPPER, AttentionRate(share=0.64, half=400, narrow=0.77, how=_FA3))}
_FA4 = AttentionRate(share=0.6, half=400, narrow=0.77, how="published: FlashAttention-4's release, B200")
_FIRST_RATES = {
    **dict.fromkeys(_FA2_RATES, _FIRST),
    **dict.fromkeys((*_HOPPER, *_BLACKWELL), replace(_FIRST, share=0.23)),
    "V100": _FA2_RATES["V100"],
}
# by kernel and name of the device; `eager` has no fused kernel, so its rate is never used
RATES: dict[AttentionKernel, dict[str, AttentionRate]] = {
    "sdpa": _SDPA_RATES,
    "eager": {},
    "flash_attention_1": _FIRST_RATES,
    "flash_attention_2": _FA2_RATES,
    "flash_attention_3": _FA3_RATES,
    "flash_attention_4": {**_FA3_RATES, **dict.fromkeys(_BLACKWELL, _FA4)},
    "flex_attention": {name: replace(rate, share=0.85 * rate.share) for name, rate in _FA2_RATES.items()},
}


def attention_rate(kernel: AttentionKernel, device: str) -> AttentionRate:
    """Return a kernel's rate on a device, by the name that torch reports."""
    return RATES[kernel].get(device, _OTHER)
