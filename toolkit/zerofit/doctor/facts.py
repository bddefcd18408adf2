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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zerofit.doctor import software, system
from zerofit.doctor.serve import Say, serve
from zerofit.launch.host import end_all
from zerofit.spec.local_machine import host_memory, libaio
from zerofit.spec.reservations import reserved_on_gpus, reserved_on_host

LIFE_S = 120


def collect(question: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Return all facts of this host. The file that tests the run folder is removed when `stack` closes."""
    with ThreadPoolExecutor(2) as pool:
        graphics = pool.submit(system.gpus)  # nvidia-smi and the compiler are slow, so they run in parallel
        aio = pool.submit(libaio)
        found = {
            "hostname": socket.gethostname(),
            "python": sys.executable,
            "versions": software.versions(),
            "code": {"zerofit": software.own_code(), "model": _of(question.get("code"), software.code_hash)},
            "run_file": _of(question.get("run_file"), software.file_hash),
            "addresses": system.addresses(),
            "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),  # also RoCE adapters
            "asked_from": system.asked_from(),
            "memory": _memory(),
            "shared_memory": system.shared_memory(),
            "limits": system.limits(),
            "tools": system.tools(),
            "libaio": aio.result(),
            "strays": system.strays(),
            "cores": system.cores(),
            "run_folder": _of(question.get("run_folder"), lambda path: _look(path, str(question["token"]), stack)),
        }
        if question.get("compilers"):
            found["compilers"] = system.compilers(found["tools"])
        seen, claims = graphics.result(), reserved_on_gpus()
        seen["gpus"] = [{**gpu, "reserved_bytes": claims.get(gpu["uuid"], 0)} for gpu in seen["gpus"]]
        return found | seen


def _memory() -> dict[str, int]:
    """Return bytes of host memory: total, free now, and reserved by other zerofit runs but not allocated yet."""
    total, free = host_memory()
    return {"total_bytes": total, "free_bytes": free, "reserved_bytes": reserved_on_host()}


def _of(path: str | None, work: Any) -> object:
    return None if path is None else work(Path(path))


def _look(folder: Path, token: str, stack: ExitStack) -> dict[str, object]:
    """Return `same` (whether the run folder has the file `token`), `writable` or `error`, `free_bytes`, `mark`.

    `mark` is a new file, which the asking command looks for. It is removed when `stack` closes.
    """
    there = os.path.isdir(folder)  # False also for a folder that this user may not enter; Path.is_dir raises
    same = os.path.isfile(folder / token)
    nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.isdir(p))
    found = {"exists": there, "same": same, "free_bytes": shutil.disk_usage(nearest).free, "error": None}
    mark = nearest / f".zerofit-seen-by-{uuid.uuid4().hex}"
    try:
        with mark.open("xb") as file:
            file.write(b"zerofit\n")
            os.fsync(file.fileno())
    except OSError as error:
        return found | {"writable": False, "mark": None, "error": error.strerror}
    if same:
        stack.callback(mark.unlink, missing_ok=True)
    else:
        mark.unlink(missing_ok=True)
    return found | {"writable": True, "mark": mark.name if same else None}


def _listen(port: int, stack: ExitStack) -> dict[str, object]:
    """Listen on all addresses of this host, as torch's rendezvous store does; return the port or an error."""
    try:
        server = stack.enter_context(socket.create_server(("", port), family=socket.AF_INET, backlog=256))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return {"error": system.port_taken(port) if taken else f"port {port}: {error.strerror}"}
    return {"error": None, "port": server.getsockname()[1]}


def _reach(question: dict[str, Any]) -> dict[str, object]:
    targets = [(str(host), int(port)) for host, port in question["targets"]]
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return {"reached": list(pool.map(lambda target: system.reach(*target), targets))}


def answer(question: dict[str, Any], stack: ExitStack, say: Say) -> dict[str, Any]:
    """Answer one question."""
    asked = question.get("ask")
    if asked == "facts":
        return collect(question, stack)
    if asked == "listen":
        return _listen(int(question["port"]), stack)
    if asked == "reach":
        return _reach(question)
    if asked == "sweep":
        return {"ended": end_all(str(question["mark"]))}
    return {"error": f"unknown question {asked!r}"}


if __name__ == "__main__":
    os.umask(0o077)
    serve(answer, LIFE_S)
