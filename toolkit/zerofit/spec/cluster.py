"""The hardware that a plan is for: how many of which device, in which hosts."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.device import Device


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` equal hosts with `gpus` devices each, one rank a device."""

    device: Device
    gpus: int  # of one node
    nodes: int = 1
    host_bytes: int  # of one node's memory
    host_scales: bool = False  # it is the devices' share of a larger node: fewer devices come with less
    nvme_bytes: int = 0  # of one node's disks that offloading may fill; 0: none
    notes: tuple[str, ...] = ()  # what was assumed because nothing was said

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.gpus * self.nodes

    @property
    def on_cpu(self) -> bool:
        """Whether devices are host processes."""
        return self.device.kind == "cpu"
