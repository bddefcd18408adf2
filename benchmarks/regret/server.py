"""Forks the ranks of one run after the other; torch, transformers and DeepSpeed are imported once, before.

`python -m benchmarks.regret.server RANKS`, started by `sweep.Sweep`. A line {"folder": RUN_FOLDER, "port": N} on stdin
starts the ranks of a prepared run, exactly as their guards would; {"stop": true} kills them. Each is answered with a
line on stdout: the exit codes of ranks that had ended by themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from zerofit.watch.launch_spec import HEARTBEAT_FD, HOST_NAME

IMPORTED = (
    "torch._dynamo",  # zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
    "torchvision",
    "transformers.integrations.deepspeed",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "zerofit.train.pipeline",
    "zerofit.train.run",
)


def main() -> None:
    ranks = int(sys.argv[-1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    for name in IMPORTED:
        importlib.import_module(name)
    print(json.dumps("ready"), file=answers, flush=True)
    children: list[int] = []
    for line in sys.stdin:
        task = json.loads(line)
        ended = _stop(children)
        children = [] if task.get("stop") else [_fork(task, rank, ranks) for rank in range(ranks)]
        print(json.dumps(ended), file=answers, flush=True)
    _stop(children)


def _fork(task: dict[str, Any], rank: int, ranks: int) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), HOST_NAME: "localhost"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task["port"])}
    os.environ[HEARTBEAT_FD] = str(os.open(os.devnull, os.O_WRONLY))
    sys.argv = ["zerofit.worker", task["folder"]]
    from zerofit import worker

    try:
        worker.main()
    finally:
        os._exit(9)


def _stop(children: list[int]) -> list[int]:
    """Kill those that are left; exit codes of those that were not."""
    ended = []
    for child in children:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            ended.append(os.waitstatus_to_exitcode(status))
            continue
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended


if __name__ == "__main__":
    main()
