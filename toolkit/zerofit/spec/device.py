"""A kind of device and its node: peak rates, sizes and prices, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1_000_000_000
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ListPrice:
    """On-demand price of a node per hour."""

    usd: float
    date: str  # of the listing
    source: str


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host, as published by its vendor; bandwidths in bytes per second and direction."""

    name: str
    gpus: int
    host_bytes: int  # host memory
    host_bandwidth: float  # of host memory: channels x transfers x 8 bytes
    network: float  # to other nodes, per GPU
    nvme_read: float  # of all local disks together
    nvme_write: float
    source: str
    price: ListPrice | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, used by one rank.

    Bandwidths are bytes per second; bandwidths of links count one direction.
    """

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
    architecture: str = ""  # hopper, cdna3, ...: decides memory outside of torch's allocator; "" if unknown
    compute_capability: tuple[int, int] = (8, 0)  # an A100's, as the next figure, if a user's file has none
    multiprocessors: int = 108

    def peak(self, precision: str) -> float | None:
        """Return the peak FLOP/s at "bf16", "fp16" or "fp32"; None if unsupported."""
        tflops = self.tflops.get(precision)
        return None if tflops is None else tflops * 1e12
