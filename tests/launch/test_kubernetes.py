"""Manifests: of the form that Kubeflow takes, and no text of a user's is expanded or read as YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.launch.hostile import HOSTILE, LINES
from zerofit.launch.job_file import VARIABLES, KubernetesJob, manifest_text
from zerofit.spec.errors import UserError

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "kubeflow.json").read_text())
KINDS = ("trainjob", "pytorchjob")
YAML = ["yes", "null", "1e3", "0x1F", "12:30:45", "- a", "a: b", "{a", "&a", "*a", "!!python/object:os.system x", "---"]


def job(**changes) -> KubernetesJob:
    usual = {"name": "n", "image": "i:1", "run": "run.yaml", "output": "runs/a", "nodes": 3, "slots": 8}
    return KubernetesJob(**usual | {"device": "gpu", "claim": "c"} | changes)


def validate(document: dict, kind: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA | {"$ref": f"#/$defs/{kind}"}).validate(document)


def documents(asked: KubernetesJob, kind: str) -> dict[str, dict]:
    """The documents of a manifest by their kinds, each checked against its schema."""
    found = {one["kind"]: one for one in yaml.safe_load_all(manifest_text(asked, kind))}
    for name, document in found.items():
        validate(document, name)
    return found


def containers(asked: KubernetesJob, kind: str) -> list[dict]:
    """Each container with its command, wherever the operator takes that from."""
    found = documents(asked, kind)
    if kind == "trainjob":
        return [found["TrainJob"]["spec"]["trainer"]]
    replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()
    return [one["template"]["spec"]["containers"][0] for one in replicas]


def expand(text: str, env: dict[str, str]) -> str:
    """As Kubernetes expands an argument: `$$` is `$`, `$(NAME)` is a value where there is one."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text, flags=re.DOTALL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*HOSTILE, *LINES, *YAML])
def test_texts_arrive_as_they_are(kind, text):
    asked = job(run=text, output=f"runs/{text}", flags=("--lr", text), env={"VALUE": text})
    env = dict(zip(VARIABLES[kind], ("2", "first-pod", "29400"), strict=True)) | {"HOME": "/expanded"}
    for container in containers(asked, kind):
        assert container["command"] == ["zerofit"]
        args = [expand(arg, env) for arg in container["args"]]
        assert args[:4] == ["launch", "--no-ssh", "--nodes=3", "--slots=8"]
        assert args[4:7] == ["--node-rank=2", "--master-addr=first-pod", "--master-port=29400"]
        assert args[7:] == [f"--output=runs/{text}", "--env=VALUE", "--lr", text, "--", text]
        assert [expand(one["value"], env) for one in container["env"] if one["name"] == "VALUE"] == [text]


def test_a_train_job_brings_its_runtime():
    found = documents(job(), "trainjob")
    runtime, asked = found["TrainingRuntime"], found["TrainJob"]["spec"]
    assert asked["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert asked["trainer"]["numNodes"] == 3
    assert asked["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    sets = runtime["spec"]["template"]["spec"]
    assert sets["failurePolicy"]["maxRestarts"] == 10
    only = sets["replicatedJobs"][0]
    assert only["name"] == "node"
    assert only["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = only["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a pod failure policy allows no other
    check_pod(pod, "node")


@pytest.mark.parametrize(("nodes", "replicas"), [(1, {"Master": 1}), (3, {"Master": 1, "Worker": 2})])
def test_a_pytorch_job(nodes, replicas):
    text = manifest_text(job(nodes=nodes, device="cpu"), "pytorchjob")
    assert "&id" not in text
    spec = documents(job(nodes=nodes, device="cpu"), "pytorchjob")["PyTorchJob"]["spec"]
    specs = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in specs.items()} == replicas
    for one in specs.values():
        assert one["restartPolicy"] == "OnFailure"
        pod = one["template"]["spec"]
        check_pod(pod, "pytorch")
        assert pod["containers"][0]["resources"] == {"limits": {"cpu": 8}}


def check_pod(pod: dict, name: str) -> None:
    only = pod["containers"][0]
    assert (only["name"], only["image"], only["workingDir"]) == (name, "i:1", "/zerofit")
    mounted = {one["name"]: one["mountPath"] for one in only["volumeMounts"]}
    volumes = {mounted[one.pop("name")]: one for one in pod["volumes"]}
    assert volumes == {
        "/zerofit": {"persistentVolumeClaim": {"claimName": "c"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory"}},
    }
    assert pod["terminationGracePeriodSeconds"] == 300


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "trainer", "numNodes"), "three"),
        (("spec", "trainer", "numProcesses"), 3),
        (("spec", "trainer", "args"), [3]),
        (("spec", "runtimeRef"), {"kind": "TrainingRuntime"}),
        (("apiVersion",), "trainer.kubeflow.org/v1"),
    ],
)
def test_the_schema_refuses_what_the_server_would(path, value):
    document = documents(job(), "trainjob")["TrainJob"]
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document, "TrainJob")


def test_everything_that_cannot_be_written_is_named_at_once():
    asked = job(name="A", image="", claim="C!", nodes=0, output="/elsewhere", run="a\0", env={"a b": "\ud800"})
    with pytest.raises(UserError) as caught:
        manifest_text(asked, "trainjob")
    places = [p.where for p in caught.value.problems]
    assert places == ["--nodes", "--job-name", "--claim", "--image", "RUN", "--env", "--env", "--output"]


@pytest.mark.parametrize("output", ["../a", "/zerofit/../a", "a/../../b"])
def test_the_run_folder_is_on_the_shared_volume(output):
    with pytest.raises(UserError, match="not on the shared volume"):
        manifest_text(job(output=output), "pytorchjob")
    assert manifest_text(job(output="/zerofit/runs/a"), "pytorchjob")
