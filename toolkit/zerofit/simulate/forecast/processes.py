"""Run simulations in parallel: a server imports all libraries once, and forks a process per simulation."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from zerofit.features.optimizers import OPTIMIZERS
from zerofit.models.catalog import ModelError, find
from zerofit.simulate.endings import (
    EXITED,
    broken_environment,
    is_about_memory,
    lacks_memory,
    out_of_memory,
    why_ended,
    with_output,
)
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.simulate.script.command import ScriptTarget
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.local_machine import host_memory, oom_kills
from zerofit.spec.process import collector_off
from zerofit.spec.server_process import ServerProcess

REQUEST, GROUP = "request", "group"  # files in a request's folder: the targets, and the process group that runs them
# modules that every simulation imports or patches
IMPORTED = ("cpuinfo", "transformers.masking_utils", "transformers.modeling_utils")
IMPORTED_FOR_RUNS = ("zerofit.simulate.engine.rank",)
IMPORTED_FOR = {  # modules imported before the first simulation of a model of this family
    "torchvision": ("torchvision",),
    "transformers": (
        "transformers.integrations.deepspeed",
        "transformers.modeling_layers",
        "transformers.models.auto.modeling_auto",
    ),
}
NEW_IN_DEEPSPEED = (
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # 3 s: torch.compile's decorator imports all of Inductor
)
IMPORTED_FOR_BITS = ("bitsandbytes",)  # 2 s, for the same reason
# imported by the patches of every script: half of a short simulation's time
PATCHED_FOR_SCRIPTS = ("datasets", "transformers.trainer", "torch.utils.tensorboard")
# torchvision may be built for another torch: models that need it then raise torchvision's own error
MAY_BE_MISSING = ("torchvision", *NEW_IN_DEEPSPEED, *PATCHED_FOR_SCRIPTS, *IMPORTED_FOR_BITS)
IMPORTED_FOR_SCRIPTS = (
    *(module for modules in IMPORTED_FOR.values() for module in modules),
    *NEW_IN_DEEPSPEED,
    *PATCHED_FOR_SCRIPTS,
    "zerofit.simulate.script.rank",
)
Target = SimulationTarget | ScriptTarget
# The server (`spec.server_process`) runs `serve`. A request is a folder, with the modules to import for it. When the
# server ends, it kills all processes that it has started. Processes and files of one request:
#
#   zerofit ── folder ──► server (torch and DeepSpeed imported, fork only) ──► answering process, its own group
#                                                                                 └─► one process per target N
#   folder/request    targets; locked as long as a process of the request lives
#   folder/N.status   a line of progress      N.log    what the process printed
#   folder/N.result   the pickled record      N.exit   how it ended      N.ended   the parent may read the others
#
# Results are written to files, not sent over a pipe. So the files of a process that is killed for lack of memory can
# still be read.
POLL_S = 0.2
PRIVATE_BYTES = 768 << 20  # memory of a simulation that it does not share with the server; most simulations need less


def simulate_all(targets: Sequence[Target], show: Callable[[str], None]) -> list[RankRecord | Problem]:
    """Return for each target the record of its rank, or the Problem that prevented it.

    Cores and memory limit how many simulations run at once. `show` is called with a line about the progress.
    """
    if not targets:
        return []
    kills, count = oom_kills(), len(targets)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, start = Path(name), time.monotonic()
        path = [os.path.abspath(entry) for entry in sys.path]  # "" and relative ones depend on the folder
        (folder / REQUEST).write_bytes(pickle.dumps((path, os.getcwd(), list(targets))))
        server = _server()
        try:
            server.tell([str(folder), list(dict.fromkeys(one for target in targets for one in _needed(target)))])
            while not all((folder / f"{n}.ended").exists() for n in range(count)) and not _is_over(server, folder):
                show(_progress(folder, count, time.monotonic() - start))
                time.sleep(POLL_S)
            short = oom_kills() > kills or is_about_memory(server.last_output())
            status = server.process.poll()
            if status is not None:
                _kill(folder)
                if status >= 0 and not short:
                    broken = broken_environment(server.last_output())
                    if broken:
                        raise UserError(broken)
                    server.refuse_if_ended()
        except BaseException:
            _kill(folder)
            raise
        finally:
            with _lock:
                server.users -= 1
        died = -status if status and status < 0 else None
        return [_result(folder, n, died, short) for n in range(count)]


def _kill(folder: Path) -> None:
    with suppress(OSError, ValueError):  # not started, or ended
        os.killpg(int((folder / GROUP).read_text()), signal.SIGKILL)


def _is_over(server: ServerProcess, folder: Path) -> bool:
    """Return whether all processes of a request have ended, or their server has."""
    if server.process.poll() is not None:
        return True
    if not (folder / GROUP).exists():
        return False
    # the processes inherit the lock of the request's file, so it is free once the last of them has ended
    with (folder / REQUEST).open("rb") as request:
        try:
            fcntl.flock(request, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _needed(target: Target) -> tuple[str, ...]:
    """Return the modules to import before a target is simulated."""
    if isinstance(target, ScriptTarget):
        return IMPORTED_FOR_SCRIPTS
    run = target.job.run
    optimizer = OPTIMIZERS.get(run.optimizer or "")
    quantized = run.quantize or (optimizer and optimizer.library)
    family = IMPORTED_FOR.get(find(run.model).family, ())
    return (*IMPORTED_FOR_RUNS, *family, *(IMPORTED_FOR_BITS if quantized else ()))


class _Server(ServerProcess):
    def __init__(self) -> None:
        super().__init__("zerofit.simulate.forecast.processes")
        self.owner = os.getpid()
        self.users = 0  # threads that wait for it


_lock = threading.Lock()
_running: _Server | None = None


def _server() -> _Server:
    """Return this process's server, with one more user counted. The first call starts it."""
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid() or _running.process.poll() is not None:
            _running = _Server()
        _running.users += 1
        return _running


def end_server() -> None:
    """Stop this process's server, unless another thread uses it.

    This frees the memory of torch and DeepSpeed. The next simulation starts a new server.
    """
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid() or _running.users:
            return
        _running.end()
        _running = None


def _result(folder: Path, n: int, died: int | None, ran_short: bool) -> RankRecord | Problem:
    """Return the result of simulation `n`.

    `died`: the signal that killed the server, if one did.
    """
    log, file, seen = folder / f"{n}.log", folder / f"{n}.result", folder / f"{n}.exit"
    output = log.read_text(errors="replace") if log.exists() else ""
    if not file.exists():
        status, peak_bytes = json.loads(seen.read_text()) if seen.exists() else (died, 0)
        return why_ended(status, output, peak_bytes=peak_bytes, ran_short=ran_short)
    result = pickle.loads(file.read_bytes())
    if isinstance(result, Exception):
        raise result
    return with_output(result, output) if isinstance(result, Problem) and result.kind == EXITED else result


def _progress(folder: Path, count: int, seconds: float) -> str:
    ended = [n for n in range(count) if (folder / f"{n}.ended").exists()]
    statuses = [folder / f"{n}.status" for n in range(count) if n not in ended]
    now = list(filter(None, (status.read_text() for status in statuses if status.exists())))
    if count > 1:
        left_s = seconds * (count - len(ended)) / len(ended) if ended else 0
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        return f"simulating: {len(ended)} of {count} done ({seconds:.0f} s{left})"
    what = f": {', '.join(now)}" if now else ": importing torch and DeepSpeed" if not ended else ""
    return f"simulating{what} ({seconds:.0f} s)"


def serve() -> None:
    """Answer requests until standard input closes."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed must not look for a GPU: the simulated one replaces it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Simulations share the cores. A forked process also lacks the threads of a pool that OpenMP has made before.
    os.environ["OMP_NUM_THREADS"] = "1"
    _import(IMPORTED)
    groups: list[int] = []
    for line in sys.stdin:
        folder, modules = json.loads(line)
        _import(modules)
        groups = [pid for pid in groups if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        with suppress(FileNotFoundError):  # the caller has given up
            groups.append(_forked(Path(folder)))
    for pid in groups:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.killpg(pid, signal.SIGKILL)


def _forked(folder: Path) -> int:
    """Fork the process that answers a request. Return its process id.

    The request's file is locked until the last child of this process has ended.
    """
    with (folder / REQUEST).open("rb") as request:
        fcntl.flock(request, fcntl.LOCK_EX)
        pid = os.fork()
        if pid == 0:
            _answer(folder)
        # Parent and child both do this: whichever runs first, the group exists before its number is written.
        with suppress(OSError):  # the child has done it
            os.setpgid(pid, pid)
        (folder / GROUP).write_text(str(pid))
    return pid


def _import(names: Sequence[str]) -> None:
    """Import the modules that forked processes share."""
    # Garbage collections then skip their objects.
    with collector_off():
        for name in names:
            with suppress(*((Exception,) if name in MAY_BE_MISSING else ())):
                importlib.import_module(name)
        gc.freeze()


def _answer(folder: Path) -> NoReturn:
    """Simulate all targets of a request."""
    # When target N ends, write `N.exit` (its exit status), then `N.ended`.
    try:
        os.setpgid(0, 0)
        path, cwd, targets = pickle.loads((folder / REQUEST).read_bytes())
        sys.path[:] = path
        os.chdir(cwd)
        _simulate_side_by_side(list(enumerate(targets)), folder)
    except FileNotFoundError:  # the caller has given up
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # a fork must not run the server's exit handlers, nor continue its loop


def _simulate_side_by_side(waiting: list[tuple[int, Target]], folder: Path) -> None:
    """Simulate as many targets at once as cores and memory allow.

    If one is killed for lack of memory, it is tried again, and only one runs at a time from then on.
    """
    most, kills = max(1, min(len(os.sched_getaffinity(0)), host_memory()[1] // PRIVATE_BYTES)), oom_kills()
    running = dict[int, tuple[int, Target]]()
    while waiting or running:
        while waiting and len(running) < most:
            n, target = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                _write_result(target, folder, n)  # never returns
            running[pid] = n, target
        pid, status, usage = os.wait4(-1, 0)
        n, target = running.pop(pid)
        # the kernel chose one of several processes: alone, it may have enough memory
        if os.WIFSIGNALED(status) and oom_kills() > kills and most > 1:
            most, kills = 1, oom_kills()
            waiting.append((n, target))
            continue
        (folder / f"{n}.exit").write_text(json.dumps([status, usage.ru_maxrss << 10]))  # from KiB
        (folder / f"{n}.ended").touch()


def _write_result(target: Target, folder: Path, n: int) -> NoReturn:
    """Write the result of simulation N to `N.result`: a RankRecord, a Problem or an exception."""
    log = os.open(folder / f"{n}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)  # `endings` reads its stack after a crash in native code
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115  # in order with errors

    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # removed with the request's folder
    pid = os.getpid()

    def say(text: str) -> None:
        (folder / f"{n}.status").write_text(text)

    def answer(result: RankRecord | Problem | Exception) -> NoReturn:
        try:
            if os.getpid() != pid:  # a script forked, and its exception arrived here
                os._exit(1)
            # renamed when complete: the process may be killed while it writes
            (folder / f"{n}.part").write_bytes(pickle.dumps(result))
            (folder / f"{n}.part").replace(folder / f"{n}.result")
            sys.stdout.flush()
        finally:
            os._exit(0)

    result: RankRecord | Problem | Exception
    try:
        if isinstance(target, ScriptTarget):
            from zerofit.simulate.script.rank import simulate_script_rank

            result = simulate_script_rank(target, say=say, give_up=answer)
        else:
            from zerofit.simulate.engine.rank import simulate_rank

            result = simulate_rank(target, say=say)
    except UserError as error:
        result = error.problems[0]
    except ModelError as error:
        result = Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")
    except BaseException as error:
        result = out_of_memory() if lacks_memory(error) else RuntimeError(traceback.format_exc())
    answer(result)
