"""Several hosts on one machine: network namespaces with addresses of their own, a bridge between them, and an sshd in
each. Needs root, iproute2, iptables, openssh-server and pdsh. Used by tests and by benchmarks/faults.py."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOOLS = ("ip", "iptables", "sshd", "ssh", "ssh-keygen", "pdsh", "tc")
SBIN = ":/usr/sbin:/sbin"


def missing() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=os.environ["PATH"] + SBIN) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    probe = subprocess.run(["ip", "netns", "add", f"zf{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    run("ip", "netns", "del", f"zf{os.getpid()}")
    return ""


def run(*argv: str) -> str:
    """Run a command that must succeed; its output."""
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, (argv, done.stderr)
    return done.stdout


@dataclass
class Node:
    """One host."""

    name: str  # its address: that is what the hostfile says
    space: str  # its network namespace
    wire: str  # the bridge's end of its cable
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def scratch(self) -> Path:
        """Where its sessions keep temporary files; short, as sockets' names are limited."""
        return Path("/tmp") / self.space

    def pids(self) -> list[int]:
        """Processes in its namespace, but for sshd itself."""
        found = [int(pid) for pid in run("ip", "netns", "pids", self.space).split()]
        ranks = []
        for pid in found:
            with suppress(psutil.Error):
                argv = psutil.Process(pid).cmdline()
                if argv and "python" in argv[0]:
                    ranks.append(pid)
        return ranks

    def processes(self, word: str) -> list[psutil.Process]:
        """Python processes on this host that have this among their arguments."""
        found = []
        for pid in self.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(word in part for part in process.cmdline()):
                    found.append(process)
        return found

    def inside(self, *argv: str) -> str:
        """Run a command on this host."""
        return run("ip", "netns", "exec", self.space, *argv)

    def listening(self) -> list[str]:
        """TCP ports that something listens on, but for ssh."""
        lines = self.inside("cat", "/proc/net/tcp").splitlines()[1:]
        rows = [line.split() for line in lines]
        ports = {str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A"}
        return sorted(ports - {"22"})

    def cut(self) -> None:
        """Pull the cable."""
        run("ip", "link", "set", self.wire, "down")

    def mend(self) -> None:
        """Plug it in again, and let everything through."""
        run("ip", "link", "set", self.wire, "up")
        self.inside("iptables", "-F")
        undo = ["ip", "netns", "exec", self.space, "tc", "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(undo, check=False, capture_output=True)

    def deafen(self) -> None:
        """Nothing comes in any more, but for what it says to itself; what it sends goes out."""
        self.inside("iptables", "-A", "INPUT", "-i", "eth0", "-j", "DROP")

    def lose(self, share: float) -> None:
        """Lose this share of what comes in and of what goes out."""
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            rule = ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
            self.inside("iptables", "-A", chain, way, "eth0", *rule)

    def slow(self, rate: str) -> None:
        """Send no faster than this, as tc writes it (1mbit)."""
        self.inside(
            "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kbit", "latency", "4s"
        )


@dataclass
class Hosts:
    """All of them."""

    place: Path
    nodes: list[Node] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # for commands on the machine that starts runs
    cables: subprocess.Popen[str] | None = None  # the process that carries frames, where they are late

    def hostfile(self, slots: int = 1, count: int | None = None) -> Path:
        """A hostfile with the first `count` of them."""
        path = self.place / f"hosts-{count}-{slots}"
        path.write_text("".join(f"{node.name} slots={slots}\n" for node in self.nodes[:count]))
        return path

    def left(self, patience_s: float = 10) -> dict[str, list[list[str]]]:
        """Python processes that are still there, by host, once those that are ending have had their time."""
        deadline = time.monotonic() + patience_s
        while True:
            found: dict[str, list[list[str]]] = {}
            for node in self.nodes:
                for pid in node.pids():
                    with suppress(psutil.Error):
                        found.setdefault(node.name, []).append(psutil.Process(pid).cmdline())
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


def stop_sshd(node: Node) -> None:
    """Kill a host's ssh server with all its sessions."""
    for pid in run("ip", "netns", "pids", node.space).split():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                os.kill(int(pid), signal.SIGKILL)
    assert node.sshd
    node.sshd.wait()


def start_sshd(node: Node, place: Path, over: Mapping[Path, Path] | None = None) -> None:
    """Start (or start again) the ssh server of a host; `over`: files that its sessions see in place of others."""
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd", path=os.environ["PATH"] + SBIN)
    node.scratch.mkdir(exist_ok=True)  # of its own: two of Open MPI's daemons at once fail over one session folder
    server = [str(sshd), "-D", "-e", "-f", str(place / "sshd_config"), "-o", f"SetEnv=TMPDIR={node.scratch}"]
    if over:  # `ip netns exec` gives it a mount namespace of its own
        mounts = [f"mount --bind {shlex.quote(str(fake))} {shlex.quote(str(real))}" for real, fake in over.items()]
        server = ["sh", "-c", " && ".join([*mounts, f"exec {shlex.join(server)}"])]
    argv = ["ip", "netns", "exec", node.space, *server]
    log = (place / f"sshd-{node.space}.log").open("ab")
    node.sshd = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 20
    while True:
        with suppress(OSError), socket.create_connection((node.name, 22), timeout=1):
            return
        assert time.monotonic() < deadline, f"sshd on {node.name} does not come up"
        time.sleep(0.05)


@contextmanager
def hosts(place: Path, count: int = 3, delay_s: float = 0.0) -> Iterator[Hosts]:
    """Make hosts, what they send arriving `delay_s` later, and take everything away afterwards."""
    number = os.getpid() % 250
    bridge, net = f"zfb{os.getpid()}", f"10.77.{number}"
    made = Hosts(place)
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o700)
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{net}.254/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        made.nodes += [Node(f"{net}.{i}", f"zf{os.getpid()}n{i}", f"zfv{os.getpid()}n{i}") for i in range(1, count + 1)]
        if delay_s:
            made.cables = _late_cables(made.nodes, delay_s)
        for node in made.nodes:
            run("ip", "netns", "add", node.space)
            if delay_s:
                run("ip", "link", "set", f"{node.wire}e", "netns", node.space, "name", "eth0")
            else:
                run("ip", "link", "add", node.wire, "type", "veth", "peer", "name", "eth0", "netns", node.space)
            run("ip", "link", "set", node.wire, "master", bridge, "up")
            node.inside("ip", "addr", "add", f"{node.name}/24", "dev", "eth0")
            node.inside("ip", "link", "set", "eth0", "up")
            node.inside("ip", "link", "set", "lo", "up")
        _write_ssh(made)
        for node in made.nodes:
            start_sshd(node, place)
        yield made
    finally:
        if made.cables:
            made.cables.kill()
            made.cables.wait()
        for node in made.nodes:
            for pid in subprocess.run(
                ["ip", "netns", "pids", node.space], capture_output=True, text=True
            ).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if node.sshd:
                node.sshd.wait()
            shutil.rmtree(node.scratch, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", node.space], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", node.wire], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _late_cables(nodes: list[Node], delay_s: float) -> subprocess.Popen[str]:
    """Start the process that each host's frames go through: from `...e`, to be its eth0, to its wire and back."""
    ends = [f"{node.wire}e:{node.wire}" for node in nodes]
    script = Path(__file__).with_name("late_cables.py")
    process = subprocess.Popen([sys.executable, str(script), str(delay_s), *ends], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n", "no TAP devices here"
    return process


def _write_ssh(made: Hosts) -> None:
    """Keys, the servers' configuration, and an `ssh` that reads ours instead of the user's."""
    place = made.place
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name))
    (place / "authorized_keys").write_text((place / "user_key.pub").read_text())
    lines = ["Port 22", f"HostKey {place}/host_key", f"AuthorizedKeysFile {place}/authorized_keys", "PidFile none"]
    lines += ["UsePAM no", "StrictModes no", "PermitRootLogin yes", "PasswordAuthentication no", "MaxStartups 200"]
    (place / "sshd_config").write_text("\n".join(lines) + "\n")
    key = " ".join((place / "host_key.pub").read_text().split()[:2])
    (place / "known_hosts").write_text("".join(f"{node.name} {key}\n" for node in made.nodes))
    config = [f"IdentityFile {place}/user_key", f"UserKnownHostsFile {place}/known_hosts", "StrictHostKeyChecking yes"]
    (place / "ssh_config").write_text("\n".join([*config, "LogLevel ERROR"]) + "\n")
    wrapper = place / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{place}/ssh_config" "$@"\n')
    wrapper.chmod(0o755)
    made.env = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}{SBIN}"}
