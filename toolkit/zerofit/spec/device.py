"""A kind of device: what one can do at most, with its sources."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.nodes import GB, GIB, Node


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as one rank sees it. Bandwidths are bytes a second, those of links in one direction."""

    kind: str  # what `--gpu` takes
    name: str  # words of the name that torch reports
    memory_bytes: int  # what the driver hands out in all ("total capacity" in torch's messages), not the maker's figure
    tflops: dict[str, float]  # peak by precision, dense, without TF32 (off by default)
    bandwidth: float  # of its own memory
    link: float  # to the other devices of its node
    link_name: str
    pcie: float  # to host memory, over PCIe or what takes its place
    node: Node  # what it usually stands in
    source: str  # of FLOP/s, bandwidth and link; data sheets are the makers'
    memory_source: str
    host_link: str = "PCIe"  # the name of the link to host memory

    def peak(self, precision: str) -> float | None:
        """Return peak FLOP/s at "bf16", "fp16" or "fp32"; None where it has no such arithmetic."""
        tflops = self.tflops.get(precision)
        return None if tflops is None else tflops * 1e12


PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # x16, one direction, after encoding (PCI-SIG)

# NVLink-C2C has 450 GB/s in one direction for each Grace CPU: a GH200's one GPU has it alone, two of a GB200 share it
C2C = 450.0 * GB


def gib(value: float) -> int:
    """Return bytes."""
    return int(value * GIB)
