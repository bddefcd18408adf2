"""Estimate a cluster's rates: peaks of the catalogue times efficiencies, or measurements of `zerofit calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zerofit.plan.attention import PLAIN, AttentionRate, attention_rate
from zerofit.plan.measured_rates import CollectiveTable, KernelTable
from zerofit.plan.software import USUAL, Software
from zerofit.spec.cluster import Cluster
from zerofit.spec.local_machine import Calibration


class SourcedRate(NamedTuple):
    """A number with its source."""

    value: float
    how: str


_FITTED = "fitted to published throughput (benchmarks/time_accuracy.py)"


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients for GPUs that were fitted to published throughput; no other coefficient was fitted."""

    memory: float = 0.72  # share of the data sheet's bandwidth reached by kernels without matrix multiplications
    network: float = 0.68  # share of the wire speed between nodes reached by collectives
    network_hop_s: float = 33e-6  # one step of a ring between nodes, with the small messages of many ranks
    exposed_between: float = 0.6  # share of a collective between nodes that is not hidden by compute
    hook_s: float = 405e-6  # host time for ZeRO-3 to fetch and release one parameter, with streams and events


FITTED = Coefficients()


class ProductRate(NamedTuple):
    """Rate of 16-bit matrix multiplications: large / (1 + edge (1/M + 1/N + 1/K)) of the data sheet's peak."""

    large: float
    edge: float
    how: str


_MAMF = "measured: stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS (bf16)"
_SIMUMAX = "measured: MooreThreads/SimuMax configs/system, "
OTHER_EDGE = 120.0  # assumed for other GPUs, between the measured values
MODEL_SHAPES = 0.85  # rate of large matrix multiplications in a model's shapes, relative to the best rate (A100: 0.91)


def _best(share: float, how: str) -> ProductRate:
    return ProductRate(share * MODEL_SHAPES, OTHER_EDGE, f"{how}; times {MODEL_SHAPES:g} for a model's shapes")


PRODUCTS: dict[str, ProductRate] = {
    # error of the rule: 3 % (median) and 12 % (90th percentile) of the A100's table, 6 % and 25 % of the B200's
    "A100": ProductRate(0.787, 154, _SIMUMAX + "a100_pcie: 183 matrix multiplications with shapes from training"),
    "B200": ProductRate(0.509, 92, _SIMUMAX + "b200_bf16_ceperm: 514 matrix multiplications with shapes from training"),
    "H100": ProductRate(0.60, OTHER_EDGE, "measured: KempnerInstitute/KempnerForge profiling: 552 TFLOP/s in training"),
    "H200": _best(0.803, _MAMF + ", its H100"),
    "RTX 4090": _best(0.92, "measured: DefTruth/CUDA-Learn-Notes, hgemm: 105 to 115 of an L20's 119.5 TFLOP/s"),
    "RTX PRO 6000": _best(0.83, "measured: zzc0721/torch-performance-test-data#161: 417 of 503.8 TFLOP/s"),
    "MI250X": _best(0.767, _MAMF + ", one GCD"),
    "MI300X": _best(0.601, _MAMF),
}
_ALIKE = {  # same chip or generation
    "A800": "A100",
    "H800": "H100",
    "GH200": "H100",
    "B300": "B200",
    "GB200": "B200",
    "L20": "RTX 4090",
    "RTX 3090": "RTX 4090",
    "MI325X": "MI300X",
}
PRODUCTS |= {name: PRODUCTS[other] for name, other in _ALIKE.items()}
OTHER_PRODUCTS = _best(0.80, "assumed: the middle of the measured rates")
FP32_PRODUCTS = SourcedRate(0.92, "assumed: cuBLAS's matrix multiplications without TF32")


class UnalignedShare(NamedTuple):
    """Rate of 16-bit matrix multiplications with rows of no multiple of 16 bytes, relative to aligned rows."""

    odd: float  # rows of an odd number of elements
    even: float  # rows of a multiple of two or four elements
    how: str


UNALIGNED: dict[str, UnalignedShare] = {
    "H100": UnalignedShare(
        0.16, 0.34, "measured: 50,257 to 50,264 and 30,522 to 30,528 columns (benchmarks/results/gpu-kernels.json)"
    ),
}
UNALIGNED["H200"] = UNALIGNED["H100 PCIe"] = UNALIGNED["H800"] = UNALIGNED["GH200"] = UNALIGNED["H100"]
UNALIGNED["A100"] = UNALIGNED["A800"] = UnalignedShare(
    0.42,
    0.42,
    "karpathy/nanoGPT: a vocabulary of 50,304 instead of 50,257 makes GPT-2's steps on A100s 25 % faster",
)
OTHER_UNALIGNED = UnalignedShare(1.0, 1.0, "assumed: no figure is known")
# bytes per second and channel of batch norm, by dtype: one block processes a full channel of NCHW. The kernels are
# cuDNN's; for bf16, which cuDNN does not support there, torch's (ATen/native/cuda/Normalization.cuh). Measured on
# an H100 with 32 and 64 channels (benchmarks/results/gpu-kernels.json)
BATCH_NORM_CHANNEL = {"float32": 15e9, "float16": 7.3e9, "bfloat16": 5e9}

EFFICIENCIES: dict[str, SourcedRate] = {
    "general": SourcedRate(
        0.022,
        "measured on an H100: grouped convolutions in NCHW, forward and backward together, per channel of a group "
        "(benchmarks/results/gpu-kernels.json), relative to the general cores' float32 peak",
    ),
    "depthwise": SourcedRate(
        0.06,
        "measured on an H100: grouped convolutions by cuDNN, float16 only (benchmarks/results/gpu-kernels.json)",
    ),
    "host": SourcedRate(
        0.43,
        "measured by others: ZeRO-Offload (Ren et al. 2021), table 4: DeepSpeed's CPU Adam on 1 to 10 billion "
        "parameters moves 93 to 127 of the 256 GB/s of a DGX-2's two Xeon 8168, with all their cores",
    ),
    "Grace host": SourcedRate(
        0.68,
        "assumed: a Grace has one socket, so its threads read no other socket's memory; STREAM reaches 486 of 512 GB/s "
        "(arXiv:2407.07850)",
    ),
    "cpu general": SourcedRate(0.5, "assumed: grouped convolutions relative to the cores' peak"),
    "nvlink": SourcedRate(
        0.78, "measured by others: nccl-tests all_reduce_perf, 8 A100 reach 230 to 250 of 300 GB/s of bus bandwidth"
    ),
    "NVLink 4 all-reduce": SourcedRate(
        1.06,
        "measured by others: nccl-tests all_reduce_perf, 8 H100 or H200 reduce in the switch: 474 to 483 of 450 GB/s",
    ),
    "NVLink 5 all-reduce": SourcedRate(
        0.93, "measured by others: nccl-tests all_reduce_perf, reduced in the switch: 8 B200 reach 839 to 846 of 900"
    ),
    "pcie ring": SourcedRate(
        0.6, "measured by others: nccl-tests all_reduce_perf, 8 H100 PCIe reach 35 to 45 of 63 GB/s"
    ),
    "adam": SourcedRate(0.82, "measured: fused AdamW on an H100 (benchmarks/results/gpu-environment.json)"),
    "PCIe": SourcedRate(0.8, "assumed: page-locked copies"),
    "NVLink-C2C": SourcedRate(
        0.75,
        "measured by others: Schieffer et al. 2024 (arXiv:2407.07850): a GH200 copies 375 GB/s from the host and 297 "
        "to it, of 450",
    ),
    "nvme": SourcedRate(0.8, "assumed: large asynchronous reads and writes"),
    "cpu": SourcedRate(0.6, "assumed: share of the cores' peak that oneDNN reaches with a model's shapes"),
    "cpu bf16": SourcedRate(0.42, "assumed: no bf16 instructions, so values are converted to fp32 and back"),
    "cpu memory": SourcedRate(0.85, "assumed: share of memory bandwidth that streaming kernels reach"),
    "cpu host": SourcedRate(0.6, "assumed: share of memory bandwidth that DeepSpeed's CPU Adam reaches on all cores"),
}
THREAD = SourcedRate(12e9, "measured: torch's fused AdamW with one thread on an EPYC server: 12 to 14 GB/s")
PAGEABLE = SourcedRate(
    7.2e9, "measured on an H100: images of 38.5 MB from pageable memory (benchmarks/results/gpu-training.json)"
)
LAUNCH_S = SourcedRate(7e-6, "assumed: PyTorch eager, one op from Python while the device waits")
HOP_S = SourcedRate(3.4e-6, "NCCL's own model, src/graph/tuning.cc: one step of a ring over NVLink, protocol Simple")
CALL_S = SourcedRate(20e-6, "assumed: latency of a collective")
CPU_HOOK_S = SourcedRate(200e-6, "measured by `zerofit calibrate` on two cores: 190 to 220 us")
CPU_GRADIENT_S = SourcedRate(75e-6, "measured by `zerofit calibrate` on two cores: 60 to 90 us")
_ENGINE_LAUNCH = SourcedRate(
    0.44, "measured: GPT-2 and ResNet-50 at stage 0 on an H100: kernels outside of modules and autograd"
)
_GRADIENT = SourcedRate(4.5, "measured: BERT-large at stage 1 on an H100: the time of this many launches")
NO_ENGINE_LAUNCH = SourcedRate(0.0, "included in the host's time per gradient")
STREAMING = SourcedRate(0.89, "measured: one long addition on an H100 (benchmarks/results/gpu-environment.json)")
COMPILED, FUSED = 0.5, 0.6  # assumed: traffic that torch.compile and Liger leave between matrix multiplications
EXPOSED_INSIDE = SourcedRate(0.15, "assumed: share of a collective's time by which it slows compute")
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
    """The rates of a forecast per rank, in bytes or FLOP per second unless stated otherwise."""

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
        """Return bytes per second between device and host memory, page-locked or not."""
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
    """Return a cluster's rates at a precision; measurements of `calibration` replace estimates."""
    device = cluster.device
    measured = calibration or Calibration(kind=device.kind, device_name="", devices=0, date="")
    products = _products(cluster, precision)
    assumed = _assumed(cluster, precision, products, software, fitted)
    found: dict[str, float | None] = {
        "memory": measured.memory_bandwidth and measured.memory_bandwidth * _of_streaming(cluster, fitted),
        "streaming": _passes(cluster, measured),
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
    if measured.launch_s and not cluster.on_cpu:
        slower = measured.launch_s / LAUNCH_S.value
        found |= {name: slower * assumed[name].value for name in ("engine_launch_s", "gradient_s")}
    reached = measured.matmul_flops.get(precision)
    if reached:  # the rates of other kernels with FLOPs, which were not measured, change by the same factor
        faster = reached * MODEL_SHAPES / assumed["flops"].value
        found |= {name: assumed[name].value * faster for name in ("flops", "attention", "general", "depthwise")}
    date = f"measured here on {measured.date[:10]}"
    chosen = {name: SourcedRate(rate, date) if (rate := found.get(name)) else assumed[name] for name in assumed}
    if measured.origin:
        chosen = {name: _by_trace(name, rate, measured) for name, rate in chosen.items()}
    return Rates(
        **{name: rate.value for name, rate in chosen.items()},
        ahead=not cluster.on_cpu,
        edge=products.edge,
        channel={} if cluster.on_cpu else {name: rate / measured.slower for name, rate in BATCH_NORM_CHANNEL.items()},
        attention_shape=_attention(cluster, precision, software),
        unfused=COMPILED if software.compile else FUSED if software.liger_kernel else 1.0,
        exposed_inside=EXPOSED_INSIDE.value,
        hop_s=measured.slower * HOP_S.value,
        peak=None if cluster.on_cpu else device.peak(precision),
        sources={name: rate.how for name, rate in chosen.items()},
        kernels=KernelTable(measured.kernels) if measured.kernels else None,
        collectives=CollectiveTable(measured.collectives) if measured.collectives else None,
        longer=measured.longer,
        slower=measured.slower,
    )


def _by_trace(name: str, rate: SourcedRate, measured: Calibration) -> SourcedRate:
    """Return a rate corrected by a trace: its factor multiplies seconds and divides rates per second."""
    if name in UNTOUCHED:
        return rate
    kind = TRACED.get(name, "")
    times, how = measured.slower * measured.longer.get(kind, 1.0), f"{rate.how}; corrected by {measured.origin}"
    return SourcedRate(rate.value * times if name.endswith("_s") else rate.value / times, how)


def _passes(cluster: Cluster, measured: Calibration) -> float | None:
    """Return the bytes per second of long passes. On a CPU most passes fill memory that was just allocated."""
    copies = [kernel for kernel in measured.kernels if kernel.kind == "copy" and kernel.dtype == "float32"]
    if not cluster.on_cpu or not copies:
        return measured.memory_bandwidth
    largest = max(copies, key=lambda kernel: kernel.moved_bytes)
    return largest.moved_bytes / largest.seconds


def _of_streaming(cluster: Cluster, fitted: Coefficients) -> float:
    """Return the bandwidth of kernels between matrix multiplications, relative to one long addition."""
    return 1.0 if cluster.on_cpu else fitted.memory / STREAMING.value


def _attention(cluster: Cluster, precision: str, software: Software) -> AttentionRate:
    if cluster.on_cpu or precision == "fp32":  # no fused kernel
        return PLAIN
    return attention_rate(software.attn_implementation, cluster.device.name)


def _assumed(
    cluster: Cluster, precision: str, products: ProductRate, software: Software, fitted: Coefficients
) -> dict[str, SourcedRate]:
    """Return the fitted rates and the rates that a calibration may replace, with their sources."""
    device, node = cluster.device, cluster.device.node
    peak = device.peak(precision) or device.peak("fp32") or 0.0
    shape = _attention(cluster, precision, software)
    attention = SourcedRate(products.large, products.how) if shape is PLAIN else SourcedRate(shape.share, shape.how)
    on_cpu, general = cluster.on_cpu, device.peak("fp32") or 0.0
    unaligned = UNALIGNED.get(device.name, OTHER_UNALIGNED)
    # a superchip's GPU reads all host memory by its own page tables; more GPUs come with more Grace CPUs
    superchip = device.host_link == "NVLink-C2C"
    hosts = max(1.0, cluster.gpus / node.gpus) if superchip else 1.0
    ring = EFFICIENCIES["pcie ring" if "PCIe" in device.link_name else "nvlink"]
    return {
        "flops": SourcedRate(peak * products.large, products.how),
        "attention": SourcedRate(peak * attention.value, attention.how),
        "unaligned": SourcedRate(unaligned.odd, unaligned.how),
        "unaligned_even": SourcedRate(unaligned.even, unaligned.how),
        "general": _share_of(general, EFFICIENCIES["cpu general" if on_cpu else "general"]),
        "depthwise": _share_of(general, EFFICIENCIES["cpu general" if on_cpu else "depthwise"]),
        "memory": _share_of(device.bandwidth, EFFICIENCIES["cpu memory"] if on_cpu else _fitted(fitted.memory)),
        "streaming": _share_of(device.bandwidth, EFFICIENCIES["cpu memory"] if on_cpu else STREAMING),
        "adam": _share_of(device.bandwidth, EFFICIENCIES["cpu memory" if on_cpu else "adam"]),
        "sgd": _share_of(device.bandwidth, EFFICIENCIES["cpu memory" if on_cpu else "adam"]),
        "launch_s": LAUNCH_S,
        "engine_launch_s": NO_ENGINE_LAUNCH if on_cpu else _share_of(LAUNCH_S.value, _ENGINE_LAUNCH),
        "gradient_s": CPU_GRADIENT_S if on_cpu else _share_of(LAUNCH_S.value, _GRADIENT),
        "hook_s": CPU_HOOK_S if on_cpu else _fitted(fitted.hook_s),
        "link": _share_of(device.link, ring),
        "link_reduce": _share_of(device.link, EFFICIENCIES.get(f"{device.link_name[:8]} all-reduce", ring)),
        "network": _share_of(node.network, _fitted(fitted.network)),
        "network_hop_s": _fitted(fitted.network_hop_s),
        "exposed_between": _fitted(fitted.exposed_between),
        "pcie": _share_of(device.pcie, EFFICIENCIES[device.host_link]),
        "pageable": _share_of(device.pcie, EFFICIENCIES[device.host_link]) if on_cpu or superchip else PAGEABLE,
        "host": _host(cluster, hosts * node.host_bandwidth, software.cpu_threads),
        "nvme_read": _share_of(node.nvme_read, EFFICIENCIES["nvme"]),
        "nvme_write": _share_of(node.nvme_write, EFFICIENCIES["nvme"]),
        "call_s": CALL_S,
    }


def _host(cluster: Cluster, bandwidth: float, threads: int | None) -> SourcedRate:
    """Return the bytes per second of a node's host memory under Adam. `threads`: threads of each rank."""
    kind = "Grace host" if cluster.device.host_link == "NVLink-C2C" else "cpu host" if cluster.on_cpu else "host"
    every = _share_of(bandwidth, EFFICIENCIES[kind])
    few = (threads or 0) * cluster.gpus * THREAD.value
    return SourcedRate(few, f"{threads} threads a rank; {THREAD.how}") if 0 < few < every.value else every


def _fitted(value: float) -> SourcedRate:
    return SourcedRate(value, _FITTED)


def _share_of(peak: float, share: SourcedRate) -> SourcedRate:
    return SourcedRate(peak * share.value, share.how)


def _products(cluster: Cluster, precision: str) -> ProductRate:
    """Return the share of the peak that a model's matrix multiplications reach."""
    if cluster.on_cpu:
        share, how = EFFICIENCIES["cpu bf16" if precision == "bf16" else "cpu"]
        return ProductRate(share, 0.0, how)
    if precision == "fp32":
        return ProductRate(FP32_PRODUCTS.value, OTHER_EDGE, FP32_PRODUCTS.how)
    return PRODUCTS.get(cluster.device.name, OTHER_PRODUCTS)
