"""Facts of one host. This program does not import torch, so it answers in 0.3 s.

`python -P -m zerofit.doctor.facts` answers questions (see `serve`):

    {"ask": "facts", "run_folder", "token", "run_file", "code": paths, "compilers": false}     `collect`
    {"ask": "listen", "port": 29500}             listen on this port until the end (0: any free port)
    {"ask": "sweep", "mark": ...}                kill all processes that were started with this run id
    {"ask": "reach", "targets": [["10.0.0.1", 29500], ...]}     connect to each
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from zerofit.doctor import software, system
from zerofit.doctor.serve import Say, serve
from zerofit.launch.host import end_all
from zerofit.spec.local_machine import host_memory, libaio
from zerofit.spec.reservations import reserved_on_gpus, reserved_on_host

LIFE_S = 120
T = TypeVar("T")


class CodeHashes(TypedDict):
    """The hashes of the source of zerofit, and of the user's own model (None without one)."""

    zerofit: str
    model: str | None


class HostMemoryFacts(TypedDict):
    """Bytes of a host's memory."""

    total_bytes: int
    free_bytes: int  # now
    reserved_bytes: int  # by other zerofit runs, and not allocated yet


class RunFolderFacts(TypedDict):
    """What a host finds at the path of the run folder."""

    exists: bool
    same: bool  # whether it has the file that the asking command wrote
    writable: bool
    error: str | None  # why it is not writable
    free_bytes: int
    mark: str | None  # name of a new file, which the asking command looks for


class HostFacts(system.GpuSurvey):
    """All facts of one host, as `collect` returns them and as they travel in JSON."""

    hostname: str
    python: str
    versions: dict[str, str | None]
    code: CodeHashes
    run_file: str | None  # its hash
    addresses: list[system.Address]
    infiniband: list[str]
    asked_from: dict[str, str | None]
    memory: HostMemoryFacts
    shared_memory: dict[str, int] | None
    limits: dict[str, int | None]
    tools: dict[str, str | None]
    libaio: dict[str, bool]
    strays: list[system.Stray]
    cores: system.Cores
    run_folder: RunFolderFacts | None
    compilers: system.Compilers  # missing if it was not asked for


def collect(question: dict[str, Any], stack: ExitStack) -> HostFacts:
    """Return all facts of this host. Its mark in the run folder is removed when `stack` closes."""
    total, free = host_memory()
    with ThreadPoolExecutor(2) as pool:
        survey = pool.submit(system.gpus)  # nvidia-smi and the compiler are slow, so they run in parallel
        aio = pool.submit(libaio)
        found = {
            "hostname": socket.gethostname(),
            "python": sys.executable,
            "versions": software.versions(),
            "code": {"zerofit": software.own_code(), "model": _at(question.get("code"), software.code_hash)},
            "run_file": _at(question.get("run_file"), software.file_hash),
            "addresses": system.addresses(),
            "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),  # also RoCE adapters
            "asked_from": system.asked_from(),
            "memory": {"total_bytes": total, "free_bytes": free, "reserved_bytes": reserved_on_host()},
            "shared_memory": system.shared_memory(),
            "limits": system.limits(),
            "tools": system.tools(),
            "libaio": aio.result(),
            "strays": system.strays(),
            "cores": system.cores(),
            "run_folder": _at(question.get("run_folder"), lambda path: _folder(path, str(question["token"]), stack)),
        }
        if question.get("compilers"):
            found["compilers"] = system.compilers(found["tools"])
        gpus, reserved = survey.result(), reserved_on_gpus()
        for gpu in gpus["gpus"]:
            gpu["reserved_bytes"] = reserved.get(gpu["uuid"], 0)
        return cast(HostFacts, found | gpus)


def _at(path: str | None, work: Callable[[Path], T]) -> T | None:
    return None if path is None else work(Path(path))


def _folder(folder: Path, token: str, stack: ExitStack) -> RunFolderFacts:
    """Return the facts of the run folder, in which the asking command wrote the file `token`."""
    found: RunFolderFacts = {
        "exists": os.path.isdir(folder),  # False also for a folder that this user may not enter; Path.is_dir raises
        "same": os.path.isfile(folder / token),
        "writable": False,
        "error": None,
        "free_bytes": 0,
        "mark": None,
    }
    # The run folder may not exist on this host yet. Then its nearest parent shows the free space and the permission.
    nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.isdir(p))
    found["free_bytes"] = shutil.disk_usage(nearest).free
    mark = nearest / f".zerofit-seen-by-{uuid.uuid4().hex}"
    try:
        with mark.open("xb") as file:
            file.write(b"zerofit\n")
            os.fsync(file.fileno())
    except OSError as error:
        found["error"] = error.strerror
        return found
    found["writable"] = True
    # In the shared folder, the mark stays until the asking command has looked for it.
    if found["same"]:
        found["mark"] = mark.name
        stack.callback(mark.unlink, missing_ok=True)
    else:
        mark.unlink(missing_ok=True)
    return found


def _listen(port: int, stack: ExitStack) -> dict[str, object]:
    """Listen on all addresses of this host, as torch's rendezvous store does."""
    try:
        server = stack.enter_context(socket.create_server(("", port), family=socket.AF_INET, backlog=256))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return {"error": system.port_taken(port) if taken else f"port {port}: {error.strerror}"}
    return {"error": None, "port": server.getsockname()[1]}


def answer(question: dict[str, Any], stack: ExitStack, say: Say) -> Mapping[str, object]:
    """Answer one question."""
    kind = question.get("ask")
    if kind == "facts":
        return collect(question, stack)
    if kind == "listen":
        return _listen(int(question["port"]), stack)
    if kind == "reach":
        targets = [(str(host), int(port)) for host, port in question["targets"]]
        # A target behind a firewall answers nothing until the timeout. So all targets are tried at the same time.
        with ThreadPoolExecutor(max(1, len(targets))) as pool:
            return {"reached": list(pool.map(lambda target: system.reach(*target), targets))}
    if kind == "sweep":
        return {"ended": end_all(str(question["mark"]))}
    return {"error": f"unknown question {kind!r}"}


if __name__ == "__main__":
    os.umask(0o077)
    serve(answer, LIFE_S)
