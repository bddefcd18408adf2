"""The program of each rank, started by its guard: `python -m zerofit.worker RUN_FOLDER`."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

from zerofit.launch.host import RUN_ID
from zerofit.launch.parent_death import end_with_parent
from zerofit.launch.run_lock import alive
from zerofit.spec.errors import DOES_NOT_FIT, Problem, RunFailed, UserError
from zerofit.spec.files import write_json
from zerofit.spec.memory_limit import end_first, limit_memory, out_of_memory
from zerofit.spec.overhead import CPU_LIBRARY_BYTES
from zerofit.spec.process import collector_off
from zerofit.spec.reservations import free_for, gpus_free_for, needed_by, read_forecast
from zerofit.spec.run_folder import RunFolder
from zerofit.spec.units import shown_bytes
from zerofit.train.heartbeat import Heartbeat, RankProgress
from zerofit.train.stop_signals import SignalNotes
from zerofit.watch.launch_spec import HEARTBEAT_FD, HOST_NAME, rank_group
from zerofit.watch.rank_guard import listen_for_dumps

# texts in RuntimeErrors of gloo, NCCL and torch's store if another rank is gone
PEER_LOST = ("Connection closed by", "Connection reset by peer", "Connection was likely closed", "Broken pipe")
PEER_LOST += ("Timed out waiting", "Watchdog caught", "remote process exited", "ncclRemoteError", "Connection refused")
BACKENDS = ("gloo", "NCCL")
NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")
LINES = 3  # of a library's message that are shown: validators name the key in the second line
LONGEST = 10_000  # characters of a reported text: the command accepts lines of 1 MiB


def main() -> NoReturn:
    """Run one rank. Exit code 0: done or stopped on request, 3: failed (see the run folder)."""
    folder, rank = RunFolder(Path(sys.argv[-1])), int(os.environ["RANK"])
    end_with_parent()
    # first of all, so that errors of the imports and checks below are in the rank's log
    _log_to(folder.rank_log(rank))
    _limit_memory(folder, rank)
    title = f"rank {rank} of {os.environ['WORLD_SIZE']} on {os.environ.get(HOST_NAME, socket.gethostname())}"
    print(f"{datetime.now(UTC).isoformat(timespec='seconds')} {title}, process {os.getpid()}", flush=True)
    signals = SignalNotes()
    signals.listen()  # before the slow imports: a stop request during them must not kill the rank
    listen_for_dumps(folder.rank_stacks(rank))
    progress = RankProgress()
    heartbeat = Heartbeat(int(os.environ[HEARTBEAT_FD]), os.environ.get("DS_ACCELERATOR") == "cuda", progress)
    heartbeat.start()
    try:
        refuse_small_host(folder, rank)
        with alive(folder):
            _train(folder, signals, progress)
    except BaseException as error:
        _report_failure(folder, rank, error, heartbeat)
        os._exit(3)  # without exit handlers, which may wait for ranks that are gone
    folder.rank_stacks(rank).unlink(missing_ok=True)  # empty
    atexit._run_exitfuncs()  # loggers flush their records here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without tearing down torch and DeepSpeed, which takes seconds


def _log_to(path: Path) -> None:
    """Redirect all output of this rank to its log, also that of libraries and C++ code."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name, number in (("stdout", 1), ("stderr", 2)):
        text = os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, text)


def _limit_memory(folder: RunFolder, rank: int) -> None:
    """Limit a CPU rank to its share of the host's free memory, by the forecasts."""
    # An allocation beyond the limit fails in this rank, with a message, before the host runs out of memory. If the host
    # still runs out of memory, the kernel kills ranks before other processes.
    end_first()
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        return
    ranks, forecast = int(os.environ["LOCAL_SIZE"]), read_forecast(folder.path)
    # Without a forecast, all ranks get equal shares. With one, pipeline stages may need different amounts.
    share = 1 / ranks
    if forecast is not None:
        # The ranks of a host have consecutive numbers.
        first = rank - int(os.environ["LOCAL_RANK"])
        needs = needed_by(range(first, first + ranks), int(os.environ["WORLD_SIZE"]), forecast)
        share = needs[rank - first] / sum(needs)
    free = free_for(folder.path) - CPU_LIBRARY_BYTES
    limit_memory(max(0, int(free * share)), rank_group(os.environ.get(RUN_ID, ""), rank))


def refuse_small_host(folder: RunFolder, rank: int) -> None:
    """Raise RunFailed if this host has too little memory for its ranks.

    Only the host's first rank checks, before any rank there allocates memory. Hosts that the command has checked
    are skipped.
    """
    forecast, ranks = read_forecast(folder.path), int(os.environ["LOCAL_SIZE"])
    # the command has judged the hosts of the first `judged_ranks` ranks
    if forecast is None or int(os.environ["LOCAL_RANK"]) or rank < forecast["judged_ranks"]:
        return
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    needs = needed_by(range(rank, rank + ranks), int(os.environ["WORLD_SIZE"]), forecast)
    free = free_for(folder.path) - (CPU_LIBRARY_BYTES if on_cpu else 0)
    _refuse_less(sum(needs), free, f"of host memory for {ranks} ranks")
    for number, free in enumerate([] if on_cpu else gpus_free_for(folder.path, ranks)):
        _refuse_less(forecast["reserved_bytes"] + forecast["beside_bytes"], free, f"of the memory of GPU {number}")


def _refuse_less(needed: int, free: int, kind: str) -> None:
    if needed > free:
        hint = "use fewer ranks on this host, or a smaller layout (`zerofit simulate`); --anyway starts it regardless"
        message = f"forecast to need {shown_bytes(needed)} {kind}, but {shown_bytes(max(0, free))} are free"
        raise RunFailed(Problem(kind=DOES_NOT_FIT, message=message, hint=hint))


def _train(folder: RunFolder, signals: SignalNotes, progress: RankProgress) -> None:
    from zerofit.spec.run_folder import Job

    with collector_off():
        from zerofit.train.process_group import start, stop

        gc.freeze()  # imported objects stay, so no garbage collection (DeepSpeed calls some) has to traverse them
    job = Job.read(folder)
    start(timeout=timedelta(minutes=30))
    from zerofit.models.without_dynamo import without_dynamo

    with collector_off():
        if job.replay:
            from zerofit.train.replay import replay as run_rank
        else:
            from zerofit.train.run import train as run_rank

        gc.freeze()
    with nullcontext() if job.run.compile else without_dynamo():
        run_rank(job, folder, signals, progress)
    stop()


def _report_failure(folder: RunFolder, rank: int, error: BaseException, heartbeat: Heartbeat) -> None:
    """Report the failure in the rank's log and in the run folder, and to the rank's guard."""
    with suppress(OSError):
        traceback.print_exc()
        sys.stderr.flush()
    if isinstance(error, RunFailed):
        problems = [error.problem]
    elif isinstance(error, UserError):
        problems = list(error.problems)
    else:
        problems = [translate(error, folder.rank_log(rank))]
    host = {"host": os.environ[HOST_NAME]} if HOST_NAME in os.environ else {}
    texts = [{key: _sendable(text) for key, text in problem.as_dict().items()} for problem in problems]
    failure = {"rank": rank, **host, "time_s": time.time(), "problems": texts}
    with suppress(OSError):
        # The guard gets the failure first: it stops the other ranks, which wait for this rank in a collective.
        heartbeat.send({"failure": failure})  # the disk may be full
    with suppress(OSError):
        write_json(folder.rank_error(rank), failure)


def _sendable(text: str) -> str:
    """Shorten a text, and escape characters that UTF-8 does not have."""
    # a file name in Latin-1 has such characters
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def translate(error: BaseException, log: Path) -> Problem:
    """Return the problem of a library's exception. The traceback is in the rank's log."""
    text = str(error).strip()
    first = "; ".join(line.strip() for line in text.splitlines()[:LINES])
    no_memory = any(sign.lower() in text.lower() for sign in NO_MEMORY)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or no_memory:
        return out_of_memory(first, log)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some disk space, then run the same command again to resume from the newest checkpoint"
        message = f"no space left on the disk: {first}"
        return Problem(kind="disk-full", message=message, hint=hint, where=str(log.parent.parent))
    if "EADDRINUSE" in text:
        message = f"another process uses this rank's port: {first}"
        hint = "start the run again; `zerofit launch --master-port` sets another port"
        return Problem(kind="port-in-use", message=message, hint=hint, where=str(log))
    if _is_peer_lost(error):
        message, hint = f"lost another rank: {first}", "the other ranks' logs have the reason"
        return Problem(kind="peer-lost", message=message, hint=hint, where=str(log))
    message = f"{type(error).__name__}: {first}"
    return Problem(kind="rank-failed", message=message, hint="the rank's log has the traceback", where=str(log))


def _is_peer_lost(error: BaseException) -> bool:
    """Return whether torch.distributed lost a rank (not a lost connection to W&B or a hub)."""
    if any(kind.__module__ == "torch.distributed" for kind in type(error).__mro__):
        return True
    # gloo and NCCL raise a plain RuntimeError. The text alone is ambiguous, since libraries for trackers also lose
    # connections.
    text, frames = str(error), traceback.walk_tb(error.__traceback__)
    from_torch = any(f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename for frame, _ in frames)
    from_torch = from_torch or any(name in text for name in BACKENDS)
    return isinstance(error, RuntimeError) and from_torch and any(sign in text for sign in PEER_LOST)


if __name__ == "__main__":
    main()
