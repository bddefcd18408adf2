"""Many hosts through DeepSpeed's multi-node runner: its arguments and a clean environment for it.

The runner puts at most double quotes around exported values, and none around paths (multinode_runner.py, add_export and
PDSHRunner.get_cmd). A value with `$(...)` would run on every host, so the runner gets no user text. It starts in / with
an environment of plain words, and reads what the ranks need from a file.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerofit.launch.hostfile import Host, write_hostfile
from zerofit.launch.local import GUARD
from zerofit.spec.errors import Problem, Problems, UserError

RUNNERS = ("pdsh", "slurm", "openmpi", "mpich")
PLAIN = re.compile(r"[\w@%+=:,./-]*")  # safe without quotes
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY")  # prefixes that the runner exports, and CUDA's
# also variables that training reads
FORWARDED = (
    *EXPORTED,
    *("GLOO_", "TORCH_", "CUDA_", "DEEPSPEED_", "DS_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("WANDB_", "TENSORBOARD_", "ZEROFIT_CACHE"),
)
NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "DS_ENV_FILE")
ALIVE = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"  # ssh exits if its host goes down
ENV_FILES = (Path("~/.deepspeed_env"), Path(".deepspeed_env"))  # places where the deepspeed launcher looks


def runner(
    kind: str,
    hosts: Sequence[Host],
    logs: Path,
    master: tuple[str, int],
    spec: str,
    *,
    runner_args: str = "",
    ssh_port: int | None = None,
    node_rank: int | None = None,
) -> list[str]:
    """Return the command that starts a guard for each rank on all hosts, or only on host `node_rank` (without ssh).

    `logs`: folder for its hostfile. `spec`: result of `watch.launch_spec.as_argument`.
    """
    hostfile = logs / "hostfile"
    write_hostfile(hostfile, hosts)
    argv = [sys.executable, "-m", "zerofit.launch.parent_death", str(os.getpid()), "deepspeed.launcher.runner"]
    argv += ["--hostfile", str(hostfile), "--launcher", kind, "--no_local_rank", "--no_ssh_check"]
    if any(host.devices is not None for host in hosts):
        argv += ["--include", "@".join(f"{h.name}:{','.join(map(str, h.ids))}" for h in hosts)]
    elif kind == "slurm":  # otherwise srun uses any nodes of the allocation (SlurmRunner.get_cmd)
        argv += ["--include", "@".join(h.name for h in hosts)]
    argv += [f"--launcher_args={runner_args}"] if runner_args else []
    argv += ["--ssh_port", str(ssh_port)] if ssh_port else []
    argv += ["--no_ssh", "--node_rank", str(node_rank)] if node_rank is not None else ["--force_multi"]
    return [*argv, "--master_addr", master[0], "--master_port", str(master[1]), str(GUARD), spec]


def check(kind: str, hosts: Sequence[Host], runner_args: str, problems: Problems) -> None:
    """Add problems for what this runner does not support on these hosts."""
    picked = [h.name for h in hosts if h.devices is not None]
    if picked and kind != "pdsh":
        message = f"--launcher {kind} cannot select devices, but the devices of {', '.join(picked)} are filtered"
        problems.add("launcher", message, "filter full hosts, or use --launcher pdsh", "--launcher")
    slots = {h.slots for h in hosts}
    if len(slots) > 1 and kind in ("slurm", "mpich"):
        message = f"--launcher {kind} needs the same number of slots on every host, got {sorted(slots)}"
        problems.add("launcher", message, "make them equal, or use --launcher pdsh", "--launcher")
    try:
        shlex.split(runner_args)
    except ValueError as error:
        message = f"--launcher-args {runner_args!r}: {error}"
        problems.add("launcher", message, "close the quotes", "--launcher-args")
    for path, what in ((sys.executable, "Python"), (str(GUARD), "zerofit")):
        if not PLAIN.fullmatch(path):
            message = f"{what} is in {path}, but DeepSpeed's runners pass that path to shells without quotes"
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


def forwarded(asked: Sequence[str], only_asked: bool = False) -> dict[str, str]:
    """Return the ranks' environment: variables that training reads, .deepspeed_env files, and those in `asked`.

    `asked`: NAME or NAME=VALUE. Raises UserError for a name that is not set.
    """
    env, problems = {} if only_asked else _usual(), Problems()
    for one in asked:
        name, equals, value = one.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.add("environment", f"{name!r} is not a valid variable name", "use NAME or NAME=VALUE", "--env")
        elif not equals and name not in os.environ:
            problems.add("environment", f"{name} is not set here", f"set it, or use --env {name}=VALUE", "--env")
        else:
            env[name] = value if equals else os.environ[name]
    problems.raise_if_any()
    return env


def _usual() -> dict[str, str]:
    """Return the variables that are always forwarded."""
    env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) and k not in NOT_FORWARDED}
    for file in ENV_FILES:
        path = file.expanduser()
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                env[name.strip()] = value
    return env


def allocated(env: Mapping[str, str], hosts: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a Slurm allocation, as listed by `scontrol show hostnames`; one rank per task or GPU.

    Raises UserError if the number of ranks per host is unknown.
    """
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if env.get(name, "").isdigit() and int(env[name]):
            return tuple(Host(host, int(env[name])) for host in hosts)
    tasks = env.get("SLURM_NTASKS", "")
    if tasks.isdigit() and hosts and int(tasks) % len(hosts) == 0:
        return tuple(Host(host, int(tasks) // len(hosts)) for host in hosts)
    message = "the Slurm allocation does not set the number of ranks per node"
    hint = "use sbatch --ntasks-per-node (`zerofit launch --slurm` writes such a file)"
    raise UserError(Problem(kind="launcher", message=message, hint=hint))
