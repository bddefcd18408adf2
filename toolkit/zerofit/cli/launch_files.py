"""Files for schedulers: the flags of `zerofit launch` that describe a job, and the job that they make."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from zerofit.launch.kubernetes import KubernetesJob, manifest_text
from zerofit.launch.runner import forwarded
from zerofit.launch.sbatch import SlurmJob, env_file_text, sbatch_text
from zerofit.launch.write_once import write_once
from zerofit.spec.errors import Problems
from zerofit.spec.run import Run

HANDED_ON = ("max_restarts",)  # of launch's own flags
NEEDED = {
    "slurm": ("nodes", "slots", "time"),
    "kubernetes": ("nodes", "slots", "image", "claim"),
}
OPTIONS = (
    click.option("--slurm", type=click.Path(path_type=Path), metavar="FILE", help="write a job for sbatch instead"),
    click.option("--kubernetes", type=click.Path(path_type=Path), metavar="FILE", help="write a Kubeflow manifest"),
    click.option("--job-name", help="of either [zerofit]"),
    click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help="of either: of a rank [gpu]"),
    click.option("--time", help="--slurm: time limit, as sbatch takes it (12:00:00); saved before, then queued again"),
    click.option("--save-before-limit", "save_s", type=click.IntRange(min=1), help="--slurm: seconds [300]"),
    click.option("--partition", help="--slurm: partition"),
    click.option("--account", help="--slurm: account"),
    click.option("--setup", help="--slurm: shell line that makes zerofit available [. VENV/bin/activate]"),
    click.option("--image", help="--kubernetes: container image with zerofit in it"),
    click.option("--claim", help="--kubernetes: PersistentVolumeClaim for run folders and data"),
    click.option("--kind", type=click.Choice(["trainjob", "pytorchjob"]), default="trainjob", help="[trainjob]"),
)


def file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the options."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def write_file(target: str | None, flags: dict[str, Any], own: dict[str, Any], setup: str) -> dict[str, Any]:
    """Write the file that is asked for; its path, and how to hand it in. Raises UserError with all that is missing."""
    kind = "slurm" if own["slurm"] else "kubernetes"
    problems = Problems()
    if own["slurm"] and own["kubernetes"]:
        problems.add("conflict", "--slurm and --kubernetes are both given", "give one of them", "--slurm")
    if target is None:
        problems.add("missing", "no run is named", "give a run file, a model or a run folder", "RUN")
    if "output" not in flags:
        hint = "the same folder each time is how a job goes on where it stopped"
        problems.add("missing", f"--{kind} needs --output, a folder that all nodes share", hint, "--output")
    for name in NEEDED[kind]:
        if own[name] is None:
            problems.add("missing", f"--{kind} needs --{name}", "see `zerofit launch --help`", f"--{name}")
    problems.raise_if_any()
    env = forwarded(own["env"], only_asked=True)
    # a value that was not typed here but stands in the environment may be a secret: it is not written into the job
    secret = {name: env.pop(name) for name in own["env"] if "=" not in name and name in env}
    common = {
        "name": own["job_name"] or "zerofit",
        "run": target,
        "output": str(flags["output"]),
        "nodes": own["nodes"],
        "slots": own["slots"],
        "device": own["device"],
        "env": env,
    }
    if kind == "slurm":
        path: Path = own["slurm"]
        env_file = path.absolute().with_name(f"{path.name}.env") if secret else None
        named = {"env_file": str(env_file) if env_file else None, "env_file_names": tuple(secret)}
        new = write_once(path, sbatch_text(_slurm_job(common | named, flags, own, setup)))
        if env_file:
            write_once(env_file, env_file_text(secret), mode=0o600)
        hand_in = f"sbatch {shlex.quote(str(path))}"
    else:
        path = own["kubernetes"]
        job = _kubernetes_job(common | {"secret_env": tuple(secret)}, flags, own)
        new = write_once(path, manifest_text(job, own["kind"]))
        values = "".join(f' --from-literal={name}="${name}"' for name in secret)
        hand_in = f"kubectl create secret generic {job.secret}{values} && " if secret else ""
        hand_in += f"kubectl apply -f {shlex.quote(str(path))}"
    return {"written": str(path), "new": new, "hand_in": hand_in}


def _slurm_job(common: dict[str, Any], flags: Mapping[str, Any], own: Mapping[str, Any], setup: str) -> SlurmJob:
    chosen = {k: own[k] for k in ("time", "partition", "account", "save_s") if own[k] is not None}
    handed = tuple(_words(flags) + _words({k: own[k] for k in HANDED_ON if own[k]}))
    return SlurmJob(**common, **chosen, setup=own["setup"] if own["setup"] is not None else setup, flags=handed)


def _kubernetes_job(common: dict[str, Any], flags: Mapping[str, Any], own: Mapping[str, Any]) -> KubernetesJob:
    restarts = {"max_restarts": own["max_restarts"]} if own["max_restarts"] else {}
    return KubernetesJob(**common, **restarts, image=own["image"], claim=own["claim"], flags=tuple(_words(flags)))


def _words(flags: Mapping[str, Any]) -> list[str]:
    """The flags as words of a command line; the output folder has a place of its own."""
    words = []
    for field, value in flags.items():
        name = field.replace("_", "-")
        if field == "output" or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(value)}")
        else:
            words.append(f"--{name}={value}")
    assert all(field in Run.model_fields or field in HANDED_ON for field in flags)
    return words
