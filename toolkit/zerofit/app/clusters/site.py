"""Many hosts as a launch site: examined beforehand, described for the run, cleared of processes afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.doctor.preflight import Preflight, PreflightRequest, preflight
from zerofit.doctor.remote import Conversation, Unreachable, ask_all, conversations
from zerofit.doctor.software import model_code
from zerofit.launch.hostfile import Host
from zerofit.launch.launch_site import LaunchSite
from zerofit.launch.machine import this_machine
from zerofit.launch.orphans import RUN_ID
from zerofit.launch.route import address_to
from zerofit.launch.runner import DEFAULT_PORT, allocated, check, runner, runner_environment
from zerofit.spec.errors import Problem, Problems, UserError
from zerofit.spec.local_machine import usable_cores
from zerofit.spec.model_facts import Machine
from zerofit.spec.run_folder import Job, RunFolder

FP16_FROM, BF16_FROM = 5.3, 8.0  # CUDA compute capabilities with arithmetic of their own for it
COMING_S, ALONE_S = 180.0, 1800.0  # until a guard must have reported; where nodes start by themselves
LOOPBACK = "127."


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks of many hosts are started."""

    runner: str = "pdsh"
    runner_args: str = ""
    ssh_port: int | None = None
    node_rank: int | None = None  # of this node where each one starts its own ranks (no ssh)
    master_addr: str | None = None
    master_port: int | None = None
    forwarded: dict[str, str]
    again: str = "zerofit launch"  # with its hosts, for hints

    @property
    def over_ssh(self) -> bool:
        """Whether hosts can be examined and cleared over ssh."""
        return self.node_rank is None and self.runner != "slurm"

    @property
    def port(self) -> int:
        """The port where rank 0 will listen."""
        return self.master_port or DEFAULT_PORT

    def argv(self, hosts: Sequence[Host], logs: Path, master: str, spec: str) -> list[str]:
        """Return the launcher's command (`launch.runner.runner`)."""
        return runner(
            self.runner,
            hosts,
            logs,
            (master, self.port),
            spec,
            runner_args=self.runner_args,
            ssh_port=self.ssh_port,
            node_rank=self.node_rank,
        )


def examine_hosts(
    hosts: Sequence[Host], options: LaunchOptions, folder: Path, model: str, run_file: Path | None, port: int | None
) -> Preflight:
    """Ask all hosts what a start needs to know; `port`: where this command listens for the ranks, if it does yet."""
    return preflight(
        hosts,
        PreflightRequest(
            run_folder=folder,
            run_file=run_file,
            code=model_code(model),
            master=options.master_addr,
            master_port=options.port,
            callback=(own_address(hosts), port) if port else None,
            ssh_port=options.ssh_port,
        ),
    )


def machine_of(hosts: Sequence[Host], found: Preflight | None) -> Machine:
    """Return all devices as one machine: GPUs where every host has them, else CPUs (without answers, like here)."""
    devices = sum(host.slots for host in hosts)
    if found is None:
        return replace(this_machine(), devices=devices)
    graphics = [gpu for one in found.facts.values() for gpu in one["gpus"]]
    if graphics and all(one["gpus"] for one in found.facts.values()):
        capability = min(float(gpu["compute_capability"]) for gpu in graphics)
        able = {"fp16": capability >= FP16_FROM, "bf16": capability >= BF16_FROM}
        name = graphics[0]["name"]
        return Machine(accelerator="cuda", devices=devices, cores=usable_cores(), device_name=name, **able)
    here, name = this_machine(), f"CPU of {len(hosts)} hosts"
    able = {"fp16": here.accelerator == "cpu" and here.fp16, "bf16": True}
    return replace(here, accelerator="cpu", devices=devices, device_name=name, **able)


def cluster_site(
    hosts: Sequence[Host],
    job: Job,
    options: LaunchOptions,
    machine: Machine,
    found: Preflight | None,
    folder: RunFolder,
) -> LaunchSite:
    """Return the site of the job's ranks: the hosts in their order, each filled before the next."""
    used, problems = filled(hosts, job.layout.world_size), Problems()
    check(options.runner, used, options.runner_args, problems)
    problems.raise_if_any()
    names = tuple(host.name for host in used for _ in range(host.slots))
    own = options.master_addr or "" if options.node_rank is not None else own_address(used)
    master = options.master_addr or (found.master_address if found else None) or address_of(used[0].name, used)
    return LaunchSite(
        hosts=names,
        addresses={host.name: _seen_from(host.name, found) or own for host in used},
        master=(master, options.port),
        accelerator=machine.accelerator,
        argv=lambda spec: options.argv(used, folder.logs, master, spec),
        env=lambda mark: runner_environment(
            folder.logs, {RUN_ID: mark, "DS_ACCELERATOR": machine.accelerator, "PYTHONSAFEPATH": "1"}
        ),
        cwd="/",
        forwarded=options.forwarded,
        interfaces=found.interfaces if found else {},
        again=options.again,
        coming_s=COMING_S if options.over_ssh else ALONE_S,
        timeout_s=job.run.heartbeat_timeout,
        sweep=(lambda mark: sweep([h.name for h in used], mark, options.ssh_port)) if options.over_ssh else None,
    )


def filled(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the first hosts with that many slots in all, of the last one what is needed. Raises UserError."""
    used, left = [], ranks
    for host in hosts:
        take = min(left, host.slots)
        if take:
            ids = None if host.devices is None else host.devices[:take]
            used.append(Host(host.name, take, ids))
        left -= take
    if left:
        message = f"{ranks} ranks for {ranks - left} slots of the hostfile"
        raise UserError(Problem(kind="ranks", message=message, hint=f"take --ranks {ranks - left}", where="--ranks"))
    return tuple(used)


def sweep(hosts: Sequence[str], mark: str, ssh_port: int | None) -> list[str]:
    """End every process of a start on the hosts that can be reached.

    Return a line for each host where processes were left, or that could not be reached.
    """
    return asyncio.run(_sweep(hosts, mark, ssh_port))


async def _sweep(hosts: Sequence[str], mark: str, ssh_port: int | None) -> list[str]:
    async with conversations(hosts, ssh_port) as opened:
        there = {name: one for name, one in opened.items() if isinstance(one, Conversation)}
        answers = await ask_all(there, {"ask": "sweep", "mark": mark})
    notes = []
    for name, answer in {**opened, **answers}.items():
        if isinstance(answer, Unreachable):
            notes.append(f"{name} could not be reached ({answer.message}); its ranks end by themselves")
        elif answer["ended"]:
            notes.append(f"processes of this run that were left on {name}: {answer['ended']}; they have been ended")
    return notes


def own_address(hosts: Sequence[Host]) -> str:
    """Return this machine's address as the last of the hosts sees it."""
    for host in reversed(hosts):
        own = address_to(host.name)
        if own and (not own.startswith(LOOPBACK) or len(hosts) == 1):
            return own
    return LOOPBACK + "0.0.1"


def address_of(name: str, hosts: Sequence[Host]) -> str:
    """Return an address of a host that others can reach. Raises UserError for a name that does not resolve here."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        problem = Problem(kind="hostfile", message=f"{name} does not resolve: {error}", hint="give --master-addr")
        raise UserError(problem) from None
    return own_address(hosts) if address.startswith(LOOPBACK) and len(hosts) > 1 else address


def slurm_hosts() -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation that this command runs in. Raises UserError outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        hint = "`zerofit launch RUN --slurm FILE` writes a job for sbatch; elsewhere give --hostfile"
        raise UserError(
            Problem(kind="launcher", message="--launcher slurm without --hostfile, outside a Slurm job", hint=hint)
        )
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        problem = Problem(kind="launcher", message=f"scontrol does not name the nodes of the job: {error}")
        raise UserError(problem) from None
    return allocated(os.environ, done.stdout.split())


def _seen_from(host: str, found: Preflight | None) -> str | None:
    """Return this machine's address as the ssh connection to a host had it."""
    return found.facts.get(host, {}).get("asked_from", {}).get("there") if found else None
