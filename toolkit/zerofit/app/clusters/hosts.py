"""The hosts of a run, as the flags of `zerofit launch` name them, and how ranks are started there."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerofit.app.clusters.site import LaunchOptions, filled, slurm_hosts
from zerofit.launch.hostfile import Host, read_hostfile, select
from zerofit.launch.runner import check, forwarded
from zerofit.spec.errors import Problems
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import as_argument


@dataclass(frozen=True, kw_only=True)
class HostRequest:
    """Which hosts a run is to have, and how its ranks are to be started there; one field a flag."""

    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    runner: str = "pdsh"  # --launcher
    runner_args: str = ""
    ssh_port: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    env: Sequence[str] = ()  # NAME or NAME=VALUE, forwarded to all ranks
    no_ssh: bool = False  # this command runs on every node
    node_rank: int | None = None  # with no_ssh: which of the hosts this node is
    nodes: int | None = None  # with no_ssh, in place of a hostfile
    slots: int | None = None  # ranks on each of the nodes
    min_nodes: int | None = None  # a run goes on without lost hosts while so many are left

    def options(self) -> LaunchOptions:
        """Return how to start the ranks. Raises UserError."""
        words = ["zerofit", "launch"]
        words += ["--hostfile", str(self.hostfile)] if self.hostfile else []
        words += ["--launcher", self.runner] if self.runner != "pdsh" else []
        return LaunchOptions(
            runner=self.runner,
            runner_args=self.runner_args,
            ssh_port=self.ssh_port,
            node_rank=self.node_rank if self.no_ssh else None,
            master_addr=self.master_addr,
            master_port=self.master_port,
            forwarded=forwarded(self.env),
            again=shlex.join(words),
        )


def find_hosts(asked: HostRequest) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, the allocation or --nodes, filtered. Raises UserError."""
    problems = Problems()
    _check_conflicts(asked, problems)
    problems.raise_if_any()
    if asked.nodes and asked.slots:
        hosts = tuple(Host(f"node-{n}", asked.slots) for n in range(asked.nodes))
    elif asked.hostfile:
        hosts = read_hostfile(asked.hostfile)
    else:
        hosts = slurm_hosts()
    hosts = select(hosts, asked.include, asked.exclude)
    check(asked.runner, hosts, asked.runner_args, problems)
    if asked.no_ssh and (asked.node_rank or 0) >= len(hosts):
        message = f"--node-rank {asked.node_rank} of {len(hosts)} nodes"
        problems.add("node-rank", message, f"0 to {len(hosts) - 1}", "--node-rank")
    if asked.min_nodes and asked.min_nodes > len(hosts):
        message = f"--min-nodes {asked.min_nodes} of {len(hosts)} hosts"
        problems.add("conflict", message, f"take {len(hosts)} or less", "--min-nodes")
    problems.raise_if_any()
    return hosts


def _check_conflicts(asked: HostRequest, problems: Problems) -> None:
    """Note flags that need or exclude each other."""
    if not (asked.hostfile or asked.nodes) and asked.runner != "slurm":
        message = "no hosts: a launch without --hostfile never starts on this machine alone"
        problems.add("hostfile", message, "give --hostfile FILE; for this machine take `zerofit train`", "--hostfile")
    if asked.hostfile and asked.nodes:
        problems.add("conflict", "--hostfile and --nodes are both given", "give one of them", "--nodes")
    if bool(asked.nodes) != bool(asked.slots):
        problems.add("conflict", "--nodes and --slots belong together", "give both", "--nodes and --slots")
    if asked.nodes and not asked.no_ssh:
        problems.add("conflict", "--nodes without --no-ssh: no host has a name", "give --hostfile", "--nodes")
    if asked.no_ssh != (asked.node_rank is not None):
        problems.add("conflict", "--no-ssh and --node-rank belong together", "give both", "--no-ssh")
    if asked.min_nodes and (asked.no_ssh or asked.runner == "slurm"):
        message = "--min-nodes needs hosts that can be asked over ssh whether they are there"
        problems.add("conflict", message, "leave it out: the scheduler replaces lost nodes", "--min-nodes")
    if asked.no_ssh and not asked.master_addr:
        hint = "give --master-addr, an address of node 0 that all nodes reach"
        problems.add("conflict", "--no-ssh without --master-addr", hint, "--master-addr")
    if asked.no_ssh and asked.runner != "pdsh":
        problems.add("conflict", f"--no-ssh with --launcher {asked.runner}", "give one of them", "--no-ssh")


def launcher_command(run: Run, hosts: Sequence[Host], options: LaunchOptions) -> list[str]:
    """Return the command that would start the ranks, for --dry-run; no host is asked and nothing is kept."""
    used = filled(hosts, run.ranks or sum(host.slots for host in hosts))
    folder = RunFolder((run.output or Path("runs/NEW")).absolute())
    with tempfile.TemporaryDirectory() as place:
        argv = options.argv(used, Path(place), options.master_addr or used[0].name, as_argument(folder.launch_spec))
        return [part.replace(place, str(folder.logs)) for part in argv]
