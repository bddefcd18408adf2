"""Facts of one host. This program does not import torch, so it answers in 0.3 s.

`python -P -m zerofit.doctor.facts` answers questions (see `serve`):

    {"ask": "facts", "run_folder", "token", "run_file", "code": paths, "compilers": false}     `collect`
    {"ask": "listen", "port": 29500}             listen on this port until the end (0: any free port)
    {"ask": "sweep", "mark": ...}                kill all processes that were started with this run id
    {"ask": "reach", "targets": [["10.0.0.1", 29500], ...]}     connect to each
"""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib.util
import os
import platform
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from zerofit.doctor import system
from zerofit.doctor.serve import Say, serve
from zerofit.launch.host import end_all
from zerofit.spec.extras import installed_version
from zerofit.spec.local_machine import host_memory, libaio
from zerofit.spec.reservations import reserved_on_gpus, reserved_on_host

PACKAGES = ("zerofit", "deepspeed", "transformers", "torchvision", "numpy")
CODE = {".py", ".json", ".yaml", ".yml"}
AT_MOST = 10_000  # maximum number of files to hash; a folder with more files is not a package
LIFE_S = 120
T = TypeVar("T")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, packages, CUDA, ROCm and NCCL; None if missing."""
    installed = {name: installed_version(name) for name in PACKAGES}
    found = {"python": platform.python_version(), **installed, **_torch()}
    cuda = found.get("cuda")
    found["nccl"] = installed_version(f"nvidia-nccl-cu{cuda.split('.')[0]}") if cuda else None
    return found


def _torch() -> dict[str, str | None]:
    names = {"torch": "__version__", "cuda": "cuda", "hip": "hip", "torch_git": "git_version"}
    # The package's metadata has torch's version, but not its CUDA, ROCm or commit.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return dict.fromkeys(names)
    constants: dict[str, str | None] = {}
    # the assignments in torch/version.py, read as text, since importing torch needs seconds
    for node in ast.parse((Path(spec.origin).parent / "version.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant):
            constants[targets[0].id] = value.value if isinstance(value.value, str) else None
    return {name: constants.get(key) for name, key in names.items()}


def own_code() -> str:
    """Return the hash of this host's zerofit source."""
    top = Path(__file__).parents[1]
    return _hashed((str(p.relative_to(top)), p) for p in _files(top, CODE))


def model_code(model: str) -> Path | None:
    """Return the file or top folder of a model `package.module:callable`, if there is one."""
    module, colon, _ = model.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        return None
    top = module.split(".")[0]
    # The order is that of an import in a rank: the current folder first, and a package before a module of the same
    # name.
    candidates = [Path(folder or ".") / name for folder in ("", *sys.path) for name in (top, f"{top}.py")]
    found = [path for path in candidates if path.exists()]
    # like Python's import: a folder without __init__.py counts only if there is no module of this name
    modules = (path for path in found if path.suffix or (path / "__init__.py").exists())
    return next(modules, found[0] if found else None)


def code_hash(path: Path) -> str | None:
    """Return the hash of a module's file or a package's Python files; None if it does not exist."""
    if path.is_file():
        return _hashed([(path.name, path)])
    return _hashed((str(p.relative_to(path)), p) for p in _files(path, {".py"})) if path.is_dir() else None


def file_hash(path: Path) -> str | None:
    """Return the hash of one file's bytes; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _files(top: Path, kinds: set[str]) -> list[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(top, followlinks=True):
        venvs = {name for name in inner if Path(folder, name, "pyvenv.cfg").exists()}
        # os.walk enters the folders that are left, in this order; a hash needs a fixed order
        inner[:] = sorted(name for name in inner if name[0] != "." and name not in {"__pycache__", *venvs})
        found += [Path(folder, name) for name in sorted(names) if Path(name).suffix in kinds]
        if len(found) >= AT_MOST:
            break
    return found[:AT_MOST]


def _hashed(files: Iterable[tuple[str, Path]]) -> str:
    total = hashlib.sha256()
    for name, path in files:
        total.update(f"{name}\0{file_hash(path)}\0".encode())
    return total.hexdigest()


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

    python: str
    versions: dict[str, str | None]
    code: CodeHashes
    run_file: str | None  # its hash
    addresses: list[system.Address]
    infiniband: list[str]
    ssh_address: str | None
    memory: HostMemoryFacts
    shared_memory_bytes: int
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
            "python": sys.executable,
            "versions": versions(),
            "code": {"zerofit": own_code(), "model": _at(question.get("code"), code_hash)},
            "run_file": _at(question.get("run_file"), file_hash),
            "addresses": system.addresses(),
            "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),  # also RoCE adapters
            "ssh_address": system.ssh_address(),
            "memory": {"total_bytes": total, "free_bytes": free, "reserved_bytes": reserved_on_host()},
            "shared_memory_bytes": system.shared_memory_bytes(),
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
