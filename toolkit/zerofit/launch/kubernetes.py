"""Manifests for Kubeflow: a TrainJob (Trainer 2), or a PyTorchJob (Training Operator 1).

Each pod is a node. It runs `zerofit launch --no-ssh`, whose arguments Kubernetes passes without a shell. The operator
puts the pod's number and the first pod's address into the environment, and Kubernetes expands them in the arguments as
`$(NAME)` (kubernetes.io/docs, "Define a Command and Arguments for a Container").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

import yaml

from zerofit.launch.job_file import SchedulerJob, check_counts, check_environment, check_line, check_texts
from zerofit.spec.errors import Problems

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
    _check(job)
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
    command_and_args: Data = {"command": ["zerofit"], "args": args}
    return command_and_args | ({"env": env} if env else {})


def _literal(text: str) -> str:
    """Escape a text, so that Kubernetes expands nothing in it: `$` becomes `$$`."""
    return text.replace("$", "$$")


def _resources(job: KubernetesJob) -> Data:
    return {"limits": {"nvidia.com/gpu" if job.device == "gpu" else "cpu": job.slots}}


def _check(job: KubernetesJob) -> None:
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
