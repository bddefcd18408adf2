"""Estimate a cluster's rates.

A rate is a peak of the catalog times an efficiency, or a measurement of `zerofit calibrate`. Fused attention has its
own rates by kernel, GPU and length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from zerofit.plan.measured_rates import CollectiveTable, KernelTable
from zerofit.plan.rate_catalog import SourcedRate, entry_of, rate_catalog, rate_of
from zerofit.plan.software import USUAL, Software
from zerofit.spec.cluster import Cluster
from zerofit.spec.local_machine import Calibration
from zerofit.spec.model_facts import AttentionKernel
from zerofit.spec.profile import Kernel

ROWS = 128  # queries of a block of a fused attention kernel (flash_fwd_launch_template.h)
NARROW = 64  # elements of a head up to which kernels are slower
_FITTED = "fitted to published throughput (benchmarks/time_accuracy.py)"


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


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients for GPUs that were fitted to published throughput; no other rate was."""

    memory: float = 0.72  # share of the data sheet's bandwidth reached by kernels without matrix multiplications
    network: float = 0.634  # share of the wire speed between nodes reached by collectives
    network_hop_s: float = 33e-6  # one step of a ring between nodes, with the small messages of many ranks
    exposed_between: float = 0.55  # share of a collective between nodes that is not hidden by compute
    hook_s: float = 417e-6  # host time for ZeRO-3 to fetch and release one parameter, with streams and events


FITTED = Coefficients()


class ProductRate(NamedTuple):
    """The share of a data sheet's peak that matrix multiplications reach.

    For a product of shape M x N x K, this share is `large / (1 + edge * (1/M + 1/N + 1/K))`.
    """

    large: float
    edge: float
    how: str


# rate -> kind in a trace whose factor corrects it; kernels and collectives have kinds of their own
_HOST = "launches and hooks"
TRACED = {
    "launch_s": _HOST,
    "engine_launch_s": _HOST,
    "hook_s": _HOST,
    "gradient_s": _HOST,
    **dict.fromkeys(("streaming", "adam", "sgd", "host"), "optimizer"),
}
UNTOUCHED = ("exposed_between", "unaligned", "unaligned_even")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one rank, in bytes or FLOP per second unless stated otherwise."""

    flops: float
    memory: float
    streaming: float  # of long passes over contiguous memory
    adam: float  # Adam's step on the device
    sgd: float  # the step of SGD with momentum
    launch_s: float
    engine_launch_s: float  # host time between two of the engine's own kernels
    gradient_s: float  # host time per parameter's gradient and backward
    hook_s: float  # host time to fetch and release one parameter under ZeRO-3
    channel: Mapping[str, float]  # per channel of a batch norm, by dtype: one block of a GPU processes a channel
    edge: float  # elements of a matrix multiplication's dimension that tiles waste
    general: float  # grouped convolutions on the general cores, per channel of a group
    depthwise: float  # lower limit of the rate by `general` in fp16
    attention: float  # long sequences in fused kernels, for the matrix multiplications that they compute
    attention_shape: AttentionRate  # factors on `attention` for a kernel's shape
    unaligned: float  # relative rate of matrix multiplications with unaligned rows: odd numbers of elements
    unaligned_even: float  # the same for even numbers of elements
    unfused: float  # share of the traffic between matrix multiplications that is left; 1: one kernel per op
    exposed_inside: float  # share of a collective that compute does not hide, within a node
    exposed_between: float  # the same between nodes
    ahead: bool  # whether launches run ahead of the device, as on GPUs
    link: float
    link_reduce: float  # of all-reduces among 8 or more ranks, which a switch reduces if it can
    network: float
    pcie: float  # between device and page-locked host memory
    pageable: float  # between device and other host memory, if that is slower
    host: float  # host memory of a node under Adam
    nvme_read: float  # of a node
    nvme_write: float
    call_s: float
    hop_s: float
    network_hop_s: float
    peak: float | None  # FLOP/s of the data sheet, for MFU; None for CPUs
    sources: dict[str, str]  # where each rate comes from
    kernels: KernelTable | None = None  # by shape, instead of the rates above
    collectives: CollectiveTable | None = None  # within a node, instead of link and call_s
    longer: Mapping[str, float] = field(default_factory=dict)  # by kind of a trace: factor on the time by these rates
    slower: float = 1.0  # the factor for everything; it is applied to the rates above but not to the tables

    def host_copy(self, pinned: bool) -> float:
        """Return the bytes per second of copies between device and host memory."""
        return self.pcie if pinned else min(self.pcie, self.pageable)


# Each rate comes from the first source that exists: a measurement of `zerofit calibrate` on this kind of device, a rate
# that others have measured, a fit to published throughput, or an assumption. `SourcedRate.how` names the source, and
# `--json` prints it. A trace (`--from-trace`) then multiplies the time of each kind of kernel.
def rates_of(
    cluster: Cluster,
    precision: str,
    calibration: Calibration | None = None,
    software: Software = USUAL,
    fitted: Coefficients = FITTED,
) -> Rates:
    """Return a cluster's rates at `precision`. Measurements in `calibration` replace estimates."""
    device = cluster.device
    measured = calibration or Calibration(kind=device.kind, device_name="", devices=0, date="")
    products = _products(cluster, precision)
    assumed = _assumed(cluster, precision, products, software, fitted)
    # kernels without matrix multiplications are slower than one long addition, which was measured
    streamed = 1.0 if cluster.on_cpu else fitted.memory / rate_of("streaming").value
    measured_rates: dict[str, float | None] = {
        "memory": measured.memory_bandwidth and measured.memory_bandwidth * streamed,
        "streaming": _streaming(cluster, measured),
        "adam": measured.adam_bandwidth,
        "sgd": measured.sgd_bandwidth,
        "launch_s": measured.launch_s,
        "hook_s": measured.hook_s,
        "gradient_s": measured.gradient_s,
        "link": measured.link,
        "link_reduce": measured.link,
        "pcie": measured.host_copy,
        "pageable": measured.host_copy if cluster.on_cpu else None,
        "host": measured.host_bandwidth,
        "nvme_read": measured.disk_read,
        "nvme_write": measured.disk_write,
        "call_s": measured.call_s or measured.link_latency_s,
    }
    if measured.launch_s and not cluster.on_cpu:  # the host's other work is as much slower as its launches
        slower = measured.launch_s / rate_of("launch").value
        measured_rates |= {name: slower * assumed[name].value for name in ("engine_launch_s", "gradient_s")}
    reached = measured.matmul_flops.get(precision)
    if reached:  # the rates of other kernels with FLOPs, which were not measured, change by the same factor
        faster = reached * rate_catalog()["model_shapes"] / assumed["flops"].value
        measured_rates |= {
            name: assumed[name].value * faster for name in ("flops", "attention", "general", "depthwise")
        }
    fused = "compiled" if software.compile else "fused" if software.liger_kernel else ""
    date, channel = f"measured here on {measured.date[:10]}", rate_catalog()["batch_norm_channel"]
    chosen = {
        name: SourcedRate(rate, date) if (rate := measured_rates.get(name)) else assumed[name] for name in assumed
    }
    if measured.origin:
        chosen = {name: _by_trace(name, rate, measured) for name, rate in chosen.items()}
    return Rates(
        **{name: rate.value for name, rate in chosen.items()},
        ahead=not cluster.on_cpu,
        edge=products.edge,
        channel={} if cluster.on_cpu else {name: rate / measured.slower for name, rate in channel.items()},
        attention_shape=_attention_rate(cluster, precision, software),
        unfused=rate_of(fused).value if fused else 1.0,
        exposed_inside=rate_of("exposed inside").value,
        hop_s=measured.slower * rate_of("hop").value,
        peak=None if cluster.on_cpu else device.peak(precision),
        sources={name: rate.how for name, rate in chosen.items()},
        kernels=KernelTable(measured.kernels) if measured.kernels else None,
        collectives=CollectiveTable(measured.collectives) if measured.collectives else None,
        longer=measured.longer,
        slower=measured.slower,
    )


def _by_trace(name: str, rate: SourcedRate, measured: Calibration) -> SourcedRate:
    """Return a value of `Rates` corrected by a trace.

    The trace's factor multiplies values in seconds, and divides values per second.
    """
    if name in UNTOUCHED:
        return rate
    kind = TRACED.get(name, "")
    times, how = measured.slower * measured.longer.get(kind, 1.0), f"{rate.how}; corrected by {measured.origin}"
    return SourcedRate(rate.value * times if name.endswith("_s") else rate.value / times, how)


def _streaming(cluster: Cluster, measured: Calibration) -> float | None:
    """Return the measured bytes per second of long passes over memory, if any."""
    # on a CPU most passes fill newly allocated memory, as copies do
    copies = [kernel for kernel in measured.kernels if kernel.kind == "copy" and kernel.dtype == "float32"]
    if not cluster.on_cpu or not copies:
        return measured.memory_bandwidth
    largest = max(copies, key=lambda kernel: kernel.moved_bytes)
    return largest.moved_bytes / largest.seconds


def _attention_rate(cluster: Cluster, precision: str, software: Software) -> AttentionRate:
    if cluster.on_cpu or precision == "fp32":  # no fused kernel
        return PLAIN
    return attention_rate(software.attn_implementation, cluster.device.name)


def _assumed(
    cluster: Cluster, precision: str, products: ProductRate, software: Software, fitted: Coefficients
) -> dict[str, SourcedRate]:
    """Return the rates without a calibration, with their sources. Some of them are fitted."""
    device, node = cluster.device, cluster.device.node
    peak = device.peak(precision) or device.peak("fp32") or 0.0
    shape = _attention_rate(cluster, precision, software)
    attention = SourcedRate(products.large, products.how) if shape is PLAIN else SourcedRate(shape.share, shape.how)
    on_cpu, general = cluster.on_cpu, device.peak("fp32") or 0.0
    unaligned, launch = entry_of("unaligned", device.name), rate_of("launch")
    # a superchip's GPU reads all host memory by its own page tables; more GPUs come with more Grace CPUs
    superchip = device.host_link == "NVLink-C2C"
    hosts = max(1.0, cluster.gpus / node.gpus) if superchip else 1.0
    ring = rate_of("pcie ring" if "PCIe" in device.link_name else "nvlink")
    switch = f"{device.link_name[:8]} all-reduce"  # of NVLink 4 and 5
    return {
        "flops": SourcedRate(peak * products.large, products.how),
        "attention": SourcedRate(peak * attention.value, attention.how),
        "unaligned": SourcedRate(unaligned["odd"], unaligned["source"]),
        "unaligned_even": SourcedRate(unaligned["even"], unaligned["source"]),
        "general": _share_of(general, rate_of("cpu general" if on_cpu else "general")),
        "depthwise": _share_of(general, rate_of("cpu general" if on_cpu else "depthwise")),
        "memory": _share_of(device.bandwidth, rate_of("cpu memory") if on_cpu else _fitted(fitted.memory)),
        "streaming": _share_of(device.bandwidth, rate_of("cpu memory") if on_cpu else rate_of("streaming")),
        "adam": _share_of(device.bandwidth, rate_of("cpu memory" if on_cpu else "adam")),
        "sgd": _share_of(device.bandwidth, rate_of("cpu memory" if on_cpu else "adam")),
        "launch_s": launch,
        "engine_launch_s": rate_of("no engine launch") if on_cpu else _share_of(launch.value, rate_of("engine launch")),
        "gradient_s": rate_of("cpu gradient") if on_cpu else _share_of(launch.value, rate_of("gradient")),
        "hook_s": rate_of("cpu hook") if on_cpu else _fitted(fitted.hook_s),
        "link": _share_of(device.link, ring),
        "link_reduce": _share_of(device.link, rate_of(switch) if switch in rate_catalog()["rates"] else ring),
        "network": _share_of(node.network, _fitted(fitted.network)),
        "network_hop_s": _fitted(fitted.network_hop_s),
        "exposed_between": _fitted(fitted.exposed_between),
        "pcie": _share_of(device.pcie, rate_of(device.host_link)),
        "pageable": _share_of(device.pcie, rate_of(device.host_link)) if on_cpu or superchip else rate_of("pageable"),
        "host": _host(cluster, hosts * node.host_bandwidth, software.cpu_threads),
        "nvme_read": _share_of(node.nvme_read, rate_of("nvme")),
        "nvme_write": _share_of(node.nvme_write, rate_of("nvme")),
        "call_s": rate_of("call"),
    }


def _host(cluster: Cluster, bandwidth: float, threads: int | None) -> SourcedRate:
    """Return the bytes per second of a node's host memory under Adam, with `threads` per rank."""
    kind = "Grace host" if cluster.device.host_link == "NVLink-C2C" else "cpu host" if cluster.on_cpu else "host"
    every = _share_of(bandwidth, rate_of(kind))
    thread = rate_of("thread")
    few = (threads or 0) * cluster.gpus * thread.value
    return SourcedRate(few, f"{threads} threads per rank; {thread.how}") if 0 < few < every.value else every


def _fitted(value: float) -> SourcedRate:
    return SourcedRate(value, _FITTED)


def _share_of(peak: float, share: SourcedRate) -> SourcedRate:
    return SourcedRate(peak * share.value, share.how)


def _products(cluster: Cluster, precision: str) -> ProductRate:
    if cluster.on_cpu:
        share, how = rate_of("cpu bf16" if precision == "bf16" else "cpu")
        return ProductRate(share, 0.0, how)
    entry = entry_of("products", "fp32" if precision == "fp32" else cluster.device.name)
    edge, how = entry.get("edge", rate_catalog()["edge"]), entry["source"]
    if "large" in entry:
        return ProductRate(entry["large"], edge, how)
    shapes = rate_catalog()["model_shapes"]
    return ProductRate(entry["best"] * shapes, edge, f"{how}; times {shapes:g} for a model's shapes")
