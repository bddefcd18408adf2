"""Instance types of the large clouds: device, node, network and list price."""

from __future__ import annotations

from dataclasses import replace

from zerofit.spec.datacenter_gpus import DATACENTER_GPUS
from zerofit.spec.device import Device
from zerofit.spec.nodes import G4DN, G5, G6, G6E, GB, GIB, P3DN, ListPrice, Node

_AWS = "github.com/datareceipts/data-receipts, 109-gpu-pricing/hyperscalers.json: AWS, us-east-1"
_AZURE = "github.com/datareceipts/data-receipts, 109-gpu-pricing/compare.json: Azure, eastus"

P4D = Node(
    name="p4d.24xlarge",
    gpus=8,
    host_bytes=1152 * GIB,
    host_bandwidth=281.6 * GB,  # 2 x Xeon 8275CL: 6 channels of DDR4-2933 each
    network=50 * GB / 8,  # 400 Gb/s
    nvme_read=16 * GB,  # 8 x 1 TB
    nvme_write=8 * GB,
    source="AWS EC2 P4 page: 400 Gb/s of EFA, 8 TB of NVMe that reads 16 GB/s; write speed assumed",
    price=ListPrice(usd=21.957642, date="2026-11-09", source=_AWS),
)
P5 = Node(
    name="p5.48xlarge",
    gpus=8,
    host_bytes=2048 * GIB,
    host_bandwidth=409.6 * GB,  # 2 x EPYC 7R13: 8 channels of DDR4-3200 each
    network=50 * GB,  # 3,200 Gb/s
    nvme_read=25 * GB,  # 8 x 3.84 TB
    nvme_write=12 * GB,
    source="AWS EC2 P5 page: 3,200 Gb/s of EFA, 8 x 3.84 TB of NVMe; its speed assumed",
    price=ListPrice(usd=55.04, date="2026-11-09", source=_AWS),
)
P5EN = replace(
    P5,
    name="p5en.48xlarge",
    host_bandwidth=614.4 * GB,  # 2 x Sapphire Rapids: 8 channels of DDR5-4800 each
    price=ListPrice(usd=63.296, date="2026-08-06", source="github.com/dstackai/dstack/pull/4110: AWS, us-east-1"),
)
ND_A100 = Node(
    name="ND96asr_A100_v4",
    gpus=8,
    host_bytes=900 * GIB,
    host_bandwidth=409.6 * GB,  # 2 x EPYC 7V12: 8 channels of DDR4-3200 each
    network=25 * GB,  # 8 x 200 Gb/s HDR InfiniBand
    nvme_read=12 * GB,
    nvme_write=6 * GB,
    source="Microsoft Learn, ND A100 v4 series; the disks' speed assumed",
    price=ListPrice(usd=27.197, date="2026-11-09", source=_AZURE),
)
ND_H100 = Node(
    name="ND96isr_H100_v5",
    gpus=8,
    host_bytes=1900 * GIB,
    host_bandwidth=614.4 * GB,  # 2 x Xeon 8480C: 8 channels of DDR5-4800 each
    network=50 * GB,  # 8 x 400 Gb/s NDR InfiniBand
    nvme_read=25 * GB,  # 8 disks, 28,000 GiB
    nvme_write=12 * GB,
    source="Microsoft Learn, ND H100 v5 series; the disks' speed assumed",
    price=ListPrice(usd=98.32, date="2026-11-09", source=_AZURE),
)
A3_HIGH = Node(
    name="a3-highgpu-8g",
    gpus=8,
    host_bytes=1872 * GIB,
    host_bandwidth=614.4 * GB,  # 2 x Sapphire Rapids
    network=4 * 25 * GB / 8,  # 4 x 200 Gb/s in addition to the host's NIC
    nvme_read=12 * GB,  # 16 x 375 GB
    nvme_write=6 * GB,
    source="cloud.google.com/compute/docs/gpus/gpu-network-bandwidth, accelerator-optimized machines; disks assumed",
    price=ListPrice(
        usd=8 * 10.9791,
        date="2026-09-26",
        source="github.com/tgarg01/silybench-data, gpu_prices.csv: Google, us-central1, 8 x the price of one GPU",
    ),
)
A3_MEGA = replace(A3_HIGH, name="a3-megagpu-8g", network=8 * 25 * GB / 8, price=None)  # 8 x 200 Gb/s
A3_ULTRA = replace(
    A3_HIGH,
    name="a3-ultragpu-8g",
    host_bytes=2952 * GIB,
    network=50 * GB,  # 8 x 400 Gb/s ConnectX-7
    price=ListPrice(
        usd=8 * 10.4365,
        date="2026-10-13",
        source="huggingface.co/datasets/tanod/cloud-gpu-list-prices: Google's billing catalogue, us-central1",
    ),
)

_DEVICES = {device.kind: device for device in DATACENTER_GPUS}
# by the instance type in lower case
INSTANCES: dict[str, Device] = {
    name: replace(_DEVICES[kind], node=node)
    for name, kind, node in (
        ("p3dn.24xlarge", "v100-32gb", P3DN),
        ("g4dn.metal", "t4", G4DN),
        ("g5.48xlarge", "a10g", G5),
        ("g6.48xlarge", "l4", G6),
        ("g6e.48xlarge", "l40s", G6E),
        ("p4d.24xlarge", "a100-40gb", P4D),
        (
            "p4de.24xlarge",
            "a100-80gb",
            replace(P4D, name="p4de.24xlarge", price=ListPrice(usd=27.44705, date="2026-11-09", source=_AWS)),
        ),
        ("p5.48xlarge", "h100-80gb", P5),
        ("p5en.48xlarge", "h200", P5EN),
        ("nd96asr_a100_v4", "a100-40gb", ND_A100),
        ("nd96isr_h100_v5", "h100-80gb", ND_H100),
        ("a3-highgpu-8g", "h100-80gb", A3_HIGH),
        ("a3-megagpu-8g", "h100-80gb", A3_MEGA),
        ("a3-ultragpu-8g", "h200", A3_ULTRA),
    )
}
