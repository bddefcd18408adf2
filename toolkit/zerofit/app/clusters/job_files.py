"""Files for schedulers: a Slurm job or a Kubeflow manifest that runs `zerofit launch`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zerofit.app.job.requests import is_run_file, read_request
from zerofit.launch.hostfile import check_size
from zerofit.launch.job_file import KubernetesJob, SlurmJob, env_file_text, manifest_text, sbatch_text, write_once
from zerofit.launch.runner import forwarded
from zerofit.models.catalog import names_callable
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run, is_switch, switch
from zerofit.spec.units import MOST_RANKS

NEEDED = {"slurm": ("nodes", "slots", "time"), "kubernetes": ("nodes", "slots", "image", "claim")}


@dataclass(frozen=True, kw_only=True)
class JobFileRequest:
    """A scheduler job: the run, where it runs, and the file to write; a field per flag."""

    target: str | None  # model, run file or run folder
    flags: Mapping[str, Any]  # fields of the run that the user gave
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
    """A file written for a scheduler, and the command that submits it."""

    written: str
    new: bool  # False: the same file existed already
    hand_in: str  # command that submits it

    def to_dict(self) -> dict[str, object]:
        """Return the data that `zerofit launch --slurm --json` prints."""
        return asdict(self)


# The job runs `zerofit launch` with the same flags on the cluster. So the file contains no resolved values, and a job
# that is submitted again resumes its run folder.
def write_job_file(options: JobFileRequest) -> JobFile:
    """Write the requested file and return how to submit it.

    Check the run like `zerofit launch`, except for facts that only the cluster can show. Raises UserError with all
    problems; then no file is written.
    """
    kind = "slurm" if options.slurm else "kubernetes"
    problems = Problems()
    if options.slurm and options.kubernetes:
        problems.add("conflict", "--slurm and --kubernetes are both given", "use one of them", "--slurm")
    if options.target is None:
        problems.add("missing", "no run given", "name a run file, a model or a run folder", "RUN")
    if "output" not in options.flags:
        hint = "a job resumes from the folder of its last start"
        problems.add("missing", f"--{kind} needs --output, a folder that all nodes share", hint, "--output")
    for name in NEEDED[kind]:
        if getattr(options, name) is None:
            problems.add("missing", f"--{kind} needs --{name}", "see `zerofit launch --help`", f"--{name}")
    complete = not problems
    check_size(options.nodes or 1, options.slots or 1, problems)
    env = problems.attempt(lambda: forwarded(options.env)) or {}
    # A value from the environment may be a secret, so it is not written into the job.
    secret = {name: env.pop(name) for name in options.env if "=" not in name and name in env}
    write = None
    if complete:
        common = {
            "name": options.job_name or "zerofit",
            "run": options.target,
            "output": str(options.flags["output"]),
            "nodes": options.nodes,
            "slots": options.slots,
            "device": options.device,
            "env": env,
        }
        prepare = _prepare_slurm if options.slurm else _prepare_kubernetes
        write = problems.attempt(lambda: prepare(options, common, secret))
    problems.attempt(lambda: _check_run(options, problems))
    problems.raise_if_any()
    assert write
    return write()


def _prepare_slurm(
    options: JobFileRequest, common: Mapping[str, Any], secret: Mapping[str, str]
) -> Callable[[], JobFile]:
    """Return the function that writes the sbatch file and the secrets. Raises UserError."""
    file = options.slurm
    assert file
    names = ("time", "partition", "account", "save_s", "setup")
    slurm_options = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    flags = _words(options) + ([f"--max-restarts={options.max_restarts}"] if options.max_restarts else [])
    # Job files are often shared. So secrets are in another file, which only the owner can read.
    env_file = file.absolute().with_name(f"{file.name}.env") if secret else None
    job = SlurmJob(
        **common,
        **slurm_options,
        env_file=str(env_file) if env_file else None,
        env_file_names=tuple(secret),
        flags=tuple(flags),
    )
    text = sbatch_text(job)

    def write() -> JobFile:
        new = write_once(file, text)
        if env_file:
            write_once(env_file, env_file_text(secret), mode=0o600)
        return JobFile(written=str(file), new=new, hand_in=f"sbatch {shlex.quote(str(file))}")

    return write


def _prepare_kubernetes(
    options: JobFileRequest, common: Mapping[str, Any], secret: Mapping[str, str]
) -> Callable[[], JobFile]:
    """Return the function that writes the manifest, which refers to a Secret. Raises UserError."""
    file = options.kubernetes
    assert file and options.image and options.claim
    restarts: dict[str, Any] = {"max_restarts": options.max_restarts} if options.max_restarts else {}
    job = KubernetesJob(
        **common,
        **restarts,
        image=options.image,
        claim=options.claim,
        flags=tuple(_words(options)),
        secret_env=tuple(secret),
    )
    text = manifest_text(job, options.kind)
    # Arguments of kubectl would show values to `ps`; printf is built into the shell. The file format has no multi-line
    # values: for a name without `=` kubectl uses its own environment (kubectl's util/env_file.go).
    lines = (f'"{name}=${name}"' if value.splitlines() == [value] else name for name, value in secret.items())
    create = f"printf '%s\\n' {' '.join(lines)} | kubectl create secret generic {job.secret} --from-env-file=/dev/stdin"
    submit = f"{create} && " if secret else ""
    submit += f"kubectl apply -f {shlex.quote(str(file))}"
    return lambda: JobFile(written=str(file), new=write_once(file, text), hand_in=submit)


def _check_run(options: JobFileRequest, problems: Problems) -> None:
    from zerofit.app.fitting.options import CHOSEN  # these modules import torch, which `launch --help` does not need
    from zerofit.app.job.hub_models import PREFIX
    from zerofit.app.job.resolve import UNOPENED, resolve_job

    if options.target is None:
        return
    # A pod sees other files than this machine: those of its image and of the claim's volume.
    if options.kubernetes and is_run_file(options.target) and not Path(options.target).exists():
        return  # the path is on the claim's volume
    # A job may wait for days in a queue. So whatever this machine can judge is checked before the file is written.
    request = read_request(options.target, options.flags, options.trust_model_code)
    run, ranks = request.run, (options.nodes or 0) * (options.slots or 0)
    if ranks and run.ranks and run.ranks > ranks:
        message = f"{request.place('ranks')}: {run.ranks} ranks for {options.nodes} nodes with {options.slots} slots"
        problems.add("ranks", message, f"use --ranks {ranks} or fewer", request.place("ranks"))
        return
    ds_config = run.ds_config if isinstance(run.ds_config, str) else None
    paths = (run.model, run.pretrained, ds_config, run.chat_template, run.tokenizer)
    if run.model.startswith(PREFIX) or (options.kubernetes and any(map(_is_elsewhere, paths))):
        return
    if ranks > MOST_RANKS:
        return  # reported already
    if run.fit:  # these values are chosen on the cluster
        free = {name: Run.model_fields[name].default for name in CHOSEN}
        request = request.updated(fit=False, **free)
    accelerator = "cuda" if options.device == "gpu" else "cpu"
    machine = Machine(
        accelerator=accelerator,
        devices=ranks or run.ranks or 1,
        cores=ranks or 1,
        here=False,
        device_name=f"the cluster's {accelerator}",
        fp16=True,  # this machine cannot know which precisions the cluster has
        bf16=True,
    )
    resolve_job(request, machine=machine, inputs=UNOPENED)


def _is_elsewhere(name: str | Path | None) -> bool:
    """Return whether a file, folder or module is missing here but may be in the container image."""
    text = str(name or "")
    if names_callable(text):
        return True
    return not Path(text).exists() and ("/" in text or Path(text).suffix in (".json", ".jinja", ".pth"))


def _words(options: JobFileRequest) -> list[str]:
    """Return the flags of the run as command-line arguments, without --output."""
    words = ["--trust-model-code"] if options.trust_model_code else []
    for field, value in options.flags.items():
        name = field.replace("_", "-")
        if field == "output" or value is None:
            continue
        if is_switch(field):
            words.append(switch(field, value))
        elif isinstance(value, tuple):
            words += [f"--{name}={item}" for item in value]
        elif isinstance(value, dict):
            words.append(f"--{name}={json.dumps(value)}")
        else:
            words.append(f"--{name}={value}")
    return words
