"""This machine's hardware, found without torch, and the results of `zerofit calibrate`."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from zerofit.spec.errors import Problem, UserError
from zerofit.spec.extras import installed_version
from zerofit.spec.files import cache_root, write_json
from zerofit.spec.foreign import Unreadable, read_json, shaped

MIB = 2**20
CPUS, NODES = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
SMI_S = 30  # seconds for nvidia-smi; it first loads the driver
LIBAIO_HINT = "install libaio-dev (Debian, Ubuntu) or libaio-devel (RHEL, Fedora, SUSE)"


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """The measured time of one kernel, with kind and shape as in a profile's `Kernel`."""

    kind: str
    dtype: str  # as torch names it: "bfloat16"
    seconds: float
    shape: tuple[int, ...] = ()
    flops: float = 0.0  # for causal attention without the masked half
    moved_bytes: float = 0.0
    groups: int = 1
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The measured time of one collective between ranks of a node."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter"
    ranks: int
    size_bytes: float  # of the full tensor
    seconds: float


def usable_cores() -> int:
    """Return the number of physical cores that this process may use.

    If no core is known to be physical, all threads count.
    """
    allowed = os.sched_getaffinity(0)
    try:  # a scheduler may allow both threads of half of the cores; the threads of a core have the same list
        cores = len({(CPUS / f"cpu{number}/topology/thread_siblings_list").read_text() for number in allowed})
    except OSError:  # some sandboxes
        cores = min(psutil.cpu_count(logical=False) or len(allowed), len(allowed))
    return min([cores, *map(_quota, control_groups("cpu"))])


def _quota(group: Path) -> int:
    """Return the cores of CPU time that a control group grants; without a limit a large number."""
    with suppress(OSError, ValueError):  # a container with `--cpus 4` has 4 cores
        v2 = (group / "cpu.max").read_text().split() if (group / "cpu.max").exists() else []
        quota, period = v2 or [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        if quota != "max" and int(quota) > 0:
            return math.ceil(int(quota) / int(period))
    return sys.maxsize


def cpu_ranks(cores: int) -> int:
    """Return the default number of ranks on the CPU: one per NUMA node, and two at least."""
    # the memory of a Grace Hopper's GPU is a node, too, which has no cores
    nodes = [file for file in NODES.glob("node[0-9]*/cpulist") if file.read_text().strip()]
    return max(1, min(cores, max(2, len(nodes))))


# In a container the kernel shows the host's memory, but it kills processes at the limit of the control group or of a
# parent group. So all limits count. A group counts pages of the file cache as used, but they are free: the kernel drops
# inactive pages before it kills.


def host_memory() -> tuple[int, int]:
    """Return total and free host memory in bytes, within this process's control groups."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for group in control_groups("memory"):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is None:  # version 1
            limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < host.total:
            cache = _statistic(group / "memory.stat", "inactive_file")  # the kernel frees these pages before it kills
            total, free = min(total, limit), min(free, limit - used + cache)
    return total, max(0, free)


def memory_bytes() -> int:
    """Return the total memory in bytes of the host or of this process's control group."""
    return host_memory()[0]


def control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control groups, outermost first.

    `controller`: "memory" or "cpu".
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):  # version 2 names no controllers
            top = Path("/sys/fs/cgroup") / controllers
            here = top / inner.lstrip("/")
            # In a container, the file may name a path of the host, which does not exist here. Then the limits are those
            # at the top.
            found += [top, *reversed([p for p in (here, *here.parents) if top in p.parents])]
    return found


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory.

    It counts them for this process's control groups and for the host.
    """
    # Version 2 has memory.events, version 1 has memory.oom_control.
    files = [group / name for group in control_groups("memory") for name in ("memory.events", "memory.oom_control")]
    return sum(_statistic(file, "oom_kill") for file in (*files, Path("/proc/vmstat")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A visible GPU, or the part of one that CUDA uses. Sizes are in bytes; 0 if nvidia-smi prints none."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    is_part: bool = False  # made by MIG
    of_host: bool = False  # the memory is the host's


def nvidia_gpus() -> list[Gpu]:
    """Return the visible GPUs, from nvidia-smi. Raises UserError if nvidia-smi hangs."""
    rows = _ask_nvidia("name", "index", "uuid", "memory.total", "memory.free", "mig.mode.current")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = _visible(rows)
    parted = [row[2] for row in (rows if "MIG-" in visible else found) if row[5] == "Enabled"]
    # CUDA uses one part, and then no whole GPU beside it (NVIDIA's MIG user guide)
    return (_first_part(parted, visible) if parted else []) or [_gpu(*row[:5]) for row in found if row[2] not in parted]


def _gpu(name: str, _: str, uuid: str, total: str, free: str) -> Gpu:
    if total.isdigit() and free.isdigit():
        return Gpu(name=name, uuid=uuid, total_bytes=int(total) * MIB, free_bytes=int(free) * MIB)
    from zerofit.spec.devices import by_name  # reads the catalog

    device = by_name(name)
    if device and device.unified_memory:  # nvidia-smi prints [N/A] for a GPU without memory of its own
        host = psutil.virtual_memory()
        return Gpu(name=name, uuid=uuid, total_bytes=host.total, free_bytes=host.available, of_host=True)
    return Gpu(name=name, uuid=uuid, total_bytes=0, free_bytes=0)


def _first_part(parted: list[str], visible: str) -> list[Gpu]:
    """Return the first visible part of the GPUs with these UUIDs; [] if they have none.

    `visible`: the value of CUDA_VISIBLE_DEVICES.
    """
    wanted = visible.split(",")[0].strip() if visible.startswith("MIG-") else ""
    names = iter(re.findall(r"UUID: (MIG-[^)\s]+)", _run_nvidia("-L")))  # some drivers leave them out of the XML
    for gpu in _parsed(_run_nvidia("-q", "-x")).iter("gpu"):
        for part in gpu.iter("mig_device"):
            uuid = next(names, "")
            sizes = [part.findtext(f"fb_memory_usage/{kind}", "").split() for kind in ("total", "reserved", "free")]
            if gpu.findtext("uuid") in parted and uuid.startswith(wanted):
                total, reserved, free = (int(size[0]) * MIB if size and size[0].isdigit() else 0 for size in sizes)
                name = gpu.findtext("product_name", "")
                return [Gpu(name=name, uuid=uuid, total_bytes=total - reserved, free_bytes=free, is_part=True)]
    return []


def _parsed(text: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return ElementTree.Element("nothing")


def gpu_memory(count: int) -> list[Gpu]:
    """Return the first `count` visible GPUs whose memory is known; [] if nvidia-smi is missing or hangs."""
    with suppress(UserError):
        return [gpu for gpu in nvidia_gpus() if gpu.total_bytes][:count]
    return []


def visible_gpus() -> int | None:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves this process; None if not set or unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    if not visible.strip() or visible.lstrip().startswith("-"):
        return 0
    # A container may have GPUs but no nvidia-smi. So the number is unknown if no GPU is found.
    with suppress(UserError):
        return len(nvidia_gpus() or amd_gpus()) or None
    return None


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of the GPUs that CUDA_VISIBLE_DEVICES names, in its order.

    `rows`: name, index, UUID and other fields of each GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return rows
    found = list[list[str]]()
    # An index counts in CUDA's order, by default the fastest GPU first (CUDA_DEVICE_ORDER). nvidia-smi lists by PCI
    # bus. The orders can differ only if the GPUs do.
    for name in map(str.strip, visible.split(",")):  # indices, or UUIDs and their beginnings
        row = next((row for row in rows if name and (name == row[1] or row[2].startswith(name))), None)
        if row is None:  # CUDA ignores an invalid name and all names after it: "0,-1,1" is GPU 0
            break
        if row in found:  # CUDA refuses the list
            return []
        found.append(row)
    return found


def _ask_nvidia(*fields: str) -> list[list[str]]:
    """Return these fields of each GPU from nvidia-smi; [] if nvidia-smi is not installed."""
    lines = _run_nvidia(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits").splitlines()
    # Only the first field, a name, may contain commas, so lines are split from the right.
    rows = [[value.strip() for value in line.rsplit(",", len(fields) - 1)] for line in lines]
    return [row for row in rows if len(row) == len(fields)]


def _run_nvidia(*arguments: str) -> str:
    """Return what nvidia-smi prints; "" if it is not installed.

    Raises UserError if nvidia-smi hangs, as it does when the driver does.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=SMI_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{program} does not answer: {error}"
        hint = "look for the driver's errors with `dmesg`, or say which GPUs there are with --gpu and --gpus"
        raise UserError(Problem(kind="gpu", message=message, hint=hint)) from None


def amd_gpus() -> list[Gpu]:
    """Return the AMD GPUs, from torch; [] without AMD's driver."""
    if not Path("/dev/kfd").exists():
        return []
    import torch  # no command-line program for this is always installed

    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [Gpu(name=gpu.name, uuid="", total_bytes=gpu.total_memory, free_bytes=0) for gpu in found]


def libaio() -> dict[str, bool]:
    """Return whether the C++ compiler finds libaio's header and library, for NVMe offload."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        return {"compiler": False}
    flags, libraries = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))

    def accepts(program: str, *arguments: str) -> bool:
        argv = [*compiler, *flags, "-x", "c++", "-", *arguments]
        return subprocess.run(argv, input=program.encode(), capture_output=True, check=False).returncode == 0

    with tempfile.TemporaryDirectory() as folder:
        # The program is linked, not only compiled: packages such as libaio1 have the library without its development
        # files.
        main = 'extern "C" int io_submit(); int main() { return io_submit(); }'
        library = accepts(main, "-o", f"{folder}/program", *libraries, "-laio")
    return {"header": accepts("#include <libaio.h>", "-fsyntax-only"), "library": library}


NAMES = ("zerofit", "torch", "torchvision", "deepspeed", "transformers", "accelerate")


def versions() -> dict[str, str]:
    """Return the versions of the installed distributions."""
    found = {name: installed_version(name) for name in NAMES}
    return {name: version for name, version in found.items() if version is not None}


def is_older(distribution: str, version: tuple[int, int]) -> bool:
    """Return whether an installed distribution is older than (major, minor), without an import."""
    found = installed_version(distribution)
    return found is not None and tuple(map(int, found.split(".")[:2])) < version


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates of one rank, in bytes or FLOP per second; None if not measured."""

    kind: str  # the value of `--gpu`
    device_name: str  # as torch reports it
    devices: int
    date: str  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)
    matmul_flops: dict[str, float] = field(default_factory=dict)  # by precision
    memory_bandwidth: float | None = None  # of the device
    adam_bandwidth: float | None = None  # of the device in an Adam step
    sgd_bandwidth: float | None = None  # of the device in a step of SGD with momentum
    launch_s: float | None = None  # host time per small op of a model
    hook_s: float | None = None  # host time for ZeRO-3 to fetch and release a parameter
    gradient_s: float | None = None  # host time to reduce and apply a parameter's gradient
    link: float | None = None  # bus bandwidth of a ring all-reduce between local ranks
    link_latency_s: float | None = None  # of a small all-reduce
    call_s: float | None = None  # of each of many small all-gathers that are issued together
    host_copy: float | None = None  # copies from pinned host memory to the device; on a CPU, copies in memory
    host_bandwidth: float | None = None  # of host memory in an Adam step on all cores
    disk_read: float | None = None
    disk_write: float | None = None
    kernels: tuple[MeasuredKernel, ...] = ()  # by shape: plan uses these instead of the rates above
    collectives: tuple[MeasuredCollective, ...] = ()  # by bytes, between local ranks
    origin: str = ""  # "": measured here; otherwise the trace file from which `longer`, `slower` and the kernels are
    longer: dict[str, float] = field(default_factory=dict)  # by kind: time in a trace / forecast from the above
    slower: float = 1.0  # factor on the step time, for the part that the trace does not split by kind

    @classmethod
    def from_dict(cls, value: object) -> Calibration:
        """Return the calibration from a dictionary that `asdict` made. Raises Unreadable otherwise."""
        from pydantic import TypeAdapter  # slow to import (0.1 s), and only needed with a calibration

        return shaped(value, TypeAdapter(cls))


def calibration_file() -> Path:
    """Return the path of the calibration file."""
    return cache_root() / "calibration.json"


def write_calibration(calibration: Calibration) -> Path:
    """Save the calibration; return the path."""
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(calibration))
    return path


def read_calibration(kind: str) -> Calibration | None:
    """Return the calibration for this kind of device; None if there is none that can be read."""
    try:
        found = Calibration.from_dict(read_json(calibration_file()))
    except (OSError, Unreadable):
        return None
    return found if found.kind == kind else None
