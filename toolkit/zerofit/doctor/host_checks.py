"""What a host has for training, from its facts: devices, tools, limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerofit.doctor.check import OK, WARN, Check, check
from zerofit.doctor.clashes import clashes, driver
from zerofit.spec.hardware import by_name
from zerofit.spec.local_machine import LIBAIO_HINT
from zerofit.spec.units import shown_bytes

Facts = dict[str, Any]
GIB = 2**30
NOFILE = 4096  # 8 ranks, each with a socket to every other rank, loader workers and checkpoint files
NPROC = 4096
MEMLOCK = 64 * 2**20  # NCCL over InfiniBand registers its buffers; its manual asks for no limit at all
MEMLOCK_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
SHARED = GIB  # a container has 64 MiB by default; NCCL and loader workers hand tensors on through it
TOTAL_SHARE = 0.95  # of the catalogue's memory: ECC and the driver take a part


def checks(host: str, facts: Facts, *, many: bool) -> Iterator[Check]:
    """All of them; `many`: the host is one of several."""
    yield from _gpus(host, facts)
    yield from driver(host, facts)
    yield from _nccl(host, facts)
    yield from _compilers(host, facts)
    yield from clashes(host, facts)
    yield _libaio(host, facts)
    yield from _remote(host, facts, many=many)
    yield from _limits(host, facts)
    yield _shared(host, facts)
    memory = facts["memory"]
    value = f"{shown_bytes(memory['free_bytes'])} of {shown_bytes(memory['total_bytes'])} free"
    yield Check(name="memory", host=host, status=OK, value=value, figure=float(memory["free_bytes"]))


def _gpus(host: str, facts: Facts) -> Iterator[Check]:
    """Each kind of GPU against the hardware table."""
    if not facts["gpus"]:
        problem = f"nvidia-smi fails: {facts['gpu_error']}" if facts["gpu_error"] else ""
        hint = "mend the driver; after an update: reboot"
        yield check("gpus", host, problem, f"none: {facts['cores']['usable']} cores", hint=hint)
        return
    for name in dict.fromkeys(gpu["name"] for gpu in facts["gpus"]):
        same = [gpu for gpu in facts["gpus"] if gpu["name"] == name]
        device, total = by_name(name), min(gpu["total_bytes"] or 0 for gpu in same)
        good, problem = f"{len(same)} x {name}, {shown_bytes(total)}", ""
        if device is None:
            problem = f"{good}: not in the catalogue, so that nothing is known of its speed"
        elif total and total < TOTAL_SHARE * device.memory_bytes:
            problem = f"{good}: less memory than the catalogue's {shown_bytes(device.memory_bytes)}"
        hint = "plan with the nearest kind and its memory: --gpu KIND --device-memory SIZE"
        yield check("gpus", host, problem, good, WARN, hint=hint)


def _nccl(host: str, facts: Facts) -> Iterator[Check]:
    if facts["gpus"] and not facts["versions"]["hip"]:
        found = facts["versions"]["nccl"]
        problem = "" if found else "no nvidia-nccl package beside torch"
        yield check("nccl", host, problem, str(found), WARN, hint="torch may bring its own; its wheels name it")


def _compilers(host: str, facts: Facts) -> Iterator[Check]:
    needed = {"g++": "apt-get install g++", "ninja": "pip install ninja"}
    if facts["gpus"]:
        needed["nvcc"] = "install the CUDA toolkit of torch's version, or load its module"
    for name, hint in needed.items():
        there, found = facts["tools"][name], facts["compilers"].get(name)
        good = f"{found} ({there})" if found else str(there)
        expected = "there: DeepSpeed's C++ ops (offload, fused optimizers) are compiled with it"
        yield check(f"compiler {name}", host, "" if there else "missing", good, WARN, expected=expected, hint=hint)


def _libaio(host: str, facts: Facts) -> Check:
    lacks = [part for part, there in facts["libaio"].items() if not there]
    problem = f"no {' and no '.join(lacks)}" if lacks else ""
    hint = f"{LIBAIO_HINT}; offload to host memory works without"
    return check("libaio", host, problem, "there", WARN, expected="there, for offload to NVMe", hint=hint)


def _remote(host: str, facts: Facts, *, many: bool) -> Iterator[Check]:
    for name in ("ssh", "pdsh"):
        there = facts["tools"][name]
        if there or many:
            expected = "there, to start ranks on other hosts"
            yield check(name, host, "" if there else "missing", str(there), WARN, expected, f"apt-get install {name}")


def _limits(host: str, facts: Facts) -> Iterator[Check]:
    locks = facts["gpus"] and facts["infiniband"]
    least = {"nofile": NOFILE, "nproc": NPROC} | ({"memlock": MEMLOCK} if locks else {})
    for name, value in least.items():
        has = facts["limits"][name]
        low = has is not None and has < value
        yield Check(
            name=f"limit {name}",
            host=host,
            status=WARN if low else OK,
            value="none" if has is None else str(has),
            expected=f"{value} or more",
            hint=f"raise it in /etc/security/limits.conf (* - {name} unlimited), or with `ulimit`" if low else "",
            figure=None if has is None else float(has),
            source=MEMLOCK_SOURCE if name == "memlock" else "",
        )


def _shared(host: str, facts: Facts) -> Check:
    found = facts["shared_memory"]
    total = found["total_bytes"] if found else 0
    return Check(
        name="shared-memory",
        host=host,
        status=OK if total >= SHARED else WARN,
        value=shown_bytes(total),
        expected=f"{shown_bytes(SHARED)} or more in /dev/shm",
        hint="" if total >= SHARED else "start the container with --shm-size 16g, or --ipc host",
        figure=float(total),
        source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    )
