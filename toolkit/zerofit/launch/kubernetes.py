"""Manifests for Kubeflow: a TrainJob with its runtime (Trainer 2), or a PyTorchJob (Training Operator 1).

Each pod is a node: it runs `zerofit launch --no-ssh`, whose arguments Kubernetes hands over without a shell. What the
operator knows of the pod (its number, the first pod's address) it puts into the environment, and Kubernetes into the
arguments: `$(NAME)` (kubernetes.io/docs, "Define a Command and Arguments for a Container").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml

from zerofit.launch.job_file import SchedulerJob, check_counts, check_environment, check_line, check_texts
from zerofit.spec.errors import Problems

Kind = Literal["trainjob", "pytorchjob"]
Data = dict[str, Any]

BAD_INPUT = 2  # zerofit's exit code for what no restart mends
# JobSet and the operator name pods and services after the job: NAME-worker-123-abcde within the 63 letters of DNS
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # RFC 1123 subdomain, as PersistentVolumeClaims are named
# Trainer 2 reads these of a job template to find the pods that train (pkg/constants, AncestorTrainer)
TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
VARIABLES = {
    "trainjob": ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "pytorchjob": ("RANK", "MASTER_ADDR", "MASTER_PORT"),  # RANK: the pod's number, not a process's
}


@dataclass(frozen=True, kw_only=True)
class KubernetesJob(SchedulerJob):
    """The content of a manifest."""

    image: str  # has zerofit on its PATH
    claim: str  # PersistentVolumeClaim (ReadWriteMany) for run folders and data, mounted in every pod
    mount: str = "/zerofit"  # where it is mounted; paths in `run` and `output` that are not absolute start there
    max_restarts: int = 10  # of all pods, from the newest checkpoint
    grace_s: int = 300  # seconds that a pod has to save a checkpoint when it is evicted
    secret_env: tuple[str, ...] = ()  # variables whose values come from the Secret `secret`, under the same keys

    @property
    def secret(self) -> str:
        """Name of the Secret that holds what the manifest must not."""
        return f"{self.name}-env"


def manifest_text(job: KubernetesJob, kind: Kind) -> str:
    """Return the manifest as YAML. Raises UserError with everything in the job that cannot be written."""
    _check(job)
    documents = _train_job(job) if kind == "trainjob" else [_pytorch_job(job)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice out twice: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: data is written out wherever it occurs."""
        return True


def _train_job(job: KubernetesJob) -> list[Data]:
    """Return a runtime of this job's own, since volumes are a runtime's affair, and the job."""
    pod = {"restartPolicy": "Never", **_pod(job, "node", {})}
    bad_input = {"containerName": "node", "operator": "In", "values": [BAD_INPUT]}
    jobs = {
        "backoffLimit": 0,  # one pod alone cannot go on: JobSet starts all of them again
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
    """Make pod 0 the master, the others workers; containers start again where they are: no pod goes on alone."""
    container = {**_command(job, "pytorchjob"), "resources": _resources(job)}
    template = {"spec": _pod(job, "pytorch", container)}
    replicas = {"Master": 1} | ({"Worker": job.nodes - 1} if job.nodes > 1 else {})
    each = {"restartPolicy": "OnFailure", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "runPolicy": {"backoffLimit": job.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {kind: {"replicas": count, **each} for kind, count in replicas.items()},
        },
    }


def _pod(job: KubernetesJob, name: str, container: Data) -> Data:
    """Return a pod with the shared volume, and shared memory beyond Docker's 64 MiB, which loaders and NCCL use up."""
    mounts = [{"name": "runs", "mountPath": job.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    whole = {"name": name, "image": job.image, **container, "workingDir": job.mount, "volumeMounts": mounts}
    return {"terminationGracePeriodSeconds": job.grace_s, "containers": [whole], "volumes": volumes}


def _command(job: KubernetesJob, kind: Kind) -> Data:
    rank, address, port = (f"$({name})" for name in VARIABLES[kind])
    asked = ["launch", "--no-ssh", f"--nodes={job.nodes}", f"--slots={job.slots}"]
    place = [f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={port}"]
    names = [f"--env={name}" for name in (*job.env, *job.secret_env)]
    mine = [f"--output={job.output}", *names, *job.flags, "--", job.run]
    env: list[Data] = [{"name": name, "value": _literal(value)} for name, value in job.env.items()]
    for name in job.secret_env:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": job.secret, "key": name}}})
    args = [*asked, *place, *(_literal(word) for word in mine)]
    return {"command": ["zerofit"], "args": args} | ({"env": env} if env else {})


def _literal(text: str) -> str:
    """Return a text that Kubernetes expands to itself: `$$` is one `$`."""
    return text.replace("$", "$$")


def _resources(job: KubernetesJob) -> Data:
    return {"limits": {"nvidia.com/gpu" if job.device == "gpu" else "cpu": job.slots}}


def _check(job: KubernetesJob) -> None:
    problems = Problems()
    check_counts({"--nodes": job.nodes, "--slots": job.slots, "--grace": job.grace_s}, problems)
    if job.max_restarts < 0:
        problems.add("bad-value", f"got {job.max_restarts}; at least 0 is needed", "", "--max-restarts")
    if not LABEL.fullmatch(job.name):
        hint = "write a-z, 0-9 and -, a letter first, no - last, at most 40"
        problems.add("bad-value", f"Kubernetes takes no job called {job.name!r}", hint, "--job-name")
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
        problems.add("bad-value", f"{job.mount!r}: an absolute path without : and .. is needed", "", "--mount")
    elif not output.is_relative_to(mount) or ".." in output.parts:
        message = f"{job.output} is not on the shared volume, which is mounted at {job.mount}"
        problems.add("bad-value", message, "name a folder there: every pod reads and writes it", "--output")
    problems.raise_if_any()
