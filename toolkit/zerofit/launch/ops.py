"""Compile the C++ ops of DeepSpeed that a run needs, before its ranks start."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from zerofit.features.optimizers import of_json
from zerofit.features.zero import features_on
from zerofit.launch.host import ops_folder
from zerofit.launch.parent_death import end_with_parent
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.local_machine import LIBAIO_HINT, libaio
from zerofit.spec.model_facts import Machine

OFFLOADS = ("offload_optimizer", "offload_param")
TRAINING = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "QuantizerBuilder")  # see `needed_ops`
REMOTE = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "afs", "wekafs"}
QUIET_S = 600.0  # seconds without changes after which a build on another host counts as dead
POLL_S = 0.5


# DeepSpeed compiles its C++ ops when an engine first needs them: that takes minutes in each rank, without any output.
# So:
#
#   1. `needed_ops` reads from the JSON which ops the engine will load. Nothing else is compiled.
#   2. A marker file shows that an op was compiled here after torch and DeepSpeed were installed (`_is_built`).
#   3. One process at a time compiles the missing ops. Each op has its own session, which can be killed as a whole.
#   4. Locks that killed builds have left are removed first, or all later builds would wait for them forever.


def needed_ops(config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Return the names of the op builders that the engine needs with this DeepSpeed JSON."""
    zero = config.get("zero_optimization", {})
    devices = [zero.get(part, {}).get("device", "none") for part in OFFLOADS]
    entry = of_json(config.get("optimizer", {}).get("type"))
    params = config.get("optimizer", {}).get("params", {})
    ops = []
    if entry and not params.get("torch_adam"):
        on_host = devices[0] != "none" and config.get("zero_force_ds_cpu_optimizer", True)
        on_host |= machine.accelerator == "cpu" and entry.cpu_class is not None
        ops += filter(None, [entry.host_op if on_host else entry.device_op])
    if "nvme" in devices:
        ops.append("AsyncIOBuilder")
    return [*ops, *dict.fromkeys(feature.op for feature in features_on(config) if feature.op)]


def libaio_problems(config: Mapping[str, object], found: Mapping[str, bool] | None = None) -> list[Problem]:
    """Return the problems of this JSON's NVMe offload: missing parts of libaio, or no compiler.

    `found`: the parts found on another machine. If it is None, this machine is examined.
    """
    zero = config.get("zero_optimization")
    blocks = {part: zero.get(part) for part in OFFLOADS} if isinstance(zero, Mapping) else {}
    nvme = [part for part, block in blocks.items() if isinstance(block, Mapping) and block.get("device") == "nvme"]
    if not nvme:
        return []
    # the op is there already if DeepSpeed was installed with DS_BUILD_OPS=1
    deepspeed = importlib.util.find_spec("deepspeed")
    if deepspeed and deepspeed.origin and [*Path(deepspeed.origin).parent.glob("ops/*/async_io_op*.so")]:
        return []
    missing = [part for part, is_there in (libaio() if found is None else found).items() if not is_there]
    if not missing:
        return []
    message = f"NVMe offload needs libaio, but the compiler does not find its {' and '.join(missing)}"
    hint = f"{LIBAIO_HINT}, or offload to the CPU"
    if missing == ["compiler"]:
        message, hint = "NVMe offload compiles one of DeepSpeed's C++ ops, but there is no C++ compiler", "install g++"
    return [Problem(kind="libaio", message=message, hint=hint, where=f"zero_optimization.{nvme[0]}.device")]


def build_ops(ops: list[str], env: Mapping[str, str], show: Callable[[str], None]) -> None:
    """Compile each missing op and report the elapsed time every half second. Raises RunFailed.

    One process builds at a time, and a build ends with the process that requested it. Lock files of torch left by
    killed builds are removed; zerofit waits for the locks of running builds.
    """
    missing = [op for op in ops if not _is_built(env, op)]
    if not missing:
        return
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    show("waiting for another process that compiles DeepSpeed's ops")
    with FileLock(folder / ".zerofit.lock"):
        clear_stale_locks(folder, show)
        for op in (op for op in missing if not _is_built(env, op)):  # another process may have built it meanwhile
            _build(op, env, show)
            _built(env, op).touch()


def _built(env: Mapping[str, str], op: str) -> Path:
    """Return the file that marks an op as compiled by this environment on this host."""
    # Without this file, a new process would have to import DeepSpeed (6 s) and ask its builder. If the file exists but
    # the op is missing, the builder in each rank compiles the op. Ops differ by the host's processor and GPU.
    return Path(env["TORCH_EXTENSIONS_DIR"]) / f".{op}.{ops_folder().name}.{socket.gethostname()}.built"


def _is_built(env: Mapping[str, str], op: str) -> bool:
    """Return whether an op was compiled after its sources and torch's headers were installed."""
    # ranks silently recompile an op from before a reinstallation of the same version
    built = _built(env, op)
    specs = [importlib.util.find_spec(name) for name in ("torch", "deepspeed")]
    installed = max(Path(spec.origin).stat().st_mtime for spec in specs if spec and spec.origin)
    return built.exists() and built.stat().st_mtime > installed


def _build(op: str, env: Mapping[str, str], show: Callable[[str], None]) -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "zerofit.launch.ops", str(os.getpid()), op],
        env={**env, "MAX_JOBS": env.get("MAX_JOBS", str(os.cpu_count() or 1))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while True:
            show(f"compiling DeepSpeed's {op.removesuffix('Builder')} op ({time.monotonic() - start:.0f} s)")
            try:
                # reads the output while it waits: a full pipe would block the compiler
                output, _ = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        end_session(process.pid)  # ninja and its compilers
        process.wait()
    if process.returncode:
        hint = LIBAIO_HINT if op == "AsyncIOBuilder" else "install a C++ compiler, ninja and the Python headers"
        message = f"cannot compile DeepSpeed's {op}: {' | '.join(output.strip().splitlines()[-3:])}"
        raise RunFailed(Problem(kind="op-build", message=message, hint=hint, where=op))


def end_session(session: int) -> None:
    """Kill every process of a session: ninja puts each compiler into a separate process group."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.pid != os.getpid():
                process.kill()
        except (OSError, psutil.Error):
            continue


def build(parent: int, op: str) -> None:
    """Compile an op unless it is compiled: `python -m zerofit.launch.ops PARENT OP`.

    Ends with its parent. Raises AssertionError if this machine lacks what the op needs.
    """

    def end(*_: object) -> None:
        end_session(os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    end_with_parent(parent, signal.SIGTERM)
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()  # DeepSpeed has no type annotations for it
    builder = accelerator.get_op_builder(op)()
    assert builder.is_compatible(verbose=True), f"{op} is not compatible with this machine"
    builder.load()


def locks_by_existence() -> bool:
    """Return whether the installed torch treats an existing lock file as a held lock."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    return "FileBaton" in (Path(spec.origin).parent / "utils" / "cpp_extension.py").read_text(encoding="utf-8")


def clear_stale_locks(folder: Path, show: Callable[[str], None]) -> None:
    """Remove lock files of killed op builds, and wait for locks of running builds."""
    # torch 2.14 locks `FOLDER/OP/lock` in the kernel, which releases the lock when its holder dies, so nothing needs to
    # be done. Older versions create the file for a build, keep it open, and remove it at the end
    # (torch.utils.file_baton). Other processes wait for it silently; they wait forever if the owner of the file was
    # killed. The file does not name its owner, but /proc shows which process has the file open.
    if not locks_by_existence():
        return
    for lock in sorted(folder.glob("*/lock")):
        while lock.exists():
            user = lock_owner(lock)
            if user is None:
                lock.unlink(missing_ok=True)
                break
            show(f"waiting for {user}, which compiles DeepSpeed's {lock.parent.name} op")
            time.sleep(POLL_S)


def lock_owner(lock: Path) -> str | None:
    """Return which process builds in the lock's folder, in words; None if there is none."""
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _at_work(process.pid, lock.parent):
            return f"process {process.pid}"
    if _file_system(lock.parent) in REMOTE:
        changed = 0.0
        for path in (lock.parent, *lock.parent.iterdir()):
            with suppress(OSError):  # removed by the build
                changed = max(changed, path.stat().st_mtime)
        if time.time() - changed < QUIET_S:
            return "another host that shares this folder"
    return None


def _at_work(pid: int, folder: Path) -> bool:
    """Return whether a process runs in `folder` or has a file in it open."""
    process = Path(f"/proc/{pid}")
    try:
        links = [process / "cwd", *(process / "fd").iterdir()]
    except OSError:  # the process has ended, or belongs to another user, who cannot write there
        return False
    real = os.path.realpath(folder)
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target == real or target.startswith(real + os.sep):
            return True
    return False


def _file_system(path: Path) -> str:
    real = os.path.realpath(path)
    mounts = [p for p in psutil.disk_partitions(all=True) if os.path.commonpath([real, p.mountpoint]) == p.mountpoint]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


if __name__ == "__main__":
    build(int(sys.argv[1]), sys.argv[2])
