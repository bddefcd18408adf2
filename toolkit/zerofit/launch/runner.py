"""The command and the environment of DeepSpeed's multi-node runner, which starts many hosts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.hostfile import Host, write_hostfile
from zerofit.launch.local import GUARD
from zerofit.spec.errors import Problem, Problems, UserError

# A user's text must never reach the runner. It puts at most double quotes around exported values, and none around
# paths (deepspeed/launcher/multinode_runner.py, add_export and PDSHRunner.get_cmd). A value with `$(...)` would run
# on every host. Therefore:
# 1. the runner starts in `/` with an environment of plain words only (`runner_environment`);
# 2. its last argument is the encoded path of the launch spec, a file in the run folder;
# 3. the guard of each rank reads the user's values from that file, without a shell.
RUNNERS = ("pdsh", "slurm", "openmpi", "mpich")
PLAIN = re.compile(r"[\w@%+=:,./-]*")  # safe without quotes
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY")  # exported prefixes, and CUDA's
# prefixes of variables that training reads, on top of what the runner exports
FORWARDED = (
    *EXPORTED,
    *("GLOO_", "TORCH_", "CUDA_", "DEEPSPEED_", "DS_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("WANDB_", "TENSORBOARD_", "ZEROFIT_CACHE"),
)
NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "DS_ENV_FILE")
ALIVE = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"  # ssh exits if its host goes down
ENV_FILES = (Path("~/.deepspeed_env"), Path(".deepspeed_env"))  # places where the deepspeed launcher looks


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A multi-node runner of DeepSpeed with its options."""

    kind: str = "pdsh"  # one of RUNNERS
    arguments: str = ""  # further arguments of srun, mpirun or pdsh
    ssh_port: int | None = None
    node_rank: int | None = None  # whether to start ranks only on this host, without ssh

    def command(self, hosts: Sequence[Host], logs: Path, master: tuple[str, int], spec: str) -> list[str]:
        """Return the command that starts a guard for each rank.

        `logs`: folder for its hostfile. `master`: address and port of rank 0. `spec`: result of
        `watch.launch_spec.as_argument`.
        """
        hostfile = logs / "hostfile"
        write_hostfile(hostfile, hosts)
        argv = [sys.executable, "-m", "zerofit.launch.parent_death", str(os.getpid()), "deepspeed.launcher.runner"]
        # --no_local_rank: DeepSpeed would add --local_rank=N to the guard's arguments. Guards read variables instead.
        argv += ["--hostfile", str(hostfile), "--launcher", self.kind, "--no_local_rank", "--no_ssh_check"]
        if any(host.devices is not None for host in hosts):
            argv += ["--include", "@".join(f"{h.name}:{','.join(map(str, h.ids))}" for h in hosts)]
        elif self.kind == "slurm":  # otherwise srun uses any nodes of the allocation (SlurmRunner.get_cmd)
            argv += ["--include", "@".join(h.name for h in hosts)]
        argv += [f"--launcher_args={self.arguments}"] if self.arguments else []
        argv += ["--ssh_port", str(self.ssh_port)] if self.ssh_port else []
        # --force_multi: DeepSpeed starts the ranks of a single host on this machine, whatever the host's name is
        # (launcher/runner.py:537).
        argv += ["--force_multi"] if self.node_rank is None else ["--no_ssh", "--node_rank", str(self.node_rank)]
        return [*argv, "--master_addr", master[0], "--master_port", str(master[1]), str(GUARD), spec]

    def check(self, hosts: Sequence[Host], problems: Problems) -> None:
        """Add problems for settings that this runner does not support on these hosts."""
        filtered = [host.name for host in hosts if host.devices is not None]
        if filtered and self.kind != "pdsh":
            message = (
                f"--launcher {self.kind} cannot select devices, but the devices of {', '.join(filtered)} are filtered"
            )
            problems.add("launcher", message, "filter whole hosts only, or use --launcher pdsh", "--launcher")
        slots = {host.slots for host in hosts}
        if len(slots) > 1 and self.kind in ("slurm", "mpich"):
            message = f"--launcher {self.kind} needs the same number of slots on every host, got {sorted(slots)}"
            problems.add("launcher", message, "make them equal, or use --launcher pdsh", "--launcher")
        try:
            shlex.split(self.arguments)
        except ValueError as error:
            message = f"--launcher-args {self.arguments!r}: {error}"
            problems.add("launcher", message, "close the quotes", "--launcher-args")
        for path, what in ((sys.executable, "Python"), (str(GUARD), "zerofit")):
            if not PLAIN.fullmatch(path):
                message = f"the path of {what} needs quotes in a shell, but DeepSpeed's runners do not quote it: {path}"
                problems.add("launcher", message, "install it in a path with only letters, digits and . _ - /", what)


def runner_environment(logs: Path, plain: Mapping[str, str]) -> dict[str, str]:
    """Return the runner's environment, without variables that it would export unsafely.

    `plain`: further exports, written to a file.
    """
    file = logs / "launch.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in plain.items()), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if PLAIN.fullmatch(v) or not k.startswith(EXPORTED)}
    env["PATH"] = os.pathsep.join(p for p in env.get("PATH", os.defpath).split(os.pathsep) if PLAIN.fullmatch(p))
    # absolute, so the runner's folder prefixes do not apply (runner.py, main)
    env |= {"DS_ENV_FILE": str(file), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    env["PDSH_SSH_ARGS_APPEND"] = f"{env.get('PDSH_SSH_ARGS_APPEND', '')} {ALIVE}".strip()
    return env


def forwarded(variables: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env`: NAME=VALUE, or NAME with its value in this process.

    Raises UserError for a name that is not set.
    """
    env, problems = dict[str, str](), Problems()
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.add("environment", f"{name!r} is not a valid variable name", "use NAME or NAME=VALUE", "--env")
        elif not equals and name not in os.environ:
            problems.add("environment", f"{name} is not set here", f"set it, or use --env {name}=VALUE", "--env")
        else:
            env[name] = value if equals else os.environ[name]
    problems.raise_if_any()
    return env


def forwarded_always() -> dict[str, str]:
    """Return the variables that every launch forwards.

    These are the variables that training reads, and those in .deepspeed_env files.
    """
    env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) and k not in NOT_FORWARDED}
    for file in ENV_FILES:
        path = file.expanduser()
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                env[name.strip()] = value
    return env


def allocated(env: Mapping[str, str], hosts: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a Slurm allocation, with one rank per task or GPU.

    `hosts`: the names that `scontrol show hostnames` lists. Raises UserError if the number of ranks per host is
    unknown.
    """
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if env.get(name, "").isdigit() and int(env[name]):
            return tuple(Host(host, int(env[name])) for host in hosts)
    tasks = env.get("SLURM_NTASKS", "")
    if tasks.isdigit() and hosts and int(tasks) % len(hosts) == 0:
        return tuple(Host(host, int(tasks) // len(hosts)) for host in hosts)
    message = "the Slurm allocation does not set the number of ranks per node"
    hint = "use sbatch --ntasks-per-node (`zerofit launch --slurm` writes a job file that sets it)"
    raise UserError(Problem(kind="launcher", message=message, hint=hint))
