"""A process's memory outside torch's allocations, and the margins of a forecast."""

from __future__ import annotations

from dataclasses import dataclass

from zerofit.spec.device_file import Device

MIB = 2**20

# Channels of one NCCL communicator. NVIDIA/nccl#1685: 1.06 GB on each of 8 H100 before the first all-to-all, 4.34 GB
# after it. nccl#986 (a maintainer): linear in the number of channels, which is high for NVLink and low for PCIe.
NCCL_NVLINK_BYTES = 1024 * MIB
NCCL_PCIE_BYTES = 256 * MIB
NCCL_ALL_TO_ALL_BYTES = 3200 * MIB
# Private memory of a CPU rank without its tensors, by the libraries that it imports: least and most. Measured: peak
# RssAnon of /proc/PID/status in runs of one and two ranks (torch 2.14, transformers 5, peft, Linux x86-64, 2 cores):
# LeNet 371 to 379 MiB; a small Llama with 43 MiB of tensors 517 to 525; with adapters and 55 MiB 629.
CPU_PROCESS_BYTES = {
    "torch": (352 * MIB, 416 * MIB),
    "transformers": (448 * MIB, 544 * MIB),
    "peft or diffusers": (544 * MIB, 640 * MIB),
}
CPU_PROCESS_LOW_BYTES, CPU_PROCESS_HIGH_BYTES = 352 * MIB, 640 * MIB  # if the libraries are unknown
# Largest fragmentation of the C library's heap, as a share of the peak (the same runs: up to 0.40). Tensors below
# 32 MiB are allocated in it: with MALLOC_MMAP_THRESHOLD_=131072 all of BERT's 0.30 was gone.
CPU_HEAP = 0.45
# oneDNN caches a kernel for each shape, and experts get another number of tokens in each step. The same runs: at most
# 240 MiB, of which ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 saved 190 MiB.
CPU_EXPERTS_BYTES = 256 * MIB
# Most copies of the largest parameter in kernels' own buffers: VGG-11, whose first linear layer has 392 MiB, used
# 0.8 GiB more private memory than its tensors and process (the same runs)
CPU_PACKED = 2
CPU_LIBRARY_BYTES = 352 * MIB  # RssFile in the same runs, 331 to 349 MiB: libraries, shared by all ranks of a host
# Host memory of a GPU rank's process, with the CUDA libraries. pytorch#113326: 2.0 GB
HOST_PROCESS_BYTES = 3072 * MIB

# Largest fragmentation of torch's caching allocator, as a share of the allocated peak, when simulated runs were
# replayed (benchmarks/fragmentation.py). It depends on the order of sizes, which is unknown in a plan. It is largest
# for ZeRO-3, which gathers parameters of different sizes all the time. It is even larger with parameters on the host.
FRAGMENTATION = 0.12
FRAGMENTATION_ZERO3 = 0.19
FRAGMENTATION_ZERO3_HOST = 0.26
# Segments for blocks of up to 1 MiB and of less than 10 MiB: kSmallBuffer and kLargeBuffer of
# c10/cuda/CUDACachingAllocator.cpp. The last segment of each may be nearly empty.
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
LAST_SEGMENTS_BYTES = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
# Share of a host's memory for the system, data loaders and file caches. Assumed.
HOST_RESERVE = 0.05

# Margin, as a share of the reserved peak, if the allocator was replayed on the exact sequence of allocations: for
# kernels' scratch, the choice between equal free blocks, and memory that waits for another stream. Assumed.
REPLAYED = 0.03
# Most that torch reserved beyond the replay in 8 of 10 published runs, of one rank and of several, as a share: FSDP 1
# gathers and reduces on streams of its own (benchmarks/results/reserved-memory.json)
RESERVED_MORE, RESERVED_MORE_RANKS = 0.05, 0.09

# cuDNN copies a convolution's 16-bit input, weights and output to its layout (NHWC), measured to the byte. For
# ResNet-50 torch reserved 102 MiB more than simulated in bf16 and 414 MiB in fp32; its largest convolution has 147 and
# 294 MiB.
CUDNN_COPIES, CUDNN_SOURCE = 2, "measured: ResNet-50 on an H100 (benchmarks/gpu/README.md)"
CUDNN_WORKSPACES = "cuDNN's workspaces"


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """A range from public sources."""

    low_bytes: int
    high_bytes: int
    source: str


# All kernels of torch loaded instead of only those used: 666,632,192 bytes instead of 287,047,680 (pytorch#86509)
_KERNELS_BYTES = 666_632_192 - 287_047_680
_KERNELS = "plus up to 362 MiB for loading all kernels (pytorch#86509)"
_ADA = ByteRange(
    low_bytes=426 * MIB,
    high_bytes=426 * MIB + _KERNELS_BYTES,
    source=f"a bare context, RTX 6000 Ada, torch 2.10: 426 MiB (unslothai/unsloth-zoo#1053), {_KERNELS}",
)
_BLACKWELL = ByteRange(
    low_bytes=612 * MIB,
    high_bytes=612 * MIB + _KERNELS_BYTES,
    source=f"a bare context, B200: 612 MiB (unslothai/unsloth#8669), {_KERNELS}",
)
_HOPPER = ByteRange(
    low_bytes=_ADA.low_bytes,
    high_bytes=_BLACKWELL.high_bytes,
    source="from Ada's low figure to Blackwell's high figure, since no figure for Hopper was found",
)
_OLDER = ByteRange(
    low_bytes=287_047_680 - 20 * MIB,
    high_bytes=666_632_192 - 20 * MIB,
    source="memory that the first op takes, without torch's segment; kernels loaded lazily or at once (pytorch#86509)",
)
_AMD = ByteRange(
    low_bytes=200 * 10**6,
    high_bytes=1024 * MIB,
    source="rocBLAS alone about 200 MB; TensorFlow keeps 1 GiB free on MI200 and later (ROCm/tensorflow-upstream#2490)",
)
_CONTEXTS = {"blackwell": _BLACKWELL, "hopper": _HOPPER, "ada": _ADA, "cdna2": _AMD, "cdna3": _AMD, "cdna4": _AMD}

# Both directions of a communicator's connection to one peer over one channel: at the receiver 10 MiB for the LL, LL128
# and SIMPLE buffers (524,288 + 4,915,200 + 4,194,304 bytes), at the sender 2 MiB. NCCL src/init.cc
# (DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE, DEFAULT_BUFFSIZE), src/transport/p2p.cc (p2pSendSetup, p2pRecvSetup);
# the same sizes were counted in NVIDIA/nccl#1685.
NCCL_CONNECTION_BYTES = 12 * MIB
# Channels in logs, fewest and most: 16 (nccl#1453, H100), 24 (nccl-tests#100, A100; nccl#1259, H100), 32 for all-to-all
# (nccl#1685) over NVLink; 2 (nccl-tests#228) to 8 (nccl#1189) through the host.
NCCL_NVLINK_CHANNELS = (16, 32)
NCCL_PCIE_CHANNELS = (2, 8)

# Workspaces (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize): compute capability 9, 10 and 12
# (Hopper, Blackwell) and others; AMD gfx94x and gfx95x, and others. cuBLASLt, which adds biases, shares cuBLAS's from
# torch 2.12 on (pytorch#168175) and had its own 1 MiB before (measured with torch 2.11 on an H100). hipBLASLt has its
# own 76 MiB (parseCUDABlasLtWorkspaceSize).
CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_HOPPER_BYTES = 32 * MIB
CUBLASLT_BYTES, CUBLASLT_SHARES_FROM = MIB, (2, 12)
HIPBLAS_MI300_BYTES, HIPBLAS_BYTES, HIPBLASLT_BYTES = 128 * MIB, 32 * MIB, 76 * MIB
BLAS_WORKSPACES = {
    **dict.fromkeys(("hopper", "blackwell"), CUBLAS_HOPPER_BYTES),
    **dict.fromkeys(("cdna3", "cdna4"), HIPBLAS_MI300_BYTES + HIPBLASLT_BYTES),
    "cdna2": HIPBLAS_BYTES + HIPBLASLT_BYTES,
}


def context_figure(device: Device) -> ByteRange:
    """Return the memory of the driver's context and loaded kernels on a GPU."""
    return _CONTEXTS.get(device.architecture, _OLDER)


def blas_workspace_bytes(device: Device) -> int:
    """Return the bytes of the workspace for each cuBLAS handle and stream; 0 on a CPU."""
    return 0 if device.kind == "cpu" else BLAS_WORKSPACES.get(device.architecture, CUBLAS_BYTES)


def pinned_bytes(size_bytes: int) -> int:
    """Return the bytes allocated for page-locked host memory: the next power of two."""
    # ATen/core/CachingHostAllocator.h, `allocate`: PowerOf2Ceil, below pinned_max_round_threshold (default: no limit)
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
