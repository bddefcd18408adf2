"""The hosts and the way of starting ranks that the flags of `zerofit launch` ask for."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerofit.app.clusters.site import LaunchOptions, filled, slurm_hosts
from zerofit.launch.hostfile import Host, read_hostfile, select
from zerofit.launch.runner import check, forwarded
from zerofit.spec.errors import Problems
from zerofit.spec.run import Run
from zerofit.spec.run_folder import RunFolder
from zerofit.watch.launch_spec import as_argument


def find_hosts(options: dict[str, Any]) -> tuple[Host, ...]:
    """The hosts of the hostfile, the allocation or --nodes, filtered. Raises UserError with all that is wrong."""
    problems = Problems()
    _conflicts(options, problems)
    problems.raise_if_any()
    if options["nodes"]:
        hosts = tuple(Host(f"node-{n}", options["slots"]) for n in range(options["nodes"]))
    elif options["hostfile"]:
        hosts = read_hostfile(options["hostfile"])
    else:
        hosts = slurm_hosts()
    hosts = select(hosts, options["include"], options["exclude"])
    check(options["runner"], hosts, options["runner_args"], problems)
    if options["no_ssh"] and options["node_rank"] >= len(hosts):
        message = f"--node-rank {options['node_rank']} of {len(hosts)} nodes"
        problems.add("node-rank", message, f"0 to {len(hosts) - 1}", "--node-rank")
    if options["min_nodes"] and options["min_nodes"] > len(hosts):
        message = f"--min-nodes {options['min_nodes']} of {len(hosts)} hosts"
        problems.add("conflict", message, f"take {len(hosts)} or less", "--min-nodes")
    problems.raise_if_any()
    return hosts


def _conflicts(options: dict[str, Any], problems: Problems) -> None:
    """Flags that need or exclude each other."""
    given = {name for name, value in options.items() if value not in (None, False, "", ())}
    node = "node_rank" in given or options["node_rank"] == 0
    if not given & {"hostfile", "nodes"} and options["runner"] != "slurm":
        message = "no hosts: a launch without --hostfile never starts on this machine alone"
        problems.add("hostfile", message, "give --hostfile FILE; for this machine take `zerofit train`", "--hostfile")
    if {"hostfile", "nodes"} <= given:
        problems.add("conflict", "--hostfile and --nodes are both given", "give one of them", "--nodes")
    if ("nodes" in given) != ("slots" in given):
        problems.add("conflict", "--nodes and --slots belong together", "give both", "--nodes and --slots")
    if "nodes" in given and "no_ssh" not in given:
        problems.add("conflict", "--nodes without --no-ssh: no host has a name", "give --hostfile", "--nodes")
    if ("no_ssh" in given) != node:
        problems.add("conflict", "--no-ssh and --node-rank belong together", "give both", "--no-ssh")
    if "min_nodes" in given and ("no_ssh" in given or options["runner"] == "slurm"):
        message = "--min-nodes needs hosts that can be asked over ssh whether they are there"
        problems.add("conflict", message, "leave it out: the scheduler replaces lost nodes", "--min-nodes")
    if "no_ssh" in given and "master_addr" not in given:
        hint = "give --master-addr, an address of node 0 that all nodes reach"
        problems.add("conflict", "--no-ssh without --master-addr", hint, "--master-addr")
    if "no_ssh" in given and options["runner"] != "pdsh":
        problems.add("conflict", f"--no-ssh with --launcher {options['runner']}", "give one of them", "--no-ssh")


def wish_of(options: dict[str, Any]) -> LaunchOptions:
    """How to start the ranks. Raises UserError."""
    return LaunchOptions(
        runner=options["runner"],
        runner_args=options["runner_args"],
        ssh_port=options["ssh_port"],
        node_rank=options["node_rank"] if options["no_ssh"] else None,
        master_addr=options["master_addr"],
        master_port=options["master_port"],
        forwarded=forwarded(options["env"]),
        again=_again(options),
    )


def _again(options: dict[str, Any]) -> str:
    words = ["zerofit", "launch"]
    words += ["--hostfile", str(options["hostfile"])] if options["hostfile"] else []
    words += ["--launcher", options["runner"]] if options["runner"] != "pdsh" else []
    return shlex.join(words)


def command(run: Run, hosts: Sequence[Host], wish: LaunchOptions) -> dict[str, Any]:
    """The command that would start the ranks, for --dry-run; no host is asked and nothing is kept."""
    used = filled(hosts, run.ranks or sum(host.slots for host in hosts))
    folder = RunFolder((run.output or Path("runs/NEW")).absolute())
    with tempfile.TemporaryDirectory() as place:
        argv = wish.argv(used, Path(place), wish.master_addr or used[0].name, as_argument(folder.orders))
        return {"command": [part.replace(place, str(folder.logs)) for part in argv]}
