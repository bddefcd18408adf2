"""Forks a process for each rank it is asked for; torch, transformers and DeepSpeed are imported once, before.

`python -m benchmarks.meter.server FOLDER`, started by `pool.Ranks`. One line of JSON on stdin is a list of tasks, one a
process: {"call": one of rank.CALLS, "target": ..., "port": ...}. They run at the same time; one line of JSON on
stdout answers with what each has returned, or {"error": traceback}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from .rank import CALLS

IMPORTED = (
    "torch._dynamo",  # zero.Init replaces Tensor.__new__: imported later, dynamo would fail in it
    "torchvision",
    "transformers.integrations.deepspeed",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "zerofit.train.engines",
    "zerofit.train.pipeline",
    "zerofit.simulate.script.rank",
)
TIMEOUT_S = 1200  # a machine can be busy
GRACE_S = 15  # between the first rank's failure and the end of the others


def main() -> None:
    folder = Path(sys.argv[-1])
    torch.set_num_threads(1)  # kernels take scratch for each thread
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # half a million objects: each child's collections would walk through them and copy their pages
    print(json.dumps("ready"), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        tasks = json.loads(line)
        files = [folder / f"{number:04}.{place}.json" for place in range(len(tasks))]
        children = [_fork(task, path) for task, path in zip(tasks, files, strict=True)]
        _wait(children)
        print(json.dumps([_answer(path) for path in files]), file=answers, flush=True)


def _fork(task: dict[str, Any], path: Path) -> int:
    """The child's process id; its answer goes to the file, its output to a log beside it."""
    child = os.fork()
    if child:
        return child
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.environ["MASTER_PORT"] = str(task["port"])
        answer = CALLS[task["call"]](task["target"])
    except BaseException:
        answer = {"error": traceback.format_exc()}
    path.write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if "error" in answer else 0)


def _wait(children: list[int]) -> None:
    """Until all have ended; when one fails or the time is over, the others are killed."""
    left, deadline = set(children), time.monotonic() + TIMEOUT_S
    while left:
        child, status = os.waitpid(-1, os.WNOHANG)
        left.discard(child)
        if child and status:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for one in left:
                os.kill(one, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)


def _answer(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    log = path.with_suffix(".log")
    return {"error": "killed: " + (log.read_text()[-2000:] if log.exists() else "")}


if __name__ == "__main__":
    main()
