"""Job files for Slurm and Kubernetes.

Text of the user is checked, and no file is overwritten.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import yaml

from zerofit.spec.errors import Problem, Problems, UserError

LONGEST = 1000  # characters of one line
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # names of environment variables (POSIX, 8.1)
# sbatch(1), --time: minutes, m:s, h:m:s, days-h, days-h:m, days-h:m:s
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
LONGEST_LEAD_S = 65535  # sbatch(1), --signal

Kind = Literal["trainjob", "pytorchjob"]
Data = dict[str, object]

BAD_INPUT = 2  # zerofit's exit code for errors that a restart cannot fix
# JobSet and the operator derive DNS names (at most 63 letters) from the job: NAME-worker-123-abcde
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # RFC 1123 subdomain, like names of PersistentVolumeClaims
# labels by which Trainer 2 finds the training pods (pkg/constants, AncestorTrainer)
TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
VARIABLES = {
    "trainjob": ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "pytorchjob": ("RANK", "MASTER_ADDR", "MASTER_PORT"),  # with this operator, RANK is the pod's number
}


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """The content of a file for any scheduler. All values are data: no shell expands them."""

    name: str
    run: str  # run file, run folder or model, as for `zerofit launch`
    output: str  # run folder on a shared file system
    nodes: int
    slots: int  # ranks per node: GPUs, or processors for CPU ranks
    device: Literal["gpu", "cpu"]  # device of each rank
    flags: tuple[str, ...] = ()  # further arguments of `zerofit launch`
    env: Mapping[str, str] = field(default_factory=dict)  # variables for all ranks, written into the file

    def texts(self) -> list[tuple[str, str]]:
        """Return the texts that are written into the file unchanged, each with its flag."""
        words = [("--output", self.output), ("RUN", self.run), *(("RUN", flag) for flag in self.flags)]
        return [*words, *(("--env", value) for value in self.env.values())]


def check_counts(counts: Mapping[str, int], problems: Problems) -> None:
    """Add problems for numbers below 1, each with its flag."""
    for knob, value in counts.items():
        if value < 1:
            problems.add("bad-value", f"got {value}; at least 1 is needed", "", knob)


def check_texts(texts: Iterable[tuple[str, str]], problems: Problems) -> None:
    """Add a problem for each of the (flag, text) pairs that a UTF-8 file cannot contain."""
    for knob, text in texts:
        bad = next((ch for ch in text if ch in "\0\r" or "\ud800" <= ch <= "\udfff"), None)
        if bad:
            message = f"{text!r} has the character {bad!r}, which the file cannot contain"
            problems.add("bad-value", message, "remove it", knob)


def check_line(knob: str, text: str, problems: Problems) -> None:
    """Add a problem for a text that is not one line of at most LONGEST characters."""
    bad = next((ch for ch in text if not ch.isprintable()), None)
    if bad:
        problems.add("bad-value", f"{text!r} has the character {bad!r}; one line of text is allowed", "", knob)
    if len(text) > LONGEST:
        problems.add("bad-value", f"{len(text)} characters; at most {LONGEST} are allowed", "shorten it", knob)


def check_environment(names: Iterable[str], problems: Problems) -> None:
    """Add problems for names that are not valid names of environment variables."""
    for name in names:
        if not NAME.fullmatch(name):
            message = f"{name!r} is not the name of an environment variable (letters, digits and _, no digit first)"
            problems.add("bad-value", message, "", "--env")


def write_once(path: Path, text: str, mode: int = 0o666) -> bool:
    """Write a text file (UTF-8) and return whether it is new; the umask applies to `mode`.

    Raises UserError instead of overwriting a different file.
    """
    data = text.encode()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        return True
    except FileExistsError:
        if path.is_file() and path.read_bytes() == data:
            return False
        message, hint = f"{path} exists with different content", "remove it, or write to another file"
        raise UserError(Problem(kind="output-exists", message=message, hint=hint, where=str(path))) from None
    except OSError as error:
        message, hint = f"cannot write {path}: {error.strerror}", "use a file in an existing folder"
        raise UserError(Problem(kind="unwritable", message=message, hint=hint, where=str(path))) from None


@dataclass(frozen=True, kw_only=True)
class SlurmJob(SchedulerJob):
    """The content of an sbatch file; a shell interprets only `setup`."""

    time: str  # limit in Slurm's format: "90" (minutes), "12:00:00", "2-12"
    save_s: int = 300  # seconds before the limit at which the run saves and stops
    partition: str | None = None
    account: str | None = None
    requeue: bool = True  # continue after pre-emption, a lost node, or the time limit
    log: str = "slurm-%j.log"  # output file; %j is the job's number
    env_file: str | None = None  # absolute path of a file of `export` lines (`env_file_text`) for the job
    env_file_names: tuple[str, ...] = ()  # names of the variables set in `env_file`, for all ranks
    setup: str = ""  # shell command that makes `zerofit` available, like "source /opt/venv/bin/activate"


def sbatch_text(job: SlurmJob) -> str:
    """Return the sbatch file, clean under shellcheck. Raises UserError with all problems."""
    from jinja2 import Environment  # manifests need no template

    _check(job)
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.slots),
        # With --gpus-per-task, each rank would see only its own GPU, which `launch.world.hosts_of` refuses.
        "gpus-per-node": str(job.slots) if job.device == "gpu" else None,
        "time": job.time,
        "signal": f"B:USR1@{job.save_s}",
        "partition": job.partition,
        "account": job.account,
        "output": job.log,
        # The default of many clusters (JobFileAppend in slurm.conf) empties the log when a job is requeued.
        "open-mode": "append",
    }
    argv = ["zerofit", "launch", "--launcher", "slurm", f"--output={job.output}"]
    argv += [*(f"--env={name}" for name in (*job.env, *job.env_file_names)), *job.flags, "--", job.run]
    shell = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    shell.filters |= {"quote": shlex.quote, "sbatch": _sbatch_quote}
    template = shell.from_string((Path(__file__).parent / "slurm.sh.jinja").read_text(encoding="utf-8"))
    return template.render(job=job, options=options, argv=argv)


def env_file_text(env: Mapping[str, str]) -> str:
    """Return shell lines that set these variables. Raises UserError for unsupported ones."""
    problems = Problems()
    check_texts([("--env", value) for value in env.values()], problems)
    check_environment(env, problems)
    problems.raise_if_any()
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _sbatch_quote(value: str) -> str:
    """Quote a value for a `#SBATCH` line: double quotes, with a backslash before `"` and `\\`."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check(job: SlurmJob) -> None:
    problems = Problems()
    check_counts({"--nodes": job.nodes, "--slots": job.slots}, problems)
    named = {"--job-name": job.name, "--partition": job.partition, "--account": job.account, "--log": job.log}
    for knob, text in named.items():
        if text == "":
            problems.add("bad-value", "it is empty", "remove it" if knob != "--job-name" else "", knob)
        check_line(knob, text or "", problems)
    if "\\" in job.log:
        problems.add("bad-value", f"{job.log!r}: Slurm interprets backslashes", "rename the file", "--log")
    check_line("--setup", job.setup, problems)
    check_texts(job.texts(), problems)
    check_environment([*job.env, *job.env_file_names], problems)
    _check_time(job, problems)
    problems.raise_if_any()


def _check_time(job: SlurmJob, problems: Problems) -> None:
    limit_s = seconds(job.time)
    if limit_s is None:
        hint = 'write minutes ("90"), "hours:minutes:seconds" or "days-hours:minutes:seconds"'
        problems.add("bad-value", f"{job.time!r} is not a Slurm time limit", hint, "--time")
    elif not 1 <= job.save_s <= LONGEST_LEAD_S:
        message = f"got {job.save_s} s; from 1 to {LONGEST_LEAD_S} are allowed"
        problems.add("bad-value", message, "", "--save-before-limit")
    elif limit_s <= job.save_s + 60:  # Slurm may send the signal a minute early: sbatch(1), --signal
        message = f"a limit of {limit_s} s leaves no time to train, since saving starts {job.save_s} s before it"
        problems.add("bad-value", message, "raise --time, or lower --save-before-limit", "--time")


def seconds(time: str) -> int | None:
    """Return a Slurm time limit in seconds; None if it is invalid or 0."""
    match = TIME.fullmatch(time) if time.isascii() else None
    if not match:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        parts = [*parts, 0, 0][:3]  # hours come first
    elif len(parts) < 3:
        parts = [0, *parts, 0][:3]  # minutes come first
    hours, minutes, secs = parts
    return int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + secs or None


@dataclass(frozen=True, kw_only=True)
class KubernetesJob(SchedulerJob):
    """The content of a manifest."""

    image: str  # with zerofit on its PATH
    claim: str  # PersistentVolumeClaim (ReadWriteMany) for run folders and data, mounted in every pod
    mount: str = "/zerofit"  # mount point; relative paths in `run` and `output` start there
    max_restarts: int = 10  # restarts of all pods from the newest checkpoint
    grace_s: int = 300  # seconds for an evicted pod to save a checkpoint
    secret_env: tuple[str, ...] = ()  # variables with values from the same keys of the Secret `secret`

    @property
    def secret(self) -> str:
        """Name of the Secret. It contains values that must not be in the manifest."""
        return f"{self.name}-env"


def manifest_text(job: KubernetesJob, kind: Kind) -> str:
    """Return the manifest as YAML. Raises UserError with all problems of the job."""
    _check_pods(job)
    documents = _train_job(job) if kind == "trainjob" else [_pytorch_job(job)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML dumper without anchors: repeated data are repeated in the output."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _train_job(job: KubernetesJob) -> list[Data]:
    """Return two documents: a runtime with the job's volumes, and the job."""
    pod = {"restartPolicy": "Never", **_pod(job, "node", {})}
    bad_input = {"containerName": "node", "operator": "In", "values": [BAD_INPUT]}
    jobs = {
        "backoffLimit": 0,  # a single pod cannot continue, so JobSet restarts all pods
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": bad_input}]},
        "template": {"spec": pod},
    }
    give_up = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    sets = {
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [give_up]},
        "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": TRAINER}, "spec": jobs}}],
    }
    # With `torch`, Trainer's plugin sets the variables PET_* in all pods, which VARIABLES lists.
    policy = {"numNodes": job.nodes, "torch": {}}
    trainer = {"numNodes": job.nodes, **_command(job, "trainjob"), "resourcesPerNode": _resources(job)}
    head: Data = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime"}
    runtime = {**head, "metadata": {"name": job.name}, "spec": {"mlPolicy": policy, "template": {"spec": sets}}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    spec = {"runtimeRef": reference, "trainer": trainer}
    return [runtime, {**head, "kind": "TrainJob", "metadata": {"name": job.name}, "spec": spec}]


def _pytorch_job(job: KubernetesJob) -> Data:
    """Return a job with pod 0 as master. Failed containers restart in their pods."""
    container = {**_command(job, "pytorchjob"), "resources": _resources(job)}
    template = {"spec": _pod(job, "pytorch", container)}
    replicas = {"Master": 1} | ({"Worker": job.nodes - 1} if job.nodes > 1 else {})
    replica = {"restartPolicy": "OnFailure", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "runPolicy": {"backoffLimit": job.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {kind: {"replicas": count, **replica} for kind, count in replicas.items()},
        },
    }


def _pod(job: KubernetesJob, name: str, container: Data) -> Data:
    """Return a pod with the shared volume and with shared memory."""
    # data loaders and NCCL need more shared memory than Docker's 64 MiB
    mounts = [{"name": "runs", "mountPath": job.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    full = {"name": name, "image": job.image, **container, "workingDir": job.mount, "volumeMounts": mounts}
    return {"terminationGracePeriodSeconds": job.grace_s, "containers": [full], "volumes": volumes}


def _command(job: KubernetesJob, kind: Kind) -> Data:
    rank, address, port = (f"$({name})" for name in VARIABLES[kind])
    command = ["launch", "--no-ssh", f"--nodes={job.nodes}", f"--slots={job.slots}"]
    position = [f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={port}"]
    names = [f"--env={name}" for name in (*job.env, *job.secret_env)]
    literals = [f"--output={job.output}", *names, *job.flags, "--", job.run]
    env: list[Data] = [{"name": name, "value": _literal(value)} for name, value in job.env.items()]
    for name in job.secret_env:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": job.secret, "key": name}}})
    args = [*command, *position, *(_literal(word) for word in literals)]
    # In Kubernetes, `command` replaces the image's entry point, and `args` alone would be arguments of that program.
    command_and_args: Data = {"command": ["zerofit"], "args": args}
    return command_and_args | ({"env": env} if env else {})


def _literal(text: str) -> str:
    """Escape a text, so that Kubernetes expands nothing in it: `$` becomes `$$`."""
    return text.replace("$", "$$")


def _resources(job: KubernetesJob) -> Data:
    # Kubernetes uses a limit as the request, too, if there is no request.
    return {"limits": {"nvidia.com/gpu" if job.device == "gpu" else "cpu": job.slots}}


def _check_pods(job: KubernetesJob) -> None:
    problems = Problems()
    check_counts({"--nodes": job.nodes, "--slots": job.slots, "--grace": job.grace_s}, problems)
    if job.max_restarts < 0:
        problems.add("bad-value", f"got {job.max_restarts}; at least 0 is needed", "", "--max-restarts")
    if not LABEL.fullmatch(job.name):
        hint = "use at most 40 of a-z, 0-9 and -, starting with a letter and not ending in -"
        problems.add("bad-value", f"Kubernetes does not allow the job name {job.name!r}", hint, "--job-name")
    if not CLAIM.fullmatch(job.claim):
        message = f"{job.claim!r} is not the name of a claim"
        problems.add("bad-value", message, "`kubectl get pvc` lists them", "--claim")
    if not job.image or any(ch.isspace() for ch in job.image):
        problems.add("bad-value", f"{job.image!r} is not the name of an image", "", "--image")
    check_line("--image", job.image, problems)
    check_texts([*job.texts(), ("--mount", job.mount)], problems)
    check_environment([*job.env, *job.secret_env], problems)
    mount, output = PurePosixPath(job.mount), PurePosixPath(job.mount, job.output)
    if not mount.is_absolute() or ":" in job.mount or ".." in mount.parts:
        problems.add(
            "bad-value", f"{job.mount!r}: expected an absolute path that contains neither : nor ..", "", "--mount"
        )
    elif not output.is_relative_to(mount) or ".." in output.parts:
        message = f"{job.output} is not on the shared volume, which is mounted at {job.mount}"
        problems.add("bad-value", message, "use a folder on it, which every pod reads and writes", "--output")
    problems.raise_if_any()
