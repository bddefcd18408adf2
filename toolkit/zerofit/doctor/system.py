"""Read a host's limits, tools, processes, GPUs, compilers and addresses, without torch."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import psutil

from zerofit.launch.host import interface_of, run_id_of, unrelated_processes
from zerofit.spec.local_machine import usable_cores

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
TOOLS = ("g++", "c++", "nvcc", "ninja", "ssh", "pdsh")
BESIDE = (Path(sys.prefix) / "bin", Path("/usr/local/cuda/bin"))
RANKS = ("zerofit.worker", "zerofit.launch.local_ranks", "deepspeed.launcher.launch")
FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "compute_cap", "driver_version")
USERS = ("gpu_uuid", "pid", "process_name")  # the name is last, since it may have commas
SMI_S = 8.0  # seconds for nvidia-smi; without persistence mode it first loads the driver
MIB = 2**20
COMPILER_S = 10.0  # seconds for a compiler to print its version
CONNECT_S = 4.0


class GpuProcess(TypedDict):
    """A process that uses a GPU."""

    pid: int
    name: str


class GpuFacts(TypedDict):
    """One GPU, from nvidia-smi. Bytes are None if it prints none."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    reserved_bytes: int  # by zerofit runs
    compute_capability: str
    processes: list[GpuProcess]


class GpuSurvey(TypedDict):
    """The GPUs, the driver's version, and the error if nvidia-smi exists but fails."""

    gpus: list[GpuFacts]
    driver: str | None
    gpu_error: str | None


class Address(TypedDict):
    """An address of a network interface that is up."""

    interface: str
    address: str
    mtu: int
    speed_mbit: int | None


class Stray(TypedDict):
    """A process of a zerofit run, or of a launcher of ranks."""

    pid: int
    run: str | None
    user: str


class Cores(TypedDict):
    """The number of processor cores that this process may use, and the machine's architecture."""

    usable: int
    machine: str


# the versions of g++ and nvcc, and the newest g++ that nvcc accepts
Compilers = TypedDict("Compilers", {"g++": str | None, "nvcc": str | None, "newest_g++": int | None})


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process, which its children inherit; None: no limit."""
    found = {name: resource.getrlimit(which)[0] for name, which in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in found.items()}


def shared_memory_bytes() -> int:
    """Return the size of /dev/shm; 0 without it."""
    try:  # NCCL, gloo and loaders pass tensors through it
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def tools() -> dict[str, str | None]:
    """Return the path of each program, from PATH or its usual place; None if it is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, BESIDE)])
    return {name: shutil.which(name, path=path) for name in TOOLS}


def strays() -> list[Stray]:
    """Return the processes of runs and of rank launchers on this host that this user may see."""
    found: list[Stray] = []
    for process in unrelated_processes():
        with suppress(psutil.Error):  # it has ended, or it is another user's
            # A rank's children inherit the run id in their environment. Launchers of other programs are found by their
            # command line.
            run, argv = run_id_of(process.pid), process.cmdline()
            if run is None and not any(word in RANKS for word in argv):
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            found.append({"pid": process.pid, "run": run, "user": process.username()})
    return found


def cores() -> Cores:
    """Return the usable processor cores and the machine's architecture."""
    return {"usable": usable_cores(), "machine": platform.machine()}


def gpus() -> GpuSurvey:
    """Return the GPUs with their processes, the driver, and the error if nvidia-smi fails."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "driver": None, "gpu_error": None}
    try:
        with ThreadPoolExecutor(2) as pool:
            devices, apps = pool.submit(_nvidia_smi, "gpu", FIELDS), pool.submit(_nvidia_smi, "compute-apps", USERS)
        rows, users = devices.result(), apps.result()
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stdout", None) or str(error)
        return {"gpus": [], "driver": None, "gpu_error": " ".join(str(message).split())[:300]}
    found = [_gpu(row, users) for row in rows]
    return {"gpus": found, "driver": rows[0]["driver_version"] if rows else None, "gpu_error": None}


def _nvidia_smi(what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of one query of nvidia-smi. Raises OSError and SubprocessError."""
    argv = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_S, check=True)
    rows = [line.split(", ", len(fields) - 1) for line in done.stdout.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _gpu(row: dict[str, str], users: list[dict[str, str]]) -> GpuFacts:
    processes: list[GpuProcess] = [
        {"pid": int(user["pid"]), "name": user["process_name"]}
        for user in users
        if user["gpu_uuid"] == row["uuid"] and user["pid"].isdigit()
    ]
    return {
        "index": int(row["index"]),
        "uuid": row["uuid"],
        "name": row["name"],
        "total_bytes": _bytes(row["memory.total"]),
        "used_bytes": _bytes(row["memory.used"]),
        "reserved_bytes": 0,
        "compute_capability": row["compute_cap"],
        "processes": processes,
    }


def _bytes(mib: str) -> int | None:
    # nvidia-smi prints "[N/A]" for a part of a GPU and in containers
    return int(mib) * MIB if mib.isdigit() else None


def compilers(tools: Mapping[str, str | None]) -> Compilers:
    """Return the versions of g++ and nvcc, and the newest g++ that nvcc accepts."""
    nvcc = tools["nvcc"]
    return {
        # Debian's `g++ -dumpversion` prints only "12" for 12.2.0. Old compilers have no -dumpfullversion.
        "g++": _printed(tools["g++"] or tools["c++"], ["-dumpfullversion", "-dumpversion"], r"^(\d+(?:\.\d+)*)"),
        "nvcc": _printed(nvcc, ["--version"], r"release (\d+\.\d+)"),
        "newest_g++": _newest_gcc(Path(nvcc).resolve().parents[1]) if nvcc else None,
    }


def _printed(program: str | None, arguments: list[str], pattern: str) -> str | None:
    """Run a program and return the first group of `pattern` in its output."""
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=COMPILER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(pattern, done.stdout, re.MULTILINE)
    return found[1] if found else None


def _newest_gcc(cuda_home: Path) -> int | None:
    # this header refuses newer compilers with a line like `#if __GNUC__ > 13`
    headers = ("include/crt/host_config.h", "targets/*/include/crt/host_config.h")
    for path in (path for header in headers for path in cuda_home.glob(header)):
        found = re.search(r"__GNUC__ > (\d+)", path.read_text(errors="replace"))
        if found:
            return int(found[1])
    return None


def addresses() -> list[Address]:
    """Return the addresses of all interfaces that are up."""
    states = psutil.net_if_stats()
    found: list[Address] = []
    for name, rows in psutil.net_if_addrs().items():
        state = states.get(name)
        for row in rows:
            if row.family not in (socket.AF_INET, socket.AF_INET6) or state is None or not state.isup:
                continue
            # A local IPv6 address ends in its interface: fe80::1%eth0.
            address = row.address.split("%")[0]
            speed = state.speed or None
            found.append({"interface": name, "address": address, "mtu": state.mtu, "speed_mbit": speed})
    return found


def ssh_address() -> str | None:
    """Return this host's address in the ssh connection of this process, or None."""
    words = os.environ.get("SSH_CONNECTION", "").split()  # the client's address and port, then the server's
    return words[2] if len(words) == 4 else None


def port_taken(port: int) -> str:
    """Return the message that a port is in use, with the processes that this user may see."""
    names, connections = [], []
    with suppress(psutil.Error):
        connections = psutil.net_connections("tcp")
    holders = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port}
    for pid in filter(None, holders):
        with suppress(psutil.Error):
            names.append(f"{psutil.Process(pid).name()} (process {pid})")
    return f"port {port} is in use" + (" by " + ", ".join(names) if names else "")


def reach(host: str, port: int) -> dict[str, object]:
    """Connect to a port. Return seconds, this host's address and interface, or the error."""
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            # The system chooses the interface by its routes. The socket's own address shows its choice.
            own = connection.getsockname()[0]
    except TimeoutError:
        return {"error": f"no answer in {CONNECT_S:.0f} s"}
    except OSError as error:
        words = {errno.ECONNREFUSED: "refused", errno.EHOSTUNREACH: "no route", errno.ENETUNREACH: "no route"}
        return {"error": words.get(error.errno or 0, str(error))}
    return {"error": None, "seconds": time.monotonic() - start, "address": own, "interface": interface_of(own)}
