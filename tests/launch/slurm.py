"""A Slurm of one node, brought up in a folder and taken down again: munged, slurmctld and slurmd of Debian."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.local import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
CPUS = 8  # said to be there: jobs of the tests share what the machine has

# "low" leaves a job time to save when it is pre-empted, "abrupt" only KillWait
CONFIG = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=60
PartitionName=abrupt Nodes={host} PriorityTier=1 GraceTime=0
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """Commands to a controller that is up."""

    config: Path

    def call(self, *argv: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Standard output of a command of Slurm's."""
        environment = os.environ | {"SLURM_CONF": str(self.config)} | env
        done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def submit(self, file: Path, **env: str) -> str:
        """The number of a job of this file, started in the file's folder."""
        return self.call("sbatch", "--parsable", file, cwd=file.parent, **env).strip()

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, by its words."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, patience_s: float = 120.0) -> dict[str, str]:
        """What is said of a job once it is in one of these states."""
        deadline = time.monotonic() + patience_s
        while (about := self.about(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {about['JobState']}, not {' or '.join(states)}"
            time.sleep(0.2)
        return about


@contextmanager
def slurm_of_one_node(folder: Path) -> Iterator[Slurm]:
    """A controller with this machine as its only node, as long as the block runs."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=host, ports=_free_ports(2), cpus=CPUS))
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    env = os.environ | {"SLURM_CONF": str(config)}
    started: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(config)
    try:
        for argv in (
            ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            with (folder / f"{argv[0]}.out").open("wb") as out:
                started.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True))
            _until(lambda name=argv[0]: _answers(name, slurm, files["socket"]), started[-1], folder)
        yield slurm
        slurm.call("scancel", "--state=PENDING", "--user=root")
        slurm.call("scancel", "--user=root")
        _until(lambda: not slurm.call("squeue", "--noheader"), started[-1], folder)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def _answers(name: str, slurm: Slurm, socket_file: Path) -> bool:
    """Whether a daemon that was started is ready for use."""
    if name == "munged":
        return socket_file.exists()
    try:
        if name == "slurmctld":
            return "UP" in slurm.call("scontrol", "ping")
        return slurm.call("sinfo", "--noheader", "--partition=high", "--format=%T").strip() == "idle"
    except AssertionError:
        return False


def _until(true, process: subprocess.Popen[bytes], folder: Path, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.out"))
        assert process.poll() is None and time.monotonic() < deadline, f"{process.args[0]} is not up: {logs}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
