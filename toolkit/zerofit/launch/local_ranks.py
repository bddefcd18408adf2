"""The launcher of this machine's ranks.

It imports neither torch nor DeepSpeed, so ranks start seconds earlier than with deepspeed/launcher/launch.py.
DeepSpeed's launcher would also overwrite CUDA_VISIBLE_DEVICES with the first GPUs. A run would use other GPUs than the
user chose.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import psutil

from zerofit.launch.parent_death import end_with_parent

POLL_S = 0.1
KILL_S = 30.0  # time for ranks to save and exit after SIGTERM, as under DeepSpeed's launcher


def main() -> int:
    """Start a program once per rank.

    `python -m zerofit.launch.local_ranks PID RANKS PORT [--module] PROGRAM ARGS...`. Ends when process PID ends.
    Returns 0 when all ranks have ended with 0. When a rank fails, ends the others and returns its exit code. Ignores
    SIGUSR1, with which a scheduler asks all processes to stop: the ranks handle it and save.
    """
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ranks, port, program = int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    command = [sys.executable, "-u", *(["-m", *program[1:]] if program[0] == "--module" else program)]
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # CROSS_*: host and number of hosts, for DeepSpeed's checkpoint writer
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    running: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: FrameType | None) -> None:
        _end(running)
        sys.exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for rank in range(ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.append(subprocess.Popen(command, env={**os.environ, **addresses, **sizes, **numbers}))
    while running:
        time.sleep(POLL_S)
        failed = next((process for process in running if process.poll()), None)
        if failed:
            # `app.training.result` reads this line of the log
            print(f"process {failed.pid} exits with return code = {failed.returncode}", file=sys.stderr)
            _end(running)
            return failed.returncode if failed.returncode > 0 else 128 - failed.returncode
        # Not polled again: a rank that fails between two polls would leave the list without being noticed.
        running = [process for process in running if process.returncode is None]
    return 0


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes and all their children with SIGTERM, after KILL_S with SIGKILL."""
    descendants: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            # The children are listed before any signal: an ended process would no longer show them.
            rank = psutil.Process(process.pid)
            descendants += [*rank.children(recursive=True), rank]
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(descendants, timeout=KILL_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
