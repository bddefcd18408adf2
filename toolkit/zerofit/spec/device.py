"""A kind of device: its peak rates, with sources."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.nodes import GB, GIB, Node


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, used by one rank. Bandwidths are bytes per second; those of links count one direction."""

    kind: str  # the name for `--gpu`
    name: str  # words of the name that torch reports
    memory_bytes: int  # "total capacity" in torch's messages, not the vendor's figure
    tflops: dict[str, float]  # dense peak by precision, without TF32 (off by default)
    bandwidth: float  # of the device's memory
    link: float  # to the other devices of its node
    link_name: str
    pcie: float  # to host memory, over PCIe or NVLink-C2C
    node: Node  # its usual node
    source: str  # of FLOP/s, bandwidth and link
    memory_source: str
    host_link: str = "PCIe"  # name of the link to host memory

    def peak(self, precision: str) -> float | None:
        """Return the peak FLOP/s at "bf16", "fp16" or "fp32", or None if the device does not support it."""
        tflops = self.tflops.get(precision)
        return None if tflops is None else tflops * 1e12


PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # x16, one direction, after encoding (PCI-SIG)

# NVLink-C2C has 450 GB/s per direction and Grace CPU: a GH200 has one GPU per CPU, a GB200 two
C2C = 450.0 * GB


def gib(value: float) -> int:
    """Return bytes."""
    return int(value * GIB)
