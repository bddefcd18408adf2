"""Facts about this host: devices, ranks' environment, routes to other hosts, processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from zerofit.spec.files import cache_root
from zerofit.spec.local_machine import cpu_ranks, usable_cores
from zerofit.spec.model_facts import Machine

RUN_ID = "ZEROFIT_RUN"  # variable in the environment of every process of a launch
WAIT_S = 5.0
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
# the format that DeepSpeed's builder parses (op_builder/builder.py, compute_capability_args): "8.0;9.0+PTX", not
# torch's "9.0a" or "Hopper"
_ARCHITECTURES = re.compile(r"[; ]*(\d+\.\d+(\+PTX)?[; ]*)*")


def this_machine() -> Machine:
    """Return the devices that ranks can use on this host: all GPUs, else the CPU."""
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability(0)
        return Machine(
            accelerator="cuda",
            devices=torch.cuda.device_count(),
            cores=cores,
            device_name=torch.cuda.get_device_name(0),
            fp16=True,
            bf16=major >= 8,
        )
    return Machine(
        accelerator="cpu",
        devices=cpu_ranks(cores),
        cores=cores,
        device_name=f"CPU ({platform.machine()})",
        fp16=torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # the check of DeepSpeed's CPU accelerator
        bf16=True,  # torch supports it on any CPU, slowly without native instructions
    )


def environment(accelerator: str, cores: int, ranks: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of `ranks` on one host: accelerator, threads, a folder for ops.

    Keep the variables of `base` (default: os.environ). Exceptions: PYTHONSAFEPATH is set to 1, the folder of this
    environment's programs is first in PATH, and TORCH_CUDA_ARCH_LIST is cleared if DeepSpeed cannot parse it.
    """
    env = dict(os.environ if base is None else base)
    env.setdefault("DS_ACCELERATOR", accelerator)
    env.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))
    # After a fork (data loaders), tokenizers would switch its threads off and warn in each process.
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PATH"] = with_own_programs(env.get("PATH", os.defpath))
    env["PYTHONSAFEPATH"] = "1"  # a user's profile.py must not replace the standard library's
    if not _ARCHITECTURES.fullmatch(env.get(ARCH_LIST, "")):
        env[ARCH_LIST] = ""  # the old value makes DeepSpeed's builder fail; for "" it queries the devices
    if accelerator == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        # DeepSpeed's CPU accelerator returns it as the number of devices (cpu_accelerator.py:71).
        env.setdefault("LOCAL_SIZE", str(ranks))
    return env


def with_own_programs(path: str) -> str:
    """Return a PATH with the programs of this environment first."""
    # The ninja of this environment compiles and checks the ops. If the system's ninja has a different version, it would
    # silently compile all ops again.
    own = str(Path(sys.executable).parent)
    return path if path.split(os.pathsep)[0] == own else f"{own}{os.pathsep}{path}"


def ops_folder() -> Path:
    """Return the folder of compiled C++ ops."""
    # each environment has its own, or environments would rebuild each other's ops
    versions = [importlib.metadata.version(name) for name in ("torch", "deepspeed")]
    key = hashlib.sha256("\n".join([sys.prefix, sys.version, *versions]).encode()).hexdigest()[:12]
    return cache_root() / "ops" / key


def address_to(other: str) -> str | None:
    """Return this host's address on the route to another host; None without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_to(other: str) -> str | None:
    """Return this host's interface on the route to another host; None if there is only loopback."""
    own = address_to(other)
    return None if own is None or own.startswith("127.") else interface_of(own)


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with this address."""
    plain = address.split("%")[0]  # "%" begins the scope of an IPv6 address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if any(a.address.split("%")[0] == plain for a in own)), None)


def unrelated_processes() -> Iterator[psutil.Process]:
    """Return all processes on this host except this one and its ancestors."""
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    return (process for process in psutil.process_iter() if process.pid not in spared)


def run_id_of(pid: int) -> str | None:
    """Return the run id in a process's environment; None if it has none or is another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    key = f"{RUN_ID}=".encode()
    values = [entry[len(key) :] for entry in raw.split(b"\0") if entry.startswith(key)]
    return os.fsdecode(values[0]) if values else None


def end_all(run_id: str) -> int:
    """Kill all processes with this run id on this host, except this process and its ancestors.

    Return the number of killed processes.
    """
    left_over = [process for process in unrelated_processes() if run_id_of(process.pid) == run_id]
    for process in left_over:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left_over, timeout=WAIT_S)
    return len(left_over)
