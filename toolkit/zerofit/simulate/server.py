"""The process that simulations are forked from: it has imported everything that takes seconds.

`python -m zerofit.simulate.server` reads folders from its standard input, a line each (see `processes.simulate_all`),
and ends with all that it has started when that is closed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from zerofit.models.catalog import ModelError
from zerofit.simulate.target import SimulationTarget
from zerofit.spec.errors import Problem, UserError

REQUEST, GROUP = "request", "group"  # files of a request's folder: what is asked for, and the process group at work
IMPORTED = (
    "torchvision",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "zerofit.simulate.rank",
)


def main() -> None:
    """Serve requests until standard input is closed."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed must not look for a GPU: the simulated one takes its place
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    groups: list[int] = []
    for line in sys.stdin:
        groups = [pid for pid in groups if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        pid = os.fork()
        if pid == 0:
            _serve(Path(line.rstrip("\n")))
        groups.append(pid)
    for pid in groups:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.killpg(pid, signal.SIGKILL)


def _serve(folder: Path) -> NoReturn:
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


def _simulate(target: SimulationTarget, folder: Path, n: int) -> NoReturn:
    """Leave the result of one simulation in `N.result`: a RankRecord, a Problem, or the exception that ended it."""
    log = os.open(folder / f"{n}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from zerofit.simulate.rank import simulate

    def say(text: str) -> None:
        (folder / f"{n}.status").write_text(text)

    result: Any
    try:
        result = simulate(target, say=say)
    except UserError as error:
        result = error.problems[0]
    except ModelError as error:
        result = Problem(kind=error.kind, message=error.message, hint=error.hint, where="MODEL")
    except Exception:
        result = RuntimeError(traceback.format_exc())
    (folder / f"{n}.result").write_bytes(pickle.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
