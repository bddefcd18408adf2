"""Files for schedulers: a Slurm job or a Kubeflow manifest that runs `zerofit launch`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerofit.launch.job_file import write_once
from zerofit.launch.kubernetes import KubernetesJob, manifest_text
from zerofit.launch.runner import forwarded
from zerofit.launch.sbatch import SlurmJob, env_file_text, sbatch_text
from zerofit.spec.errors import Problems

NEEDED = {"slurm": ("nodes", "slots", "time"), "kubernetes": ("nodes", "slots", "image", "claim")}


@dataclass(frozen=True, kw_only=True)
class JobFileRequest:
    """A job for a scheduler: the run, where it runs, and the file to write; one field a flag of `zerofit launch`."""

    target: str | None  # model, run file or run folder
    flags: Mapping[str, Any]  # fields of the run that were given
    slurm: Path | None = None  # file to write
    kubernetes: Path | None = None  # file to write
    nodes: int | None = None
    slots: int | None = None
    env: tuple[str, ...] = ()
    max_restarts: int = 0
    trust_model_code: bool = False
    job_name: str | None = None
    device: Literal["gpu", "cpu"] = "gpu"
    time: str | None = None
    save_s: int | None = None
    partition: str | None = None
    account: str | None = None
    setup: str | None = None  # shell line that makes zerofit available
    image: str | None = None
    claim: str | None = None
    kind: Literal["trainjob", "pytorchjob"] = "trainjob"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A file that was written for a scheduler, and how to submit it."""

    written: str
    new: bool  # False: it was there already, the same
    hand_in: str  # the command

    def to_dict(self) -> dict[str, Any]:
        """Return what `zerofit launch --slurm --json` prints."""
        return asdict(self)


def write_job_file(asked: JobFileRequest) -> JobFile:
    """Write the file that is asked for, and say how to submit it. Raises UserError with all that is missing."""
    kind = "slurm" if asked.slurm else "kubernetes"
    problems = Problems()
    if asked.slurm and asked.kubernetes:
        problems.add("conflict", "--slurm and --kubernetes are both given", "give one of them", "--slurm")
    if asked.target is None:
        problems.add("missing", "no run is named", "give a run file, a model or a run folder", "RUN")
    if "output" not in asked.flags:
        hint = "the same folder each time is how a job goes on where it stopped"
        problems.add("missing", f"--{kind} needs --output, a folder that all nodes share", hint, "--output")
    for name in NEEDED[kind]:
        if getattr(asked, name) is None:
            problems.add("missing", f"--{kind} needs --{name}", "see `zerofit launch --help`", f"--{name}")
    problems.raise_if_any()
    env = forwarded(asked.env, only_asked=True)
    # a value that was not typed here but stands in the environment may be a secret: it is not written into the job
    secret = {name: env.pop(name) for name in asked.env if "=" not in name and name in env}
    common: dict[str, Any] = {
        "name": asked.job_name or "zerofit",
        "run": asked.target,
        "output": str(asked.flags["output"]),
        "nodes": asked.nodes,
        "slots": asked.slots,
        "device": asked.device,
        "env": env,
    }
    return _write_slurm(asked, common, secret) if asked.slurm else _write_kubernetes(asked, common, secret)


def _write_slurm(asked: JobFileRequest, common: dict[str, Any], secret: Mapping[str, str]) -> JobFile:
    """Write the sbatch file, and beside it a private file of the secrets."""
    assert asked.slurm
    names = ("time", "partition", "account", "save_s", "setup")
    chosen = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    flags = _words(asked) + ([f"--max-restarts={asked.max_restarts}"] if asked.max_restarts else [])
    env_file = asked.slurm.absolute().with_name(f"{asked.slurm.name}.env") if secret else None
    named = {"env_file": str(env_file) if env_file else None, "env_file_names": tuple(secret)}
    new = write_once(asked.slurm, sbatch_text(SlurmJob(**common, **chosen, **named, flags=tuple(flags))))
    if env_file:
        write_once(env_file, env_file_text(secret), mode=0o600)
    return JobFile(written=str(asked.slurm), new=new, hand_in=f"sbatch {shlex.quote(str(asked.slurm))}")


def _write_kubernetes(asked: JobFileRequest, common: dict[str, Any], secret: Mapping[str, str]) -> JobFile:
    """Write the manifest, which refers to a Secret for the secrets."""
    assert asked.kubernetes and asked.image and asked.claim
    chosen: dict[str, Any] = {"max_restarts": asked.max_restarts} if asked.max_restarts else {}
    job = KubernetesJob(
        **common,
        **chosen,
        image=asked.image,
        claim=asked.claim,
        flags=tuple(_words(asked)),
        secret_env=tuple(secret),
    )
    new = write_once(asked.kubernetes, manifest_text(job, asked.kind))
    # Arguments of kubectl would show values to `ps`; printf is the shell's own. A value of several lines cannot stand
    # in such a file: kubectl takes that of a name without `=` from its environment (kubectl's util/env_file.go).
    lines = (f'"{name}=${name}"' if value.splitlines() == [value] else name for name, value in secret.items())
    create = f"printf '%s\\n' {' '.join(lines)} | kubectl create secret generic {job.secret} --from-env-file=/dev/stdin"
    submit = f"{create} && " if secret else ""
    submit += f"kubectl apply -f {shlex.quote(str(asked.kubernetes))}"
    return JobFile(written=str(asked.kubernetes), new=new, hand_in=submit)


def _words(asked: JobFileRequest) -> list[str]:
    """Return the flags as words of a command line; the output folder has a place of its own."""
    words = ["--trust-model-code"] if asked.trust_model_code else []
    for field, value in asked.flags.items():
        name = field.replace("_", "-")
        if field == "output" or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}={one}" for one in value]
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(value)}")
        else:
            words.append(f"--{name}={value}")
    return words
