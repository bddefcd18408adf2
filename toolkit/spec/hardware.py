"""What devices can do at most, from their makers' data sheets (dense figures, without sparsity)."""

from __future__ import annotations

import re

# words of the name torch reports -> peak TFLOP/s by precision. The first that matches is taken, so longer names
# of a family stand first. Sources: NVIDIA data sheets of V100 (2020), T4 (2019), A100 (2021), A10 (2021), L4 and
# L40S (2023), H100 (2023), H200 (2024), B200 (2024), GeForce Ampere GA102 (2020) and Ada (2022) white papers; AMD
# Instinct MI250X (2021) and MI300X (2023) data sheets. fp32 is the figure without TF32, off by default.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "fp16": 2250, "fp32": 75},
    "H200": {"bf16": 989, "fp16": 989, "fp32": 67},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "fp32": 51},
    "H100": {"bf16": 989, "fp16": 989, "fp32": 67},
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5},
    "A10G": {"bf16": 70, "fp16": 70, "fp32": 35},
    "A10": {"bf16": 125, "fp16": 125, "fp32": 31.2},
    "L40S": {"bf16": 362, "fp16": 362, "fp32": 91.6},
    "L40": {"bf16": 181, "fp16": 181, "fp32": 90.5},
    "L4": {"bf16": 121, "fp16": 121, "fp32": 30.3},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
    "RTX 4090": {"bf16": 165, "fp16": 165, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "fp16": 71, "fp32": 35.6},
    "MI300X": {"bf16": 1307, "fp16": 1307, "fp32": 163.4},
    "MI250X": {"bf16": 383, "fp16": 383, "fp32": 47.9},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device at a precision, or None where it is not known (a CPU, a device not in the table)."""
    for name, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            return peaks[precision] * 1e12 if precision in peaks else None
    return None


# `--gpu KIND` -> a name from PEAK_TFLOPS and the memory that its maker states, in GiB (the sheets of above)
GPUS: dict[str, tuple[str, int]] = {
    "b200": ("B200", 192),
    "h200": ("H200", 141),
    "h100-80gb": ("H100", 80),
    "h100-pcie-80gb": ("H100 PCIe", 80),
    "a100-80gb": ("A100", 80),
    "a100-40gb": ("A100", 40),
    "a10": ("A10", 24),
    "a10g": ("A10G", 24),
    "l40s": ("L40S", 48),
    "l40": ("L40", 48),
    "l4": ("L4", 24),
    "v100-32gb": ("V100", 32),
    "v100-16gb": ("V100", 16),
    "t4": ("T4", 16),
    "rtx4090": ("RTX 4090", 24),
    "rtx3090": ("RTX 3090", 24),
    "mi300x": ("MI300X", 192),
    "mi250x": ("MI250X", 128),
}


def supports(kind: str, precision: str) -> bool:
    """Whether a kind of GPU has arithmetic of a precision ("bf16", "fp16", "fp32")."""
    return precision in PEAK_TFLOPS[GPUS[kind][0]]
