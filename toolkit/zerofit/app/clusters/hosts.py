"""Select the hosts of a run, examine them, describe how to start ranks there, end leftovers."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.doctor.examine import BUILD_S
from zerofit.doctor.facts import model_code
from zerofit.doctor.preflight import Preflight, PreflightRequest, preflight
from zerofit.doctor.remote import FACTS, INSIDE, PATIENCE_S, Conversation, Unreachable, ask_all, conversations
from zerofit.launch.host import RUN_ID, address_to, interface_of, this_machine
from zerofit.launch.hostfile import Host, check_size, read_hostfile, select
from zerofit.launch.local import COMING_S, LaunchSite
from zerofit.launch.runner import Runner, allocated, forwarded, forwarded_always, runner_environment
from zerofit.launch.world import DEFAULT_PORT
from zerofit.spec.errors import Problem, Problems, RunFailed, UserError
from zerofit.spec.local_machine import usable_cores
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Job, RunFolder
from zerofit.watch.launch_spec import as_argument

FP16_FROM, BF16_FROM = 5.3, 8.0  # first CUDA compute capabilities with native arithmetic
ALONE_S = 1800.0  # COMING_S with --no-ssh
LOOPBACK = "127."


# Addresses. Ranks meet at rank 0's host (`master`), and each guard connects to the process that runs this command
# (`addresses`). Both have to be addresses that other hosts can reach. A machine cannot always find such an address of
# its own:
#
# - This machine's address is taken from its route to the last host. A route to itself would be loopback.
# - /etc/hosts often maps a host's own name to loopback (Debian: 127.0.1.1), which other hosts cannot use.
# - With `--no-ssh`, --master-addr may be a name or a router's address, on which nobody can listen.


@dataclass(frozen=True, kw_only=True)
class HostRequest:
    """The hosts of a run and how to start its ranks there; one field per flag."""

    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    runner: str = "pdsh"  # --launcher
    runner_args: str = ""
    ssh_port: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    env: Sequence[str] = ()  # NAME or NAME=VALUE, forwarded to all ranks
    no_ssh: bool = False  # the user runs this command on every node
    node_rank: int | None = None  # with no_ssh: index of this node among the hosts
    nodes: int | None = None  # with no_ssh, instead of a hostfile
    slots: int | None = None  # ranks on each of the nodes
    min_nodes: int | None = None  # a run continues without lost hosts if at least this many hosts are left

    @cached_property
    def forwarded(self) -> dict[str, str]:
        """The environment variables for all ranks. Raises UserError."""
        return forwarded_always() | forwarded(self.env)

    @property
    def over_ssh(self) -> bool:
        """Whether this command can use ssh to examine hosts and to kill left-over processes there."""
        return not self.no_ssh and self.runner != "slurm"

    @property
    def port(self) -> int:
        """The port on which rank 0 will listen."""
        return self.master_port or DEFAULT_PORT

    @property
    def again(self) -> str:
        """The `zerofit launch` command for these hosts, as printed in hints."""
        words = ["zerofit", "launch"]
        words += ["--hostfile", str(self.hostfile)] if self.hostfile else []
        words += ["--launcher", self.runner] if self.runner != "pdsh" else []
        return shlex.join(words)

    @property
    def deepspeed_runner(self) -> Runner:
        """DeepSpeed's runner with these options."""
        return Runner(kind=self.runner, arguments=self.runner_args, ssh_port=self.ssh_port, node_rank=self.node_rank)


def find_hosts(options: HostRequest) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, Slurm allocation or --nodes, after --include/--exclude.

    Raises UserError with all problems of the flags.
    """
    problems = Problems()
    _check_conflicts(options, problems)
    problems.attempt(lambda: options.forwarded)
    problems.raise_if_any()
    # `--nodes` and `--slots` need no names: each node starts its own ranks.
    if options.nodes and options.slots:
        hosts = tuple(Host(f"node-{n}", options.slots) for n in range(options.nodes))
    elif options.hostfile:
        hosts = read_hostfile(options.hostfile)
    else:
        hosts = slurm_hosts()
    hosts = select(hosts, options.include, options.exclude)
    options.deepspeed_runner.check(hosts, problems)
    if options.no_ssh and (options.node_rank or 0) >= len(hosts):
        message = f"--node-rank {options.node_rank} with {len(hosts)} nodes"
        problems.add("node-rank", message, f"use 0 to {len(hosts) - 1}", "--node-rank")
    if options.min_nodes and options.min_nodes > len(hosts):
        message = f"--min-nodes {options.min_nodes} with {len(hosts)} hosts"
        problems.add("conflict", message, f"use {len(hosts)} or fewer", "--min-nodes")
    problems.raise_if_any()
    return hosts


def _check_conflicts(options: HostRequest, problems: Problems) -> None:
    if not (options.hostfile or options.nodes) and options.runner != "slurm":
        message = "`zerofit launch` needs --hostfile"
        problems.add("hostfile", message, "set --hostfile FILE; on this machine use `zerofit train`", "--hostfile")
    if options.hostfile and options.nodes:
        problems.add("conflict", "--hostfile and --nodes are both given", "use one of them", "--nodes")
    check_size(options.nodes or 1, options.slots or 1, problems)
    if bool(options.nodes) != bool(options.slots):
        problems.add("conflict", "only one of --nodes and --slots is given", "set both", "--nodes and --slots")
    if options.nodes and not options.no_ssh:
        problems.add("conflict", "ssh needs host names, but --nodes is only a number", "use --hostfile", "--nodes")
    if options.no_ssh != (options.node_rank is not None):
        problems.add("conflict", "only one of --no-ssh and --node-rank is given", "set both", "--no-ssh")
    if options.min_nodes and (options.no_ssh or options.runner == "slurm"):
        message = "--min-nodes needs ssh, to check which hosts are up"
        problems.add("conflict", message, "remove it: the scheduler replaces lost nodes", "--min-nodes")
    if options.no_ssh and not options.master_addr:
        hint = "set --master-addr to an address of node 0 that all nodes can reach"
        problems.add("conflict", "--no-ssh without --master-addr", hint, "--master-addr")
    if options.no_ssh and options.runner != "pdsh":
        problems.add("conflict", f"--no-ssh with --launcher {options.runner}", "use one of them", "--no-ssh")


def launcher_command(run: Run, hosts: Sequence[Host], options: HostRequest) -> list[str]:
    """Return the command that would start the ranks (--dry-run).

    The function contacts no host and keeps no files.
    """
    used = filled(hosts, run.ranks or sum(host.slots for host in hosts))
    folder = RunFolder((run.output or Path("runs/NEW")).absolute())
    # DeepSpeed's runners write files while they make a command. The run folder does not exist yet.
    with tempfile.TemporaryDirectory() as logs:
        master = options.master_addr or used[0].name, options.port
        argv = options.deepspeed_runner.command(used, Path(logs), master, as_argument(folder.launch_spec))
        return [word.replace(logs, str(folder.logs)) for word in argv]


def examine_hosts(
    hosts: Sequence[Host], options: HostRequest, folder: Path, model: str, run_file: Path | None, port: int | None
) -> Preflight:
    """Ask all hosts for the facts that zerofit needs to start ranks.

    `port`: each host tests a connection to this command on this port; None for no test.
    """
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


def machine_of(hosts: Sequence[Host], examined: Preflight | None) -> Machine:
    """Return all devices as one machine: GPUs if every host has GPUs, else CPUs.

    If the hosts were not examined (`examined` is None), assume the kind of device that this host has.
    """
    here = replace(this_machine(), devices=sum(host.slots for host in hosts))
    if examined is None:
        return here
    gpus = [gpu for facts in examined.facts.values() for gpu in facts["gpus"]]
    if gpus and all(facts["gpus"] for facts in examined.facts.values()):
        capability = min(float(gpu["compute_capability"]) for gpu in gpus)  # all ranks need the precision
        return Machine(
            accelerator="cuda",
            devices=here.devices,
            cores=usable_cores(),
            device_name=gpus[0]["name"],
            fp16=capability >= FP16_FROM,
            bf16=capability >= BF16_FROM,
        )
    fp16 = here.accelerator == "cpu" and here.fp16
    return replace(here, accelerator="cpu", device_name=f"CPU of {len(hosts)} hosts", fp16=fp16, bf16=True)


def cluster_site(
    hosts: Sequence[Host],
    job: Job,
    options: HostRequest,
    machine: Machine,
    examined: Preflight | None,
    folder: RunFolder,
) -> LaunchSite:
    """Return how to start the job's ranks on these hosts, which are filled one after another."""
    # A run may need fewer ranks than the hosts have slots. The runner can refuse the hosts that are left.
    used, problems = filled(hosts, job.layout.world_size), Problems()
    options.deepspeed_runner.check(used, problems)
    problems.raise_if_any()
    names = tuple(host.name for host in used for _ in range(host.slots))
    # Without ssh (--node-rank), --master-addr is the only address that all nodes have.
    own = options.master_addr or "" if options.node_rank is not None else own_address(hosts)
    master = options.master_addr or (examined.master_address if examined else None) or address_of(used[0].name, used)
    return LaunchSite(
        hosts=names,
        addresses={host.name: own for host in used},
        master=(master, options.port),
        accelerator=machine.accelerator,
        argv=lambda spec: options.deepspeed_runner.command(used, folder.logs, (master, options.port), spec),
        env=lambda mark: runner_environment(
            folder.logs, {RUN_ID: mark, "DS_ACCELERATOR": machine.accelerator, "PYTHONSAFEPATH": "1"}
        ),
        cwd="/",
        forwarded=options.forwarded,
        interfaces=examined.interfaces if examined else {},
        again=options.again,
        coming_s=COMING_S if options.over_ssh else ALONE_S,
        timeout_s=job.run.heartbeat_timeout,
        sweep=(lambda mark: sweep([h.name for h in used], mark, options.ssh_port)) if options.over_ssh else None,
    )


def filled(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the first hosts, in order, with exactly `ranks` slots in total.

    The last host may keep fewer slots. Raises UserError if there are too few slots.
    """
    used, missing = [], ranks
    for host in hosts:
        slots = min(missing, host.slots)
        if slots:
            # None stands for the first devices of the host, whatever their number.
            devices = None if host.devices is None else host.devices[:slots]
            used.append(Host(host.name, slots, devices))
        missing -= slots
    if missing:
        available = ranks - missing
        message = f"{ranks} ranks, but {available} slots in the hostfile"
        raise UserError(Problem(kind="ranks", message=message, hint=f"use --ranks {available}", where="--ranks"))
    return tuple(used)


def sweep(hosts: Sequence[str], mark: str, ssh_port: int | None) -> list[str]:
    """On all reachable hosts, kill the processes that were launched with the run id `mark`.

    Return a line for each host that had processes left or could not be reached.
    """
    notes = []
    for name, answer in ask_hosts(hosts, {"ask": "sweep", "mark": mark}, ssh_port).items():
        if isinstance(answer, Unreachable):
            notes.append(f"cannot reach {name} ({answer.message}); its ranks stop by themselves")
        elif answer["ended"]:
            notes.append(f"killed {answer['ended']} left-over processes of this run on {name}")
    return notes


def build_ops_on(hosts: Sequence[str], ops: list[str], ssh_port: int | None, show: Callable[[str], None]) -> None:
    """Compile DeepSpeed's C++ ops on all hosts in parallel, unless they are compiled already.

    Hosts that share a home folder take turns; later hosts find the ops compiled. Raises RunFailed for the first
    failure.
    """
    question = {"ask": "build", "ops": ops}
    answers = ask_hosts(hosts, question, ssh_port, module=INSIDE, patience_s=BUILD_S, say=show) if ops else {}
    for host, answer in answers.items():
        if isinstance(answer, Unreachable):
            message = f"{host} was lost while compiling DeepSpeed's ops: {answer.message}"
            raise RunFailed(Problem(kind="op-build", message=message, hint=answer.hint, where=host))
        for failed in answer["failed"].values():
            problem = Problem(**failed)
            raise RunFailed(Problem(kind=problem.kind, message=f"{host}: {problem.message}", hint=problem.hint))


def ask_hosts(
    hosts: Sequence[str],
    question: dict[str, object],
    ssh_port: int | None,
    *,
    module: str = FACTS,
    patience_s: float = PATIENCE_S,
    say: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any] | Unreachable]:
    """Ask all hosts a question in parallel; return each host's answer, or why it has none."""

    async def ask() -> dict[str, dict[str, Any] | Unreachable]:
        # One ssh connection for each host stays open for the question and its answer.
        async with conversations(hosts, ssh_port, module) as opened:
            reached = {name: host for name, host in opened.items() if isinstance(host, Conversation)}
            answers = await ask_all(reached, question, patience_s, say)
        return {name: answers[name] if isinstance(host, Conversation) else host for name, host in opened.items()}

    return asyncio.run(ask())


def own_address(hosts: Sequence[Host]) -> str:
    """Return this machine's address on its route to the last host."""
    for host in reversed(hosts):
        own = address_to(host.name)
        if own and (not own.startswith(LOOPBACK) or len(hosts) == 1):
            return own
    return LOOPBACK + "0.0.1"


def listening_address(hosts: Sequence[Host], options: HostRequest) -> str:
    """Return the address at which all hosts reach this machine; "" (all addresses) if unknown.

    With ssh, each host tests a connection to this address in the preflight.
    """
    if options.node_rank is None:
        return own_address(hosts)
    try:
        address = socket.gethostbyname(options.master_addr or "")
    except OSError:
        return ""
    # This machine cannot listen on the address of a router or service, and hosts cannot reach its loopback address.
    unreachable = address.startswith(LOOPBACK) and len(hosts) > 1
    return "" if unreachable or interface_of(address) is None else address


def address_of(name: str, hosts: Sequence[Host]) -> str:
    """Return an address of a host that others can reach.

    Raises UserError if the name does not resolve here.
    """
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        problem = Problem(kind="hostfile", message=f"{name} does not resolve: {error}", hint="set --master-addr")
        raise UserError(problem) from None
    return own_address(hosts) if address.startswith(LOOPBACK) and len(hosts) > 1 else address


def slurm_hosts() -> tuple[Host, ...]:
    """Return the hosts of the current Slurm allocation. Raises UserError outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        message = "outside a Slurm job, --launcher slurm needs --hostfile"
        hint = "`zerofit launch RUN --slurm FILE` writes a job for sbatch; elsewhere use --hostfile"
        raise UserError(Problem(kind="launcher", message=message, hint=hint))
    try:
        # Slurm shortens the list, as in "gpu[01-04,07]". Only scontrol expands all its forms.
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        problem = Problem(kind="launcher", message=f"scontrol cannot list the job's nodes: {error}")
        raise UserError(problem) from None
    return allocated(os.environ, done.stdout.split())
