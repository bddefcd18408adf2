"""What a process needs besides torch's allocations, and how much of a forecast is kept free for what is not known."""

from __future__ import annotations

MIB = 2**20

# The CUDA context with the kernels that a training step loads. pytorch#107667: about 300 MB with lazy loading (CUDA
# 11.7 and later), pytorch#28113: 200 to 700 MB by GPU and version; taken: the upper half of that.
CONTEXT_BYTES = 600 * MIB
# One NCCL communicator's channels. NVIDIA/nccl#1685: 1.06 GB on each of 8 H100 before any all-to-all, 4.34 GB after
# one; nccl#986 (its maintainer): linear in the channels, which NVLink has many of and PCIe has few of.
NCCL_NVLINK_BYTES = 1024 * MIB
NCCL_PCIE_BYTES = 256 * MIB
NCCL_ALL_TO_ALL_BYTES = 3200 * MIB
# A CPU rank's Python, torch and DeepSpeed: resident size after importing them and starting gloo, 2026, Linux x86-64
CPU_PROCESS_BYTES = 800 * MIB
# The host process of a GPU rank: the CUDA libraries lie in host memory too. pytorch#113326: 2.0 GB
HOST_PROCESS_BYTES = 3072 * MIB

# Share of the allocated peak that torch's caching allocator may hold beyond it. It depends on the order of sizes, which
# no forecast of bytes knows; ZeRO-3 gathers parameters of changing sizes all the time. Assumed, not fitted.
FRAGMENTATION = 0.05
FRAGMENTATION_ZERO3 = 0.10
# Share of a host's memory that is left to the system, data loaders and file caches. Assumed.
HOST_RESERVE = 0.05
