"""The memory limit of a CPU rank: on its data segment and, if allowed, its control group."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from zerofit.spec.errors import Problem
from zerofit.spec.local_machine import control_groups
from zerofit.spec.overhead import CPU_LIBRARY_BYTES

# Without a limit, a rank that allocates too much makes the kernel kill some process of the host. There are two limits,
# since each catches memory that the other does not:
# - the data segment (RLIMIT_DATA): an allocation beyond it fails in the rank, and the rank can report it;
# - a control group: it also counts shared memory and page tables. Beyond it the kernel kills this rank, not another.
#
# Memory that libraries reserve and never touch: 0.65 GB (VmData less RssAnon of a rank on 2 cores), rounded up, plus
# a thread's stack per core
RESERVED_BYTES = (1 << 30) + (os.cpu_count() or 1) * (8 << 20)
# The largest value. A process needs no privileges to raise its own.
FIRST_TO_END = "1000"  # proc(5), oom_score_adj
LIMIT, PROCESSES, EVENTS, HANDED_DOWN = "memory.max", "cgroup.procs", "memory.events", "cgroup.subtree_control"


def end_first() -> None:
    """Make the kernel kill this process before others if the host runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END)


def limit_memory(own_bytes: int, group: str | None = None) -> None:
    """Limit this process to `own_bytes` of private memory, on Linux.

    `group`: the name of a control group to create for the process.
    """
    if sys.platform != "linux":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (own_bytes + RESERVED_BYTES, soft, hard) if limit != resource.RLIM_INFINITY]
    # Private mappings count since Linux 4.7. RLIMIT_AS also counts mapped files and addresses that are only reserved.
    # Linux ignores RLIMIT_RSS (getrlimit(2)).
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    for folder in [parent / group for parent in _parents()] if group else []:
        try:
            folder.mkdir()
            (folder / LIMIT).write_text(str(own_bytes + CPU_LIBRARY_BYTES))
            (folder / PROCESSES).write_text(str(os.getpid()))
            return
        except OSError:  # try the next parent
            with suppress(OSError):
                folder.rmdir()


def out_of_memory(message: str, where: Path) -> Problem:
    """Return the problem of a rank that ran out of memory. `where`: the rank's log."""
    hint = "lower --micro-batch (and raise --gradient-accumulation-steps), set --activation-checkpointing, or use "
    hint += "a higher ZeRO stage or offload (--ds-config zero3_offload)"
    if where.parent.name == "logs":
        hint += f"; `zerofit explain {where.parent.parent}` names the cause"
    return Problem(kind="out-of-memory", message=f"out of memory: {message}", hint=hint, where=str(where))


def leave_group(group: str) -> bool:
    """Remove an ended process's control group. Return whether it was killed for its memory."""
    killed = False
    for parent in _parents():
        with suppress(OSError):
            events = dict(line.split() for line in (parent / group / EVENTS).read_text().splitlines())
            killed |= int(events.get("oom_kill", 0)) > 0
            (parent / group).rmdir()
    return killed


def _parents() -> list[Path]:
    """Return the control groups (version 2) in which a new group can limit memory."""
    # If a group contains processes, its child groups cannot limit memory. The outermost group is an exception. So this
    # process's own group and its parent are tried.
    found = []
    for group in reversed(control_groups("memory")[-2:]):
        with suppress(OSError):
            if "memory" in (group / HANDED_DOWN).read_text().split():
                found.append(group)
    return found
