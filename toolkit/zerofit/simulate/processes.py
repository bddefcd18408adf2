"""Simulations side by side, each in a process of its own that is forked from one that has imported everything.

That one, the server (`spec.server_process`), runs `serve`. A request is a folder and the
modules to import for it; it ends with all that it has started.
"""

from __future__ import annotations

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
from typing import Any, NoReturn

from zerofit.models.catalog import ModelError, find
from zerofit.simulate.record import RankRecord, SimulationTarget
from zerofit.simulate.script.target import ScriptTarget
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.process import collector_off
from zerofit.spec.server_process import ServerProcess

REQUEST, GROUP = "request", "group"  # files of a request's folder: what is asked for, and the process group at work
# what every simulation imports, or changes
IMPORTED = ("cpuinfo", "transformers.masking_utils", "transformers.modeling_utils")
IMPORTED_FOR_RUNS = ("zerofit.simulate.rank",)
IMPORTED_FOR = {  # by a model's family, before the first simulation of one
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
# torchvision may be made for another torch, too: who needs it hears so in its own words
MAY_BE_MISSING = ("torchvision", *NEW_IN_DEEPSPEED)
IMPORTED_FOR_SCRIPTS = (
    *(module for modules in IMPORTED_FOR.values() for module in modules),
    *NEW_IN_DEEPSPEED,
    "zerofit.simulate.script.rank",
)
POLL_S = 0.2
KILLED = Problem(
    kind="killed",
    message="a simulation's process was killed from outside, most often by the kernel for want of memory",
    hint="simulate fewer layers (--model-args), or one rank (--rank)",
)


def simulate_all(
    targets: Sequence[SimulationTarget | ScriptTarget], show: Callable[[str], None]
) -> list[RankRecord | Problem]:
    """Return the record of each target's rank, or the reason why there is none.

    As many run at a time as there are cores; `show` hears how far they are.
    """
    if not targets:
        return []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, start = Path(name), time.monotonic()
        path = [os.path.abspath(entry) for entry in sys.path]
        (folder / REQUEST).write_bytes(pickle.dumps((path, os.getcwd(), list(targets))))
        server = _server()
        try:
            server.tell([str(folder), list(dict.fromkeys(one for target in targets for one in _needed(target)))])
            while not all((folder / f"{n}.ended").exists() for n in range(len(targets))):
                server.refuse_if_ended()
                show(_progress(folder, len(targets), time.monotonic() - start))
                time.sleep(POLL_S)
        except BaseException:
            with suppress(OSError, ValueError):  # not begun, or over
                os.killpg(int((folder / GROUP).read_text()), signal.SIGKILL)
            raise
        finally:
            _release(server)
        return [_result(folder / f"{n}.result") for n in range(len(targets))]


def _needed(target: SimulationTarget | ScriptTarget) -> tuple[str, ...]:
    """Return the modules that are imported once, before processes are forked for such a target."""
    if isinstance(target, ScriptTarget):
        return IMPORTED_FOR_SCRIPTS
    return (*IMPORTED_FOR_RUNS, *IMPORTED_FOR.get(find(target.job.run.model).family, ()))


class _Server(ServerProcess):
    """The running server, which ends with this process."""

    def __init__(self) -> None:
        super().__init__("zerofit.simulate.processes")
        self.owner = os.getpid()
        self.users = 0  # threads that wait for an answer


_lock = threading.Lock()
_running: _Server | None = None


def _server() -> _Server:
    """Return the server of this process, started when it is first needed, with one more user."""
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid() or _running.process.poll() is not None:
            _running = _Server()
        _running.users += 1
        return _running


def _release(server: _Server) -> None:
    with _lock:
        server.users -= 1


def end_server() -> None:
    """End this process's server, which holds torch and DeepSpeed in memory; the next simulation starts another.

    It stays while another thread simulates.
    """
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid() or _running.users:
            return
        _running.end()
        _running = None


def _result(file: Path) -> RankRecord | Problem:
    if not file.exists():
        return KILLED
    result = pickle.loads(file.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def _progress(folder: Path, count: int, seconds: float) -> str:
    ended = [n for n in range(count) if (folder / f"{n}.ended").exists()]
    statuses = [folder / f"{n}.status" for n in range(count) if n not in ended]
    now = list(filter(None, (status.read_text() for status in statuses if status.exists())))
    what = f": {', '.join(now)}" if now else ": importing torch and DeepSpeed" if not ended else ""
    done = f" {len(ended)} of {count} done" if count > 1 else ""
    return f"simulating{what}{done} ({seconds:.0f} s)"


def serve() -> None:
    """Serve requests until standard input is closed."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed must not look for a GPU: the simulated one takes its place
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    _import(IMPORTED)
    groups: list[int] = []
    for line in sys.stdin:
        folder, modules = json.loads(line)
        _import(modules)
        groups = [pid for pid in groups if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        pid = os.fork()
        if pid == 0:
            _answer(Path(folder))
        groups.append(pid)
    for pid in groups:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.killpg(pid, signal.SIGKILL)


def _import(names: Sequence[str]) -> None:
    """Import what processes that are forked from now on share, and leave it out of their garbage collections."""
    with collector_off():
        for name in names:
            with suppress(*((Exception,) if name in MAY_BE_MISSING else ())):
                importlib.import_module(name)
        gc.freeze()


def _answer(folder: Path) -> NoReturn:
    """Simulate all targets of a request, as many at a time as there are cores; `N.ended` says that one has ended."""
    os.setpgid(0, 0)
    try:
        (folder / GROUP).write_text(str(os.getpid()))
        path, cwd, targets = pickle.loads((folder / REQUEST).read_bytes())
        sys.path[:] = path
        os.chdir(cwd)
        waiting, running = list(enumerate(targets)), dict[int, int]()
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                n, target = waiting.pop(0)
                pid = os.fork()
                if pid == 0:
                    _simulate(target, folder, n)
                running[pid] = n
            pid, _ = os.wait()
            (folder / f"{running.pop(pid)}.ended").touch()
    except FileNotFoundError:  # nobody waits any more
        pass
    os._exit(0)


def _simulate(target: SimulationTarget | ScriptTarget, folder: Path, n: int) -> NoReturn:
    """Leave the result of one simulation in `N.result`: a RankRecord, a Problem, or the exception that ended it."""
    log = os.open(folder / f"{n}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def say(text: str) -> None:
        (folder / f"{n}.status").write_text(text)

    result: Any
    try:
        if isinstance(target, ScriptTarget):
            from zerofit.simulate.script.rank import simulate_script

            result = simulate_script(target, say=say)
        else:
            from zerofit.simulate.rank import simulate

            result = simulate(target, say=say)
    except UserError as error:
        result = error.problems[0]
    except ModelError as error:
        result = Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")
    except Exception:
        result = RuntimeError(traceback.format_exc())
    (folder / f"{n}.result").write_bytes(pickle.dumps(result))
    os._exit(0)
