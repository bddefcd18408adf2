"""Read from the environment: this process's launcher, its rank, and the number of ranks.

deepspeed, torchrun and accelerate set RANK and related variables. Open MPI sets OMPI_COMM_WORLD_*. MPICH and Intel MPI
set PMI_*. srun sets SLURM_PROCID.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerofit.launch.hostfile import Host
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.units import MOST_RANKS

KIND = "world"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's default
NEVER_GIVEN = range(20000, 32768)  # below Linux's net.ipv4.ip_local_port_range and IANA's dynamic ports


# Which variables count. A process may have the variables of several launchers if one starts another: torchrun within
# srun, or mpirun within a Slurm job. The innermost launcher has started this process, so NAMES lists inner launchers
# first. Exceptions:
# - RANK and WORLD_SIZE without LOCAL_RANK come from a pod or a script, not from a launcher;
# - Slurm's PMI sets PMI_RANK too, but no local rank;
# - a Slurm step of a single task is a shell (`srun --pty`). There `zerofit train` uses all devices of the node.
class Names(NamedTuple):
    """The variables in which a kind of launcher passes a process its rank."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_sizes: tuple[str, ...]  # ranks on this host: the first of these that is set
    job: tuple[str, ...]  # variables that identify this job; equal on all hosts


NAMES = (
    Names(
        "a launcher", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), ("TORCHELASTIC_RUN_ID",)
    ),
    Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), ()),
    Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", (), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
PLAIN, SLURM = NAMES[0], NAMES[-1]
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
OTHERS = (RESTARTS, "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
# variables of accelerate for its Accelerator object, which zerofit does not use
ACCELERATE, ACCELERATES = "ACCELERATE_MIXED_PRECISION", ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
ACCELERATES += ("KMP_AFFINITY", "KMP_BLOCKTIME")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the processes of a launcher."""

    launcher: str  # name of the launcher's command, for messages
    rank: int
    size: int
    local_rank: int
    master: tuple[str, int]  # address of rank 0's host, and the port of the rendezvous
    job: str = ""  # identifies this job among jobs at the same port
    attempt: int = 1  # 1, plus 1 for each restart by torchrun
    agent_store: bool = False  # torchrun itself listens on the port

    @property
    def place(self) -> dict[str, str]:
        """The variables that give a guard its rank."""
        return {PLAIN.rank: str(self.rank), PLAIN.local_rank: str(self.local_rank)}


def given_world(env: Mapping[str, str]) -> World | None:
    """Return the world that a launcher's variables describe; None if none started this process.

    Also returns None for a Slurm step of one task, and for the variables of a single pod. Raises UserError with
    everything that is missing or contradictory.
    """
    # Every launcher sets other variables, and some sets are incomplete. All faults are collected before an error.
    names = next((names for names in NAMES if _is_given(names, env)), None)
    if names is None:
        return None
    problems = Problems()
    size = _number(names.size, env, 1, MOST_RANKS, problems)
    most = size or MOST_RANKS
    rank = _number(names.rank, env, 0, most - 1, problems)
    local_size = next((_number(name, env, 1, most, problems) for name in names.local_sizes if name in env), None)
    local_rank = _number(names.local_rank, env, 0, (local_size or most) - 1, problems)
    for outer in (PLAIN.rank, PLAIN.size) if names is not PLAIN else ():
        own = names.rank if outer == PLAIN.rank else names.size
        if env.get(outer) not in (None, env.get(own)):
            message = f"{outer} is {env[outer]}, but {own} is {env.get(own)}"
            problems.add(KIND, message, f"unset {outer}, or make them equal", outer)
    job = ".".join(env[name] for name in names.job if env.get(name))
    port = _port(env, job, problems)
    address = env.get("MASTER_ADDR") or _first_host(names, env, local_size == size)
    if not address and size:
        hint = "set the host of rank 0: " + ("mpirun -x MASTER_ADDR=HOST" if names is not PLAIN else "MASTER_ADDR=HOST")
        problems.add(KIND, f"MASTER_ADDR is not set, but {size} ranks are on several hosts", hint, "MASTER_ADDR")
    restarts = _number(RESTARTS, env, 0, MOST_RANKS, problems) if RESTARTS in env else 0
    problems.raise_if_any()
    assert rank is not None and size is not None and local_rank is not None and restarts is not None
    return World(
        launcher=_launcher(names, env),
        rank=rank,
        size=size,
        local_rank=local_rank,
        master=(address, port),
        job=job,
        attempt=1 + restarts,
        # As torch writes and compares it (distributed/rendezvous.py:159).
        agent_store=names is PLAIN and env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )


def is_first(env: Mapping[str, str]) -> bool:
    """Return whether this process reports errors: rank 0's, or one whose variable is no rank of another process."""
    names = next((names for names in NAMES if _is_given(names, env)), None)
    if names is None or not re.fullmatch(r"[1-9][0-9]{0,8}", env[names.rank]):
        return True
    size = env.get(names.size, "")
    return bool(re.fullmatch(r"[0-9]{1,9}", size)) and 0 < int(size) <= int(env[names.rank])


def unused_nodes(env: Mapping[str, str]) -> str:
    """Return a note if a scheduler has given several nodes to a process without a launcher, else ""."""
    for name, launcher in (("SLURM_JOB_NUM_NODES", "srun"), ("PET_NNODES", "torchrun")):
        nodes = env.get(name, "")
        # a step of Slurm runs on the nodes that `srun` named
        if re.fullmatch(r"[1-9][0-9]{0,5}", nodes) and int(nodes) > 1 and "SLURM_STEP_ID" not in env:
            return f"note: {name} is {nodes}, but `zerofit train` uses only this node; start it with {launcher}"
    return ""


def leave_world(env: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables, so child processes do not wait for the other ranks."""
    for names in NAMES:
        for name in (names.rank, names.size, names.local_rank, *names.local_sizes):
            env.pop(name, None)
    for name in OTHERS:
        env.pop(name, None)


def drop_settings(env: MutableMapping[str, str]) -> None:
    """Remove settings of launchers for other programs: accelerate's, and threads per process."""
    # torchrun sets one thread per process unless OMP_NUM_THREADS is set, and accelerate sets a number too. zerofit
    # divides the cores of a host among its ranks.
    by_accelerate = ACCELERATE in env
    if by_accelerate or ("TORCHELASTIC_RUN_ID" in env and env.get("OMP_NUM_THREADS") == "1"):
        env.pop("OMP_NUM_THREADS", None)
    for name in [name for name in env if by_accelerate and name.startswith(ACCELERATES)]:
        del env[name]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a world, as it reports itself to the first process."""

    host: str
    local_rank: int
    cores: tuple[int, ...]  # numbers of the cores that it may use
    gpus: int | None  # number of GPUs that it may see; None: all, or unknown
    versions: Mapping[str, str]

    @classmethod
    def here(cls, world: World, versions: Mapping[str, str], gpus: int | None) -> Member:
        """Return this process as a member of the run."""
        return cls(
            host=socket.gethostname(),
            local_rank=world.local_rank,
            cores=tuple(sorted(os.sched_getaffinity(0))),
            gpus=gpus,
            versions=dict(versions),
        )


def hosts_of(members: Sequence[Member], on_gpus: bool) -> tuple[Host, ...]:
    """Return the hosts of these processes, in the order of their ranks.

    A process with local rank 0 is the first of its host. Hosts with the same name (containers) get a number. Raises
    UserError if ranks are distributed round-robin over hosts, if software differs, or if a rank sees fewer GPUs
    than its host has ranks.
    """
    # Host names do not tell hosts apart: containers may share a name. Local rank 0 begins a host.
    problems, hosts = Problems(), list[list[Member]]()
    for rank, member in enumerate(members):
        if member.local_rank == 0:
            hosts.append([])
        if not hosts or member.local_rank != len(hosts[-1]) or member.host != (hosts[-1] or [member])[0].host:
            message = f"rank {rank} is local rank {member.local_rank} on {member.host}, but ranks of a host must be"
            message += " consecutive"
            hint = "distribute ranks host by host: mpirun --map-by slot, srun -m block"
            problems.add(KIND, message, hint, member.host)
            break
        hosts[-1].append(member)
    for host in () if problems else hosts:
        seen = min((member.gpus for member in host if member.gpus is not None), default=None)
        if on_gpus and seen is not None and seen < len(host):
            message = f"each of {len(host)} ranks on {host[0].host} sees only {seen} of its GPUs"
            hint = "let all ranks see all GPUs of their host: srun --gpus-per-node=N, without --gpus-per-task"
            problems.add(KIND, message, hint, "CUDA_VISIBLE_DEVICES")
    for member in members:
        first = members[0]
        different = [name for name, version in member.versions.items() if version != first.versions[name]]
        if different:
            own = ", ".join(f"{name} {member.versions[name]}" for name in different)
            theirs = ", ".join(f"{name} {first.versions[name]}" for name in different)
            message = f"{member.host} has {own}; rank 0 on {first.host} has {theirs}"
            problems.add(KIND, message, "install the same versions on all hosts", member.host)
            break
    problems.raise_if_any()
    names = [host[0].host for host in hosts]
    names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]
    return tuple(Host(name, len(host)) for name, host in zip(names, hosts, strict=True))


def threads_of(members: Sequence[Member], hosts: Sequence[Host]) -> int | None:
    """Return the threads per rank if the launcher has bound each rank to its own cores."""
    bound, first = list[int](), 0
    for host in hosts:
        cores = [member.cores for member in members[first : first + host.slots]]
        first += host.slots
        if len(set(cores)) < len(cores) or len(cores) == 1:
            return None
        bound.append(min(map(len, cores)))
    return min(bound)


def _is_given(names: Names, env: Mapping[str, str]) -> bool:
    if names is SLURM:
        return "SLURM_STEP_ID" in env and env.get(names.size, "1") != "1" and names.rank in env
    if names is PLAIN and names.local_rank not in env:  # set by a pod or script; used only without another launcher
        inner = any(_is_given(other, env) for other in NAMES[1:])
        return names.rank in env and env.get(names.size) != "1" and not inner
    # Slurm's PMI also sets PMI_RANK, but no local rank
    return names.rank in env and (names is not NAMES[2] or names.local_rank in env)


def _number(name: str, env: Mapping[str, str], least: int, most: int, problems: Problems) -> int | None:
    """Return a variable's number, or add a problem and return None."""
    text = env.get(name)
    if text is None:
        hint = "use a launcher that sets it (deepspeed, torchrun, srun, mpirun), or unset the other variables"
        problems.add(KIND, f"{name} is not set, but other variables of a launcher are", hint, name)
    elif not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        hint = "a launcher sets it; unset it to train without a launcher"
        problems.add(KIND, f"{name} is {text!r}, not a number from {least} to {most}", hint, name)
    else:
        return int(text)
    return None


def _port(env: Mapping[str, str], job: str, problems: Problems) -> int:
    """Return MASTER_PORT, else a port that is the same on all hosts."""
    text = env.get("MASTER_PORT")
    if not text:
        # All hosts have to compute the same port. Python's hash of a text differs from process to process.
        return NEVER_GIVEN[zlib.crc32(job.encode()) % len(NEVER_GIVEN)] if job else DEFAULT_PORT
    if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 65536:
        return int(text)
    problems.add(KIND, f"MASTER_PORT is {text!r}, not a number from 1 to 65535", "", "MASTER_PORT")
    return DEFAULT_PORT


def _first_host(names: Names, env: Mapping[str, str], one_host: bool) -> str:
    """Return the host of rank 0 if the launcher provides it, else ""."""
    if one_host or env.get(names.size) == "1" or (names is SLURM and env.get("SLURM_STEP_NUM_NODES") == "1"):
        return LOOPBACK
    nodes = env.get("SLURM_STEP_NODELIST", "") if names is SLURM else ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # e.g. of "n[08-9,12],m1"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _launcher(names: Names, env: Mapping[str, str]) -> str:
    if names is not PLAIN:
        return names.launcher
    if ACCELERATE in env:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in env else names.launcher


def refused_in(world: World, command: str) -> UserError:
    """Return the error for a command that starts ranks itself but was started by a launcher."""
    message = f"zerofit {command} starts ranks itself, but {world.launcher} has started {world.size} processes"
    hint = f"use `zerofit train` with {world.launcher}, or run `zerofit {command}` without it"
    return UserError(Problem(kind=KIND, message=message, hint=hint, where=world.launcher))
