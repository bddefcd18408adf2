"""The clusters that a plan is asked about: from flags, or this machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from zerofit.spec.cluster import Cluster
from zerofit.spec.device import Device
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.hardware import by_name, cpu_device, find_device
from zerofit.spec.units import parse_bytes, shown_bytes


@dataclass(frozen=True, kw_only=True)
class HardwareRequest:
    """Hardware as the command line names it; None where it does not."""

    kinds: tuple[str, ...] = ()
    gpus: int | None = None  # of one node
    nodes: int | None = None
    host_memory: str | None = None
    device_memory: str | None = None
    nvme: str | None = None
    network: str | None = None


def clusters(asked: HardwareRequest) -> list[Cluster]:
    """One cluster for each kind. Raises UserError with everything that is wrong."""
    problems = Problems()
    kinds = list(dict.fromkeys(k.strip() for word in asked.kinds for k in word.split(",") if k.strip()))
    for name in ("gpus", "nodes"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            problems.add("bad-value", f"--{name} {value} is no number of {name}", "take 1 or more", f"--{name}")
    for name in ("host_memory", "device_memory", "nvme", "network"):
        text, flag = getattr(asked, name), "--" + name.replace("_", "-")
        problems.attempt(lambda text=text, flag=flag: text and parse_bytes(text, flag))
    if kinds:
        problems.extend(p for kind in kinds if kind != "cpu" for p in _problems_of(kind))
    problems.raise_if_any()
    if not kinds:
        return [_sized(_this_machine(), asked)]
    return [_sized(_of_kind(kind, asked), asked) for kind in kinds]


def _problems_of(kind: str) -> tuple[Problem, ...]:
    try:
        find_device(kind)
    except UserError as error:
        return error.problems
    return ()


def _of_kind(kind: str, asked: HardwareRequest) -> Cluster:
    if kind == "cpu":
        return _this_cpu(asked.gpus)
    device = find_device(kind)
    gpus, notes = asked.gpus or device.node.gpus, []
    if not asked.gpus:
        notes.append(f"--gpus: {gpus} a node, as in {device.node.name}")
    host = device.node.host_bytes * gpus // device.node.gpus
    if not asked.host_memory:
        notes.append(f"--host-memory: {shown_bytes(host)} a node, its share of {device.node.name}")
    if not asked.network and (asked.nodes or 1) > 1:
        each = device.node.network / 1e9
        notes.append(f"--network: {each:.3g} GB/s a device between nodes, as {device.node.name} ({device.node.source})")
    return Cluster(device=device, gpus=gpus, host_bytes=host, host_scales=True, notes=tuple(notes))


def _sized(cluster: Cluster, asked: HardwareRequest) -> Cluster:
    """With what the flags say about it."""
    device: Device = cluster.device
    if asked.network:
        device = replace(device, node=replace(device.node, network=float(parse_bytes(asked.network, "--network"))))
    if asked.device_memory:
        device = replace(device, memory_bytes=parse_bytes(asked.device_memory, "--device-memory"))
    host = parse_bytes(asked.host_memory, "--host-memory") if asked.host_memory else cluster.host_bytes
    if cluster.on_cpu and asked.host_memory and not asked.device_memory:
        device = replace(device, memory_bytes=host // cluster.gpus)
    return replace(
        cluster,
        device=device,
        gpus=asked.gpus or cluster.gpus,
        nodes=asked.nodes or 1,
        host_bytes=host,
        host_scales=cluster.host_scales and not asked.host_memory,
        nvme_bytes=parse_bytes(asked.nvme, "--nvme") if asked.nvme else 0,
    )


def _this_machine() -> Cluster:
    """The local GPUs, without importing torch; the CPU where there are none."""
    names = _nvidia_gpus() or _amd_gpus()
    if not names:
        return _this_cpu(None)
    name, memory_mib = names[0]
    device = by_name(name)
    if device is None:
        hint = "name the nearest with --gpu KIND and its size with --device-memory"
        raise UserError(Problem(kind="unknown-gpu", message=f"{name!r} is not in the catalogue", hint=hint))
    # the driver keeps a part of what nvidia-smi shows; more than the catalogue's figure is never promised
    same = [d for d in _editions(device) if d.memory_bytes <= memory_mib * 2**20] or [device]
    found = max(same, key=lambda d: d.memory_bytes)
    note = f"this machine: {len(names)} x {name}"
    return Cluster(device=found, gpus=len(names), host_bytes=_memory_bytes(), notes=(note,))


def _editions(device: Device) -> list[Device]:
    from zerofit.spec.devices import DEVICES

    return [d for d in DEVICES.values() if d.name == device.name]


def _nvidia_gpus() -> list[tuple[str, int]]:
    """Name and MiB of each, as nvidia-smi lists them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), int(mib)) for name, mib in rows if mib.strip().isdigit()]


def _amd_gpus() -> list[tuple[str, int]]:
    """Name and MiB of each, as torch sees them; asked where the kernel has AMD's compute driver."""
    if not Path("/dev/kfd").exists():
        return []
    import torch

    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [(one.name, one.total_memory // 2**20) for one in found]


def _memory_bytes() -> int:
    """Of the host, or of the control group that this process is in."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no group, or "max"
        return total


def _this_cpu(ranks: int | None) -> Cluster:
    from zerofit.launch.machine import cpu_ranks, usable_cores

    cores, memory = usable_cores(), _memory_bytes()
    gpus = ranks or cpu_ranks(cores)
    note = f"this machine's CPU: {cores} cores, {shown_bytes(memory)}, {gpus} ranks"
    return Cluster(device=cpu_device(cores, memory, gpus), gpus=gpus, host_bytes=memory, notes=(note,))
