"""Job files are written for runs that can start: all that needs no cluster is checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerofit.cli.main import main

SLURM = ("--slurm", "job.sbatch", "--time", "60", "--setup", "")
KUBERNETES = ("--kubernetes", "job.yaml", "--image", "i:1", "--claim", "c")
HOSTS = ("--nodes", "2", "--slots", "4")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: mlp\nsteps: 0\nlr: -1\n")


def asked(*words: str) -> tuple[int, set[str]]:
    """The exit code, and where problems are."""
    done = CliRunner().invoke(main, ["launch", "--output", "runs/a", *words, "--json"])
    assert "Traceback" not in done.output
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    problems = answer.get("errors", [answer["error"]]) if "error" in answer else []
    written = [path for path in (Path("job.sbatch"), Path("job.yaml")) if path.exists()]
    assert len(written) == (done.exit_code == 0)
    return done.exit_code, {problem["where"] for problem in problems}


@pytest.mark.parametrize("kind", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("words", "places"),
    [
        (("mlpp", "--data", "digit", "--ds-config", "zero22"), {"MODEL", "--data", "--ds-config"}),
        (("mlp", "--micro-batch", "0", "--steps", "-1"), {"--micro-batch", "--steps"}),
        (("run.yaml",), {"run.yaml:2", "run.yaml:3"}),
        (("lenet", "--data", "pysource", "--global-batch", "7"), {"--data", "--global-batch"}),
        (("mlp", "--ranks", "9"), {"--ranks"}),
        (("gpt2", "--seq-len", "1025"), {"MODEL"}),
        (("mlp", "--fit", "--data", "digit"), {"--data"}),
        (("mlp", "--job-name", "a\nb", "--env", "1x=2", "--data", "digit"), {"--job-name", "--env", "--data"}),
        (("mlp", "--hostfile", "hosts", "--dry-run"), {"--hostfile", "--dry-run"}),
        (("mlp", "--nodes", "1000000000", "--job-name", "a\nb"), {"--nodes and --slots", "--job-name"}),
    ],
)
def test_what_can_never_start_is_refused_with_all_that_is_wrong(kind, words, places):
    assert asked(*kind, *HOSTS, *words) == (2, places)


def test_the_run_and_what_is_missing_are_named_together():
    code, places = asked("mlpp", "--slurm", "job.sbatch", "--nodes", "2")
    assert (code, places) == (2, {"--slots", "--time", "MODEL"})


@pytest.mark.parametrize(
    "words",
    [
        ("mlp", "--data", "imagefolder:/data/of/the/cluster"),
        ("gpt2", "--data", "text:/data/of/the/cluster/*.txt", "--pipeline", "2"),
        ("gpt2", "--fit", "--global-batch", "4"),
        ("hub:org/name",),
        ("dcgan",),
    ],
)
def test_what_only_the_cluster_has_is_not_asked_for(words):
    assert asked(*SLURM, *HOSTS, *words) == (0, set())


@pytest.mark.parametrize(
    "words",
    [
        ("/zerofit/models/mine",),
        ("theirs.yaml",),
        ("own.models:make",),
        ("mlp", "--pretrained", "weights/mlp.pth"),
        ("mlp", "--ds-config", "configs/ds.json"),
    ],
)
def test_files_in_the_image_or_on_the_volume_are_not_looked_for_here(words):
    assert asked(*KUBERNETES, *HOSTS, *words) == (0, set())
    Path("job.yaml").unlink()
    assert asked(*SLURM, *HOSTS, *words)[0] == 2  # all nodes of a Slurm job see the folders of this one


@pytest.mark.parametrize("kind", ["", "no-", "selective-"])
def test_a_switch_is_written_as_it_was_given(kind):
    flag = f"--{kind}activation-checkpointing"
    assert asked(*SLURM, *HOSTS, "gpt2", "--data", "synthetic", flag) == (0, set())
    assert flag in Path("job.sbatch").read_text().split()
