"""What this machine has, without importing torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

LIBAIO_HINT = "install libaio-dev (Debian, Ubuntu) or libaio-devel (RHEL, Fedora, SUSE)"


def usable_cores() -> int:
    """Return the physical cores that this process may use."""
    return min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))


def cpu_ranks(cores: int) -> int:
    """Return how many ranks make sense on the CPU: two, or one a NUMA node where there are more."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return max(1, min(cores, max(2, nodes)))


def memory_bytes() -> int:
    """Return the memory of the host, or of the control group that this process is in."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no group, or "max"
        return total


def nvidia_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of each GPU, as nvidia-smi lists them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), int(mib) * 2**20) for name, mib in rows if mib.strip().isdigit()]


def amd_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of each GPU as torch sees them, where the kernel has AMD's compute driver."""
    if not Path("/dev/kfd").exists():
        return []
    import torch  # no program that is always there lists them

    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [(one.name, one.total_memory) for one in found]


def libaio() -> dict[str, bool]:
    """Return whether the C++ compiler is there and finds libaio's header and library, which NVMe offload needs."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        return {"compiler": False}
    flags, libraries = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))

    def accepts(program: str, *arguments: str) -> bool:
        argv = [*compiler, *flags, "-x", "c++", "-", *arguments]
        return subprocess.run(argv, input=program.encode(), capture_output=True, check=False).returncode == 0

    with tempfile.TemporaryDirectory() as folder:
        main = 'extern "C" int io_submit(); int main() { return io_submit(); }'
        library = accepts(main, "-o", f"{folder}/program", *libraries, "-laio")
    return {"header": accepts("#include <libaio.h>", "-fsyntax-only"), "library": library}
