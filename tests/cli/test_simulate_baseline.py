"""`zerofit simulate --baseline`: what a change adds, its exit code and its annotation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from zerofit.cli.check_show import workflow_command
from zerofit.cli.main import main

SCRIPT = """\
import torch

model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    x = torch.randn({rows}, 512, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ACTION = Path(__file__).parents[2] / "action.yml"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script of the base prints."""
    with chdir(tmp_path_factory.mktemp("base")):
        done = simulated(1000)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def base(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    (tmp_path / "base.json").write_text(answer)
    return tmp_path / "base.json"


def simulated(rows: int, *more: str) -> Result:
    Path("train.py").write_text(SCRIPT.format(rows=rows))
    words = ["simulate", "--gpus", "1", "--gpu", "l4", "--json", *more, "--", "python", "train.py"]
    return CliRunner().invoke(main, words, catch_exceptions=False)


def against(done: Result) -> dict:
    return json.loads(done.stdout.splitlines()[-1])["against"]


def test_a_change_is_held_against_its_base(base):
    more = simulated(2000, "--baseline", "base.json")
    found = against(more)
    before = json.loads(base.read_text().splitlines()[-1])
    assert more.exit_code == 1 and found["exceeded"] and not found["no_longer_fits"]
    assert found["base_bytes"] == before["peak_bytes"] and found["added_bytes"] >= 1000 * 512 * 4
    assert more.stderr.splitlines()[-1].startswith(
        "::error file=train.py,line=7,title=zerofit simulate::this change adds"
    )
    assert "%25" in more.stderr and "at train.py:7 in" in found["because"]
    allowed = simulated(2000, "--baseline", "base.json", "--fail-above", "90%")
    assert allowed.exit_code == 0 and "::notice file=train.py" in allowed.stderr
    same = simulated(1000, "--baseline", "base.json", "--fail-above", "0%")
    assert same.exit_code == 0 and against(same)["because"].startswith("the peak is unchanged")


def test_what_no_longer_fits_fails_whatever_is_allowed(base):
    lost = simulated(8_000_000, "--baseline", "base.json", "--fail-above", "1e9%")
    assert lost.exit_code == 1 and "and no longer fits on l4" in against(lost)["because"]


def test_baselines_that_cannot_be_compared(base):
    def refused(*words: str) -> dict:
        done = simulated(1000, *words)
        assert done.exit_code == 2
        return json.loads(done.stdout.splitlines()[-1])["error"]

    assert "cannot read nowhere.json: No such file" in refused("--baseline", "nowhere.json")["message"]
    assert refused("--fail-above", "2%")["message"] == "--fail-above needs --baseline"
    base.write_text(json.dumps({"fits": True}))
    assert refused("--baseline", "base.json")["message"] == "cannot read base.json: it contains no simulation"
    base.write_text(json.dumps({"device": "l4", "world_size": 1, "rank": 0, "peak_bytes": "1", "fits": True}))
    assert "must be a positive number of bytes" in refused("--baseline", "base.json")["message"]
    other = {"device": "a100-80gb", "world_size": 1, "rank": 0, "peak_bytes": 1, "fits": True}
    base.write_text(json.dumps(other))
    assert "device a100-80gb, but this simulation has l4" in refused("--baseline", "base.json")["message"]


@pytest.mark.slow
def test_the_action_runs_what_it_is_told(base):
    """Its last step in bash, with a `zerofit` that is this one: the change fails, and its answer is written."""
    program = base.parent / "bin" / "zerofit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m zerofit.cli "$@"\n')
    program.chmod(0o755)
    action = yaml.safe_load(ACTION.read_text())
    Path("train.py").write_text(SCRIPT.format(rows=2000))
    given = {"command": "python train.py", "gpu": "l4", "gpus": "1", "baseline": "base.json", "options": "--steps 3"}
    inputs = {name: given.get(name, one.get("default", "")) for name, one in action["inputs"].items()}
    step = action["runs"]["steps"][-1]
    names = {name: value.removeprefix("${{ inputs.").removesuffix(" }}") for name, value in step["env"].items()}
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **paths, **{name: inputs[of] for name, of in names.items()}}
    done = subprocess.run(["bash", "-c", step["run"]], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "::error file=train.py,line=7" in done.stderr
    written = json.loads(Path("zerofit.json").read_text().splitlines()[-1])
    assert written["against"]["exceeded"] and {p["step"] for p in written["phases"]} == {-1, 0, 1, 2}


def test_a_command_of_github_keeps_its_fields_apart():
    said = workflow_command("error", "100% of\nit: a, b", file="a,b:[c].py", line=3)
    assert said == "::error file=a%2Cb%3A[c].py,line=3::100%25 of%0Ait: a, b"
