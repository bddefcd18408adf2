"""Usual nodes of GPUs: host memory, network and disks if the user does not give them."""

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


DGX1 = Node(
    name="DGX-1 (8 V100)",
    gpus=8,
    host_bytes=512 * GIB,
    host_bandwidth=153.6 * GB,  # 2 x Xeon E5-2698 v4: 4 channels of DDR4-2400 each
    network=4 * 12.5 * GB / 8,  # 4 x 100 Gb/s EDR
    nvme_read=2.0 * GB,  # 4 x 1.92 TB SATA SSD, RAID 0: 0.5 GB/s each
    nvme_write=1.9 * GB,
    source="NVIDIA DGX-1 data sheet and user guide (2017-2019)",
)
DGX_A100 = Node(
    name="DGX A100",
    gpus=8,
    host_bytes=1024 * GIB,  # 2 TB in the 640 GB edition
    host_bandwidth=409.6 * GB,  # 2 x EPYC 7742: 8 channels of DDR4-3200 each
    network=25 * GB,  # 8 x 200 Gb/s HDR
    nvme_read=25 * GB,  # 4 x 3.84 TB PCIe gen 4, RAID 0
    nvme_write=10 * GB,
    source="NVIDIA DGX A100 data sheet and user guide (2020, 2021)",
)
DGX_H100 = Node(
    name="DGX H100 / H200",
    gpus=8,
    host_bytes=2048 * GIB,
    host_bandwidth=614.4 * GB,  # 2 x Xeon 8480C: 8 channels of DDR5-4800 each
    network=50 * GB,  # 8 x 400 Gb/s NDR
    nvme_read=50 * GB,  # 8 x 3.84 TB PCIe gen 4, RAID 0
    nvme_write=25 * GB,
    source="NVIDIA DGX H100/H200 data sheet and user guide (2023, 2024)",
)
DGX_B200 = Node(
    name="DGX B200",
    gpus=8,
    host_bytes=2048 * GIB,
    host_bandwidth=716.8 * GB,  # 2 x Xeon 8570: 8 channels of DDR5-5600 each
    network=50 * GB,  # 8 x 400 Gb/s
    nvme_read=50 * GB,
    nvme_write=25 * GB,
    source="NVIDIA DGX B200 data sheet (2024)",
)
DGX_B300 = Node(
    name="DGX B300",
    gpus=8,
    host_bytes=2048 * GIB,
    host_bandwidth=819.2 * GB,  # 2 x Xeon 6776P: 8 channels of DDR5-6400 each
    network=100 * GB,  # 8 x 800 Gb/s
    nvme_read=50 * GB,
    nvme_write=25 * GB,
    source="NVIDIA DGX B300 data sheet (2025)",
)
GB200_TRAY = Node(
    name="compute tray of a GB200 NVL72 (4 GPUs)",
    gpus=4,
    host_bytes=960 * GIB,
    host_bandwidth=1024 * GB,  # 2 Grace: 512 GB/s of LPDDR5X each
    network=50 * GB,  # 4 x 400 Gb/s; NVLink between the 18 trays of a rack is faster
    nvme_read=25 * GB,
    nvme_write=12 * GB,
    source="NVIDIA GB200 NVL72 data sheet (2024); disks assumed",
)
GH200_SUPERCHIP = Node(
    name="GH200 superchip (1 GPU)",
    gpus=1,
    host_bytes=480 * GIB,
    host_bandwidth=512 * GB,  # LPDDR5X, "up to": 486 in STREAM (arXiv:2407.07850)
    network=50 * GB,  # 400 Gb/s
    nvme_read=12 * GB,
    nvme_write=6 * GB,
    source="NVIDIA GH200 Grace Hopper Superchip data sheet (2023); adapter and two gen 4 disks assumed",
)
H100_PCIE_SERVER = Node(
    name="server with 8 H100 PCIe",
    gpus=8,
    host_bytes=1024 * GIB,
    host_bandwidth=614.4 * GB,
    network=25 * GB,
    nvme_read=12 * GB,
    nvme_write=6 * GB,
    source="assumed: two 400 Gb/s adapters for four GPUs, as in NVIDIA-certified PCIe servers (NVIDIA HGX/PCIe "
    "reference designs, 2023), two gen 4 disks",
)
P3DN = Node(
    name="p3dn.24xlarge (8 V100 32 GB)",
    gpus=8,
    host_bytes=768 * GIB,
    host_bandwidth=255 * GB,  # 2 x Xeon 8175M: 6 channels of DDR4-2666 each
    network=12.5 * GB / 8,  # 100 Gb/s
    nvme_read=3.2 * GB,
    nvme_write=1.4 * GB,
    source="AWS EC2 P3 page (2018); disks assumed as in AWS's i3 instances",
)
G4DN = Node(
    name="g4dn.metal (8 T4)",
    gpus=8,
    host_bytes=384 * GIB,
    host_bandwidth=281 * GB,  # 2 x Xeon 8259CL: 6 channels of DDR4-2933 each
    network=12.5 * GB / 8,  # 100 Gb/s
    nvme_read=3.4 * GB,
    nvme_write=1.8 * GB,
    source="AWS EC2 G4 page (2019); disks assumed",
)
G5 = Node(
    name="g5.48xlarge (8 A10G)",
    gpus=8,
    host_bytes=768 * GIB,
    host_bandwidth=409.6 * GB,  # EPYC 7R32: two sockets of 8 channels of DDR4-3200
    network=12.5 * GB / 8,  # 100 Gb/s
    nvme_read=6.0 * GB,
    nvme_write=3.0 * GB,
    source="AWS EC2 G5 page (2021); disks assumed",
)
G6 = Node(
    name="g6.48xlarge (8 L4)",
    gpus=8,
    host_bytes=768 * GIB,
    host_bandwidth=409.6 * GB,
    network=12.5 * GB / 8,  # 100 Gb/s
    nvme_read=6.0 * GB,
    nvme_write=3.0 * GB,
    source="AWS EC2 G6 page (2024); disks assumed",
)
G6E = Node(
    name="g6e.48xlarge (8 L40S)",
    gpus=8,
    host_bytes=1536 * GIB,
    host_bandwidth=409.6 * GB,
    network=50 * GB / 8,  # 400 Gb/s
    nvme_read=6.0 * GB,
    nvme_write=3.0 * GB,
    source="AWS EC2 G6e page (2024); disks assumed",
)
WORKSTATION = Node(
    name="workstation",
    gpus=4,
    host_bytes=256 * GIB,
    host_bandwidth=204.8 * GB,  # 8 channels of DDR4-3200
    network=1.25 * GB / 4,  # 10 Gb/s
    nvme_read=5.0 * GB,
    nvme_write=3.0 * GB,
    source="assumed: one Threadripper Pro or EPYC, 10 Gb/s Ethernet, one gen 4 disk",
)
FRONTIER = Node(
    name="Frontier node (4 MI250X, 8 ranks)",
    gpus=8,
    host_bytes=512 * GIB,
    host_bandwidth=205 * GB,
    network=4 * 25 * GB / 8,  # 4 x 200 Gb/s Slingshot
    nvme_read=8.0 * GB,
    nvme_write=4.0 * GB,
    source="OLCF Frontier user guide, system overview (2023)",
)
MI300X_PLATFORM = Node(
    name="MI300X platform",
    gpus=8,
    host_bytes=2048 * GIB,
    host_bandwidth=921.6 * GB,  # 2 x EPYC 9004: 12 channels of DDR5-4800 each
    network=50 * GB,  # 8 x 400 Gb/s
    nvme_read=25 * GB,
    nvme_write=12 * GB,
    source="AMD Instinct MI300X platform data sheet (2023); disks assumed",
)
THIS = Node(
    name="this machine's kind",
    gpus=1,
    host_bytes=0,  # read from the machine
    host_bandwidth=20 * GB,
    network=1.25 * GB,
    nvme_read=2.0 * GB,
    nvme_write=1.0 * GB,
    source="assumed until `zerofit calibrate` measures it: two memory channels, 10 Gb/s Ethernet, one disk",
)
