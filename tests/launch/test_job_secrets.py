"""Values out of the environment (keys, tokens) are not written into job files that others may read."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.launch.hostile import HOSTILE, LINES
from tests.launch.test_kubernetes import validate
from zerofit.cli.main import main
from zerofit.launch.job_file import env_file_text

SECRET = "c2f1-of-the-hub"
SLURM = ("--slurm", "job.sbatch", "--time", "60", "--setup", "")
KUBERNETES = ("--kubernetes", "job.yaml", "--image", "i:1", "--claim", "c")


def written(*flags: str) -> dict:
    common = ["launch", "run.yaml", "--nodes", "2", "--slots", "4", "--output", "runs/a", "--json"]
    done = CliRunner().invoke(main, [*common, *flags, "--env", "HUB_KEY", "--env", "MODE=fast"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUB_KEY", SECRET)
    Path("run.yaml").write_text("model: mlp\n")


def test_slurm_reads_them_from_a_file_of_the_owner_alone():
    result = written(*SLURM)
    text = Path("job.sbatch").read_text()
    assert SECRET not in text + json.dumps(result)
    assert "export MODE=fast" in text
    private = Path("job.sbatch.env")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    Path("zerofit").write_text('#!/bin/bash\necho "$HUB_KEY $MODE $*"\n')
    Path("zerofit").chmod(0o755)
    env = {"PATH": f"{Path.cwd()}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", Path("job.sbatch").absolute()], cwd="/", env=env, capture_output=True, text=True)
    assert ran.stdout.startswith(f"{SECRET} fast launch "), ran.stderr
    assert "--env=MODE --env=HUB_KEY" in ran.stdout
    private.unlink()
    ran = subprocess.run(["bash", Path("job.sbatch").absolute()], cwd="/", env=env, capture_output=True, text=True)
    assert ran.returncode == 1
    assert not ran.stdout
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", "job.sbatch"], check=False).returncode == 0


@pytest.mark.parametrize("value", [*HOSTILE, *LINES])
def test_values_in_the_file_stand_for_themselves(value):
    Path("env").write_text(env_file_text({"VALUE": value}))
    shown = subprocess.run(["bash", "-c", '. ./env; printf %s. "$VALUE"'], capture_output=True, text=True, check=True)
    assert shown.stdout == value + "."


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_kubernetes_takes_them_from_a_secret(kind):
    result = written(*KUBERNETES, "--kind", kind, "--job-name", "mine")
    text = Path("job.yaml").read_text()
    assert SECRET not in text + json.dumps(result)
    for document in yaml.safe_load_all(text):
        validate(document, document["kind"])
    reference = {"name": "HUB_KEY", "valueFrom": {"secretKeyRef": {"name": "mine-env", "key": "HUB_KEY"}}}
    job = document["spec"]
    pods = (
        [job["trainer"]]
        if kind == "trainjob"
        else [one["template"]["spec"]["containers"][0] for one in job["pytorchReplicaSpecs"].values()]
    )
    for pod in pods:
        assert pod["env"] == [{"name": "MODE", "value": "fast"}, reference]
        assert {"--env=MODE", "--env=HUB_KEY"} <= set(pod["args"])
    assert result["hand_in"].endswith(" && kubectl apply -f job.yaml")


KUBECTL = """#!/usr/bin/env python3
# as kubectl: `create` reads lines NAME=VALUE, and takes the value of a line without = from the environment
import json, os, sys
kept = {"argv": sys.argv[1:]}
if "create" in sys.argv:
    (file,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--from-env-file=")]
    pairs = (line.rstrip("\\n").partition("=") for line in open(file))
    kept["data"] = {name: value if equals else os.environ[name] for name, equals, value in pairs}
with open("calls", "a") as calls:
    print(json.dumps(kept), file=calls)
"""


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("value", [SECRET, "two\nlines\n", "", *HOSTILE])
def test_the_command_for_a_secret_shows_it_to_nobody(value, shell, monkeypatch):
    """Processes' arguments are everybody's to read."""
    monkeypatch.setenv("HUB_KEY", value)
    monkeypatch.setenv("OTHER", "5")
    command = written(*KUBERNETES, "--env", "OTHER")["hand_in"]
    Path("kubectl").write_text(KUBECTL)
    Path("kubectl").chmod(0o755)
    env = {"PATH": f"{Path.cwd()}:/usr/bin:/bin", "HUB_KEY": value, "OTHER": "5"}
    subprocess.run([shell, "-ec", command], env=env, check=True)
    create, apply = map(json.loads, Path("calls").read_text().splitlines())
    assert create["data"] == {"HUB_KEY": value, "OTHER": "5"}
    assert create["argv"] == ["create", "secret", "generic", "zerofit-env", "--from-env-file=/dev/stdin"]
    assert apply["argv"] == ["apply", "-f", "job.yaml"]
