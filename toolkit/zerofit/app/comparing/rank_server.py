"""The process from which a comparison's ranks on this machine are forked.

This server (`spec.server_process`) imports only what every rank needs before the rank first measures its memory. Each
rank then imports what its strategy needs. Requests and answers are lines of JSON. {"start": [folder, environment, log]}
returns a process id. {"poll": id} returns the exit code, or null while the rank runs. {"end": id} kills the rank and
returns its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from zerofit.compare.worker import measure
from zerofit.launch.parent_death import end_with_parent
from zerofit.spec.process import mapped_pages, touch

Pages = list[tuple[int, int]]


def serve() -> None:
    """Answer requests until standard input is closed. The ranks end with this process."""
    answers = os.dup(1)
    os.dup2(2, 1)  # keep prints of libraries out of the answers
    # Forked ranks share this process's memory until they write to it. So a rank's growth is its own memory, and starts
    # are fast.
    gc.freeze()  # otherwise each rank's garbage collector would write to shared pages, which copies them
    server, pages = os.getpid(), mapped_pages()
    for line in sys.stdin:
        match json.loads(line):
            # Before this fork, the server must not run an op on several threads or use CUDA. A forked process has only
            # the forking thread, so libgomp would wait for the others. torch refuses CUDA in a child of such a process.
            case {"start": [folder, env, log]}:
                answer = os.fork() or _rank(server, Path(folder), env, log, pages)
            case {"poll": pid}:
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            case {"end": pid}:
                os.kill(pid, signal.SIGKILL)
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case request:
                raise ValueError(request)
        os.write(answers, f"{json.dumps(answer)}\n".encode())


def _rank(server: int, folder: Path, env: dict[str, str], log: str, pages: Pages) -> NoReturn:
    """Run a rank as if its own command line had started it, with this environment and log."""
    try:
        end_with_parent(server)
        for stream, path in enumerate((os.devnull, log, log)):
            opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            os.dup2(opened, stream)
            os.close(opened)
        threads = env.get("OMP_NUM_THREADS")
        if threads and threads != os.environ.get("OMP_NUM_THREADS"):  # OpenMP reads the variable only when it loads
            torch.set_num_threads(int(threads))
        # the environment of a process that its own command line had started
        os.environ.clear()
        os.environ.update(env)
        touch(pages)
        measure(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
