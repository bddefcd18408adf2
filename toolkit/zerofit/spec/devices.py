"""Devices: what one can do at most, the catalogue of GPUs with public sources, and this machine's CPU as one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zerofit.spec import nodes
from zerofit.spec.errors import Problem, UserError, nearest
from zerofit.spec.nodes import GB, GIB, Node
from zerofit.spec.overhead import CPU_LIBRARY_BYTES


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
    pcie: float  # to host memory
    node: Node  # what it usually stands in
    source: str  # of FLOP/s, bandwidth and link; data sheets are the makers'
    memory_source: str

    def peak(self, precision: str) -> float | None:
        """Return peak FLOP/s at "bf16", "fp16" or "fp32"; None where it has no such arithmetic."""
        tflops = self.tflops.get(precision)
        return None if tflops is None else tflops * 1e12


PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB  # x16, one direction, after encoding (PCI-SIG)


def _gib(value: float) -> int:
    return int(value * GIB)


# Where torch's messages give different totals for a kind (drivers differ by a few hundred MiB), the smallest seen.
DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        Device(
            kind="b200",
            name="B200",
            memory_bytes=_gib(178.35),
            tflops={"bf16": 2250, "fp16": 2250, "fp32": 75},
            bandwidth=7672 * GB,
            link=900 * GB,
            link_name="NVLink 5",
            pcie=PCIE5,
            node=nodes.DGX_B200,
            source="NVIDIA B200 and DGX B200 data sheets (2024); bandwidth by bus width and clock, pytorch/ao#4002",
            memory_source="pytorch/ao#4002; nvidia-smi 183359 MiB (NVIDIA/TensorRT-LLM#10278)",
        ),
        Device(
            kind="h200",
            name="H200",
            memory_bytes=_gib(139.72),
            tflops={"bf16": 989, "fp16": 989, "fp32": 67},
            bandwidth=4800 * GB,
            link=450 * GB,
            link_name="NVLink 4",
            pcie=PCIE5,
            node=nodes.DGX_H100,
            source="NVIDIA H200 data sheet (2024)",
            memory_source="torch out-of-memory messages say 139.72 to 139.81 GiB; nvidia-smi 143771 MiB",
        ),
        Device(
            kind="h100-80gb",
            name="H100",
            memory_bytes=_gib(79.11),
            tflops={"bf16": 989, "fp16": 989, "fp32": 67},
            bandwidth=3350 * GB,
            link=450 * GB,
            link_name="NVLink 4",
            pcie=PCIE5,
            node=nodes.DGX_H100,
            source="NVIDIA H100 data sheet (2023), SXM5",
            memory_source="vllm-project/vllm#27508; nvidia-smi 81559 MiB (huggingface/text-embeddings-inference#350)",
        ),
        Device(
            kind="h100-pcie-80gb",
            name="H100 PCIe",
            memory_bytes=_gib(79.11),
            tflops={"bf16": 756, "fp16": 756, "fp32": 51},
            bandwidth=2000 * GB,
            link=PCIE5,
            link_name="PCIe 5 x16 (bridges join pairs only)",
            pcie=PCIE5,
            node=nodes.H100_PCIE_SERVER,
            source="NVIDIA H100 data sheet (2023), PCIe",
            memory_source="as the SXM edition: nvidia-smi shows 81559 MiB for both",
        ),
        Device(
            kind="a100-80gb",
            name="A100",
            memory_bytes=_gib(79.15),
            tflops={"bf16": 312, "fp16": 312, "fp32": 19.5},
            bandwidth=2039 * GB,
            link=300 * GB,
            link_name="NVLink 3",
            pcie=PCIE4,
            node=nodes.DGX_A100,
            source="NVIDIA A100 data sheet (2021), SXM4 80 GB",
            memory_source="torch says 79.15 to 79.35 GiB (levihsu/OOTDiffusion#235: 79.25); nvidia-smi 81920 MiB "
            "(modal-labs/modal-client#2797)",
        ),
        Device(
            kind="a100-40gb",
            name="A100",
            memory_bytes=_gib(39.39),
            tflops={"bf16": 312, "fp16": 312, "fp32": 19.5},
            bandwidth=1555 * GB,
            link=300 * GB,
            link_name="NVLink 3",
            pcie=PCIE4,
            node=nodes.DGX_A100,
            source="NVIDIA A100 data sheet (2021), SXM4 40 GB",
            memory_source="torch says 39.39 to 39.59 GiB (TianheWu/CoSeR#10: 39.50); nvidia-smi 40960 MiB "
            "(modal-labs/modal-client#2797)",
        ),
        Device(
            kind="a10",
            name="A10",
            memory_bytes=_gib(21.99),
            tflops={"bf16": 125, "fp16": 125, "fp32": 31.2},
            bandwidth=600 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16",
            pcie=PCIE4,
            node=nodes.G5,
            source="NVIDIA A10 data sheet (2021)",
            memory_source="zai-org/CogVLM#236; nvidia-smi 23028 MiB (modal-labs/modal-client#2797)",
        ),
        Device(
            kind="a10g",
            name="A10G",
            memory_bytes=_gib(21.98),
            tflops={"bf16": 70, "fp16": 70, "fp32": 35},
            bandwidth=600 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16",
            pcie=PCIE4,
            node=nodes.G5,
            source="NVIDIA A10G data sheet for AWS G5 (2021): 70 TFLOP/s of tensor cores",
            memory_source="torch says 21.98 to 22.20 GiB by driver (h2oai/h2ogpt#48: 22.20)",
        ),
        Device(
            kind="l40s",
            name="L40S",
            memory_bytes=_gib(44.40),
            tflops={"bf16": 362, "fp16": 362, "fp32": 91.6},
            bandwidth=864 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16",
            pcie=PCIE4,
            node=nodes.G6E,
            source="NVIDIA L40S data sheet (2023)",
            memory_source="as L40: nvidia-smi 46068 MiB for both (modal-labs/modal-client#2797)",
        ),
        Device(
            kind="l40",
            name="L40",
            memory_bytes=_gib(44.40),
            tflops={"bf16": 181, "fp16": 181, "fp32": 90.5},
            bandwidth=864 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16",
            pcie=PCIE4,
            node=nodes.G6E,
            source="NVIDIA L40 data sheet (2023)",
            memory_source="QwenLM/Qwen3-VL#2097",
        ),
        Device(
            kind="l4",
            name="L4",
            memory_bytes=_gib(22.03),
            tflops={"bf16": 121, "fp16": 121, "fp32": 30.3},
            bandwidth=300 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16",
            pcie=PCIE4,
            node=nodes.G6,
            source="NVIDIA L4 data sheet (2023)",
            memory_source="torch says 22.03 to 22.17 GiB; nvidia-smi 23034 MiB (modal-labs/modal-client#2797)",
        ),
        Device(
            kind="v100-32gb",
            name="V100",
            memory_bytes=_gib(31.73),
            tflops={"fp16": 125, "fp32": 15.7},
            bandwidth=900 * GB,
            link=150 * GB,
            link_name="NVLink 2",
            pcie=PCIE3,
            node=nodes.P3DN,
            source="NVIDIA V100 data sheet (2020), SXM2",
            memory_source="torch says 31.73 to 31.75 GiB (hiyouga/LlamaFactory#182: 31.75)",
        ),
        Device(
            kind="v100-16gb",
            name="V100",
            memory_bytes=_gib(15.75),
            tflops={"fp16": 125, "fp32": 15.7},
            bandwidth=900 * GB,
            link=150 * GB,
            link_name="NVLink 2",
            pcie=PCIE3,
            node=nodes.DGX1,
            source="NVIDIA V100 data sheet (2020), SXM2",
            memory_source="torch says 15.75 to 15.78 GiB (Morizeyao/GPT2-Chinese#215: 15.75)",
        ),
        Device(
            kind="t4",
            name="T4",
            memory_bytes=_gib(14.56),
            tflops={"fp16": 65, "fp32": 8.1},
            bandwidth=320 * GB,
            link=PCIE3,
            link_name="PCIe 3 x16",
            pcie=PCIE3,
            node=nodes.G4DN,
            source="NVIDIA T4 data sheet (2019)",
            memory_source="torch says 14.56 to 14.76 GiB by driver (hpcaitech/Open-Sora#697: 14.75)",
        ),
        Device(
            kind="rtx4090",
            name="RTX 4090",
            memory_bytes=_gib(23.52),
            tflops={"bf16": 165, "fp16": 165, "fp32": 82.6},
            bandwidth=1008 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16, through the host (no peer access)",
            pcie=PCIE4,
            node=nodes.WORKSTATION,
            source="NVIDIA Ada GPU architecture white paper (2022)",
            memory_source="Soul-AILab/SoulX-FlashTalk#5; nvidia-smi 24564 MiB (vllm-project/vllm#7553)",
        ),
        Device(
            kind="rtx3090",
            name="RTX 3090",
            memory_bytes=_gib(23.57),
            tflops={"bf16": 71, "fp16": 71, "fp32": 35.6},
            bandwidth=936 * GB,
            link=PCIE4,
            link_name="PCIe 4 x16 (bridges join pairs only)",
            pcie=PCIE4,
            node=nodes.WORKSTATION,
            source="NVIDIA Ampere GA102 GPU architecture white paper (2020)",
            memory_source="torch says 23.57 to 23.70 GiB by driver; nvidia-smi 24576 MiB (noonghunna/club-3090#96)",
        ),
        Device(
            kind="mi300x",
            name="MI300X",
            memory_bytes=_gib(191.69),
            tflops={"bf16": 1307, "fp16": 1307, "fp32": 163.4},
            bandwidth=5300 * GB,
            link=448 * GB,  # 7 links of 64 GB/s
            link_name="Infinity Fabric 4",
            pcie=PCIE5,
            node=nodes.MI300X_PLATFORM,
            source="AMD Instinct MI300X data sheet (2023)",
            memory_source="torch out-of-memory messages say 191.69 or 191.98 GiB",
        ),
        Device(
            kind="mi250x",
            name="MI250X",
            memory_bytes=_gib(63.98),  # torch and DeepSpeed see each half of the card as a device of its own
            tflops={"bf16": 191.5, "fp16": 191.5, "fp32": 23.95},
            bandwidth=1638 * GB,
            link=50 * GB,  # the slowest link that a ring over the eight halves of four cards crosses
            link_name="Infinity Fabric 3",
            pcie=36 * GB,  # Infinity Fabric to the host on Frontier
            node=nodes.FRONTIER,
            source="AMD Instinct MI250X data sheet (2021), half a card (one GCD); links: OLCF Frontier user guide",
            memory_source="64 GB a GCD in the data sheet, 63.98 GiB in rocm-smi",
        ),
    )
}


KINDS = (*DEVICES, "cpu")

# A CPU core, until `zerofit calibrate` has measured this machine: 8 lanes x 2 FMA x 2 FLOP x 2.5 GHz (AVX2)
CORE_TFLOPS = 0.08
CORE_BANDWIDTH = 8 * GB  # assumed: a core's share of a server's memory channels
LOOPBACK = 1.5 * GB  # assumed: gloo through the loopback device


def find_device(kind: str, where: str = "--gpu") -> Device:
    """Return the device of a kind. Raises UserError with the nearest kinds; `cpu` is made by `cpu_device` instead."""
    if kind in DEVICES:
        return DEVICES[kind]
    word = kind.lower().replace("-", "").replace("_", "")
    begins = [known for known in KINDS if known.replace("-", "").startswith(word)]
    hint = f"did you mean {' or '.join(begins)}?" if begins and word else nearest(kind.lower(), KINDS)
    hint = hint or "known: " + ", ".join(KINDS)
    raise UserError(Problem(kind="unknown-gpu", message=f"no GPU kind {kind!r}", hint=hint, where=where))


def cpu_device(cores: int, memory_bytes: int, ranks: int) -> Device:
    """Return one of `ranks` processes that share a host's cores and memory, as a device."""
    share = max(1, cores // ranks)
    return Device(
        kind="cpu",
        name="CPU",
        memory_bytes=max(0, memory_bytes - CPU_LIBRARY_BYTES) // ranks,
        tflops={"fp32": CORE_TFLOPS * share, "bf16": CORE_TFLOPS * share},
        bandwidth=CORE_BANDWIDTH * share,
        link=LOOPBACK,
        link_name="loopback",
        pcie=CORE_BANDWIDTH * share,
        node=replace(nodes.THIS, gpus=ranks, host_bytes=memory_bytes),
        source="assumed for an AVX2 core of 2.5 GHz; `zerofit calibrate` measures",
        memory_source="the host's memory less what ranks share, in equal shares",
    )


def by_name(device_name: str, total_bytes: int | None = None) -> Device | None:
    """Return the device that torch reports under this name; of a family with several sizes the first.

    `total_bytes`: what its driver says it has; then the largest size that is no more than that.
    """
    # "A10" would be found in no "A10G", but "H100" is in "H100 PCIe": longer names are tried first
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        if re.search(rf"\b{re.escape(device.name)}\b", device_name):
            # the driver keeps a part of what it shows; more than the catalogue's figure is never promised
            sizes = [d for d in DEVICES.values() if d.name == device.name and d.memory_bytes <= (total_bytes or 0)]
            return max(sizes, key=lambda d: d.memory_bytes, default=device)
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return peak FLOP/s of a device at a precision, None where not known (a CPU, a device not in the table)."""
    device = by_name(device_name)
    return device.peak(precision) if device else None


def supports(kind: str, precision: str) -> bool:
    """Return whether a kind of GPU has arithmetic of a precision ("bf16", "fp16", "fp32")."""
    return precision in DEVICES[kind].tflops
