"""Rates that a cluster reaches: peaks of the catalogue times efficiencies, or what `zerofit calibrate` measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerofit.spec.cluster import Cluster
from zerofit.spec.local_machine import Calibration


class SourcedRate(NamedTuple):
    """A number and where it comes from."""

    value: float
    how: str


# share of the peak that the best matrix product reaches in bf16; one published table, measured by its contributors
_MAMF = "measured: stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS (bf16)"
BEST_MATMUL: dict[str, SourcedRate] = {
    "B200": SourcedRate(0.776, _MAMF),
    "H200": SourcedRate(0.838, _MAMF + ", its GH200 with the same chip"),
    "H100": SourcedRate(0.803, _MAMF),
    "H100 PCIe": SourcedRate(0.803, "assumed as H100 SXM"),
    "A100": SourcedRate(0.869, _MAMF),
    "MI250X": SourcedRate(0.767, _MAMF + ", one GCD"),
    "MI300X": SourcedRate(0.601, _MAMF),
}
OTHER_MATMUL = SourcedRate(0.80, "assumed: the middle of those that were measured")

EFFICIENCIES: dict[str, SourcedRate] = {
    "shapes": SourcedRate(0.85, "assumed: products in a model's shapes against the best shape"),
    "memory": SourcedRate(0.85, "assumed: streaming kernels against the data sheet's bandwidth"),
    "nvlink": SourcedRate(
        0.78, "measured by others: nccl-tests all_reduce_perf, 8 A100 reach 230 to 250 of 300 GB/s of bus bandwidth"
    ),
    "pcie ring": SourcedRate(
        0.6, "measured by others: nccl-tests all_reduce_perf, 8 H100 PCIe reach 35 to 45 of 63 GB/s"
    ),
    "network": SourcedRate(0.8, "assumed: GPUDirect RDMA on a quiet fabric"),
    "pcie": SourcedRate(0.8, "assumed: pinned copies"),
    "host": SourcedRate(0.6, "assumed: DeepSpeed's CPU Adam on all cores against the memory channels"),
    "nvme": SourcedRate(0.8, "assumed: large asynchronous reads and writes"),
    "cpu": SourcedRate(0.7, "assumed: oneDNN against the cores' peak"),
    "cpu bf16": SourcedRate(0.5, "assumed: no bf16 instructions, so that it is converted to fp32 and back"),
}
LAUNCH_S = SourcedRate(7e-6, "assumed: PyTorch eager, one op from Python, the device waiting")
HOP_S = SourcedRate(2e-6, "assumed: one step of a ring inside a node")
NETWORK_HOP_S = SourcedRate(6e-6, "assumed: one step of a ring between nodes")
CALL_S = SourcedRate(20e-6, "assumed: what a collective costs before its first byte")
ZERO3_HOOK_S = SourcedRate(
    300e-6, "measured on two CPU cores (benchmarks/tune_regret.py): fetching and releasing one parameter, in each pass"
)
CONTENTION = SourcedRate(0.15, "assumed: what compute loses of the time that a collective runs beside it")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a forecast counts with: bytes or FLOP a second of one rank, where nothing else is said."""

    flops: float
    memory: float
    launch_s: float
    ahead: bool  # launches run ahead of the device, as on GPUs
    link: float
    network: float
    pcie: float
    host: float  # host memory of a whole node under Adam
    nvme_read: float  # of a whole node
    nvme_write: float
    call_s: float
    hop_s: float
    network_hop_s: float
    peak: float | None  # FLOP/s of the data sheet, for MFU; None for CPUs
    sources: dict[str, str]  # what was assumed, measured or published


def rates_of(cluster: Cluster, precision: str, calibration: Calibration | None = None) -> Rates:
    """Return the rates of a cluster at a precision; `calibration` replaces what it has measured."""
    device, node = cluster.device, cluster.device.node
    measured = calibration or Calibration(kind=device.kind, device_name="", devices=0, date="")
    peak, share = device.peak(precision) or device.peak("fp32") or 0.0, _matmul(cluster, precision)
    assumed = {
        "flops": SourcedRate(peak * share.value, share.how),
        "memory": _share_of(device.bandwidth, "memory"),
        "launch_s": LAUNCH_S,
        "link": _share_of(device.link, "pcie ring" if "PCIe" in device.link_name else "nvlink"),
        "network": _share_of(node.network, "network"),
        "pcie": _share_of(device.pcie, "pcie"),
        "host": _share_of(node.host_bandwidth, "host"),
        "nvme_read": _share_of(node.nvme_read, "nvme"),
        "nvme_write": _share_of(node.nvme_write, "nvme"),
        "call_s": CALL_S,
    }
    reached = measured.matmul_flops.get(precision)
    found = {
        "flops": reached and reached * EFFICIENCIES["shapes"].value,
        "memory": measured.memory_bandwidth,
        "launch_s": measured.launch_s,
        "link": measured.link,
        "pcie": measured.host_copy,
        "host": measured.host_bandwidth,
        "nvme_read": measured.disk_read,
        "nvme_write": measured.disk_write,
        "call_s": measured.link_latency_s,
    }
    date = f"measured here on {measured.date[:10]}"
    chosen = {name: SourcedRate(rate, date) if (rate := found.get(name)) else assumed[name] for name in assumed}
    return Rates(
        **{name: rate.value for name, rate in chosen.items()},
        ahead=not cluster.on_cpu,
        hop_s=HOP_S.value,
        network_hop_s=NETWORK_HOP_S.value,
        peak=None if cluster.on_cpu else device.peak(precision),
        sources={name: rate.how for name, rate in chosen.items()},
    )


def _share_of(peak: float, efficiency: str) -> SourcedRate:
    share, how = EFFICIENCIES[efficiency]
    return SourcedRate(peak * share, how)


def _matmul(cluster: Cluster, precision: str) -> SourcedRate:
    """Return the share of the peak that the matrix products of a model reach."""
    if cluster.on_cpu:
        return EFFICIENCIES["cpu bf16" if precision == "bf16" else "cpu"]
    best, shapes = BEST_MATMUL.get(cluster.device.name, OTHER_MATMUL), EFFICIENCIES["shapes"]
    return SourcedRate(best.value * shapes.value, f"{best.how}; times {shapes.value:g}, {shapes.how}")
