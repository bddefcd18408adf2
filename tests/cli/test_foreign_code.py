"""Run folders, checkpoints, models and profiles of somebody else, given to every command: no code that they name runs.

The module that they name leaves a file when it is imported, in this process or in one that a command starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.checkpoint.made import JOB, Made, make
from tests.plan.stub import make_profile
from tests.report.test_traces import event
from zerofit.app.fitting.fit import read_choice
from zerofit.app.job.requests import as_request, read_request
from zerofit.app.planning.corrections import calibrated
from zerofit.checkpoint.model_folder import ModelInfo
from zerofit.cli.main import main
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.named_code import unrelated_modules
from zerofit.spec.profiling import STEP_MARK
from zerofit.spec.run import Run, load_run
from zerofit.spec.run_folder import FittedLayout, RunFolder

IMAGES = ImageInputs(channels=1, size=8, classes=10)
MODULE = "foreign_module"
CODE = "import pathlib\npathlib.Path(__file__).with_name('RAN').touch()\ndef make(**arguments): ...\n"
ALONE = "--no-ssh --nodes 1 --slots 1 --node-rank 0 --master-addr 127.0.0.1"

# command -> its ways to be given what somebody else has made: {run}, {step} (its checkpoint), {model}, {profile}
WAYS: dict[str, list[str]] = {
    "check": ["{run}/ds_config.json", "{run}/run.json"],
    "ckpt convert": ["{run} out"],
    "ckpt diff": ["{run} {step}"],
    "ckpt export": ["{run} out", "{step} out --merge", "{model} out --merge"],
    "ckpt ls": ["{run}"],
    "ckpt show": ["{run}"],
    "ckpt verify": ["{step}"],
    "compare all": ["{model} --ranks 1"],
    "compare batch-size": ["{model}", "{run}/run.json"],
    "compare scaling": ["{model} --steps 2"],
    "compare strategies": ["{model} --ranks 2 --steps 2", "{run} --ranks 2 --steps 2"],
    "data": ["{run}/run.json"],
    "eval": ["{run} --data digits", "{step} --data digits", "{model} --data digits"],
    "explain": ["{run}", "{run} --gpu h100-80gb --gpus 1", "{run}/run.json"],
    "generate": ["{run} --prompt a", "{model} --prompt a"],
    "launch": [f"{what} {ALONE}" for what in ("{run}", "{run}/run.json", "{model}")],
    "models": ["{run} {model}"],
    "plan": ["{run}/run.json", "{model} --gpu cpu", "--profile {profile} --gpu h100-80gb --confirm 1 --write out"],
    "plot": ["{run}"],
    "replay": ["{run}"],
    "report": ["{run}", "{run}/run.json"],
    "simulate": ["{run}", "{run}/run.json", "{model}", "{copy} --ranks 1"],
    "train": ["{run}", "{run}/run.json", "{model}", "{copy}"],
    "tune": ["{run}", "{run}/run.json", "{model}"],
}
NOTHING_READ = {"calibrate", "doctor", "mcp", "schema"}  # they take no name of a run, a model or a folder
RUNS = {"launch", "simulate", "train", "tune"}  # what a run.json asks for


def commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Return all commands with their names, those of groups among them."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def test_every_command_is_here():
    found = dict(commands(main))
    assert found.keys() == WAYS.keys() | NOTHING_READ, "say how a command is given somebody else's files"
    for name in NOTHING_READ:
        assert not [one for one in found[name].params if isinstance(one, click.Argument)]


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of processes that a command starts
    return tmp_path / "RAN"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of everything that a run leaves, whose model and callbacks are code."""
    folder = tmp_path_factory.mktemp("foreign")
    state = build(find("mlp"), IMAGES, {"hidden": 4}).state_dict()
    run = Run(model=f"{MODULE}:make", model_args={"a": 1}, data="digits", callbacks=(f"{MODULE}:Watch",), steps=1)
    of = Made(model=build(find("mlp"), IMAGES, {"hidden": 4}), run=run, task="image", inputs=IMAGES)
    make(folder / "run", of, lambda name, *_: state[name])
    replace(JOB, run=run).write(RunFolder(folder / "run"), {})
    model = folder / "run" / "model"
    model.mkdir()
    save_file({"weight": torch.zeros(2)}, model / "model.safetensors")
    ModelInfo.of_run(run, "image", IMAGES, step=1, dtype="float32").write(model)
    (folder / "profile.json").write_text(json.dumps(replace(make_profile(), model=f"{MODULE}:make").as_dict()))
    (folder / "copy" / "deep").mkdir(parents=True)
    (folder / "copy" / "run.json").write_bytes((folder / "run" / "run.json").read_bytes())  # all else left out
    return folder


def places(made: Path) -> dict[str, str]:
    (step,) = (made / "run" / "checkpoints").iterdir()
    paths = {"run": made / "run", "step": step, "model": made / "run" / "model", "profile": made / "profile.json"}
    return {name: str(path) for name, path in (paths | {"copy": made / "copy" / "run.json"}).items()}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in WAYS.items() for way in ways])
def test_no_command_runs_it(made, marker, name, way):
    words = [*name.split(), *way.format(**places(made)).split(), "--json"]
    done = CliRunner().invoke(main, words)
    assert not marker.exists()
    assert done.exit_code != 70, done.output
    if name in RUNS:
        assert done.exit_code == 2, done.output
        answer = json.loads(done.stdout.splitlines()[-1])
        errors = answer.get("errors", [answer["error"]])
        model = [one for one in errors if one["kind"] == "untrusted-model"]
        assert len(model) == 1 and f"module {MODULE}" in model[0]["message"] and "make(a=1)" in model[0]["message"]
        callbacks = [] if way.startswith("{model}") else ["untrusted-callback"]
        assert [one["kind"] for one in errors if one not in model] == callbacks
        assert all("--trust-model-code" in one["hint"] for one in errors)


def test_a_trace_in_such_a_folder(made, marker):
    """Its model would be built, to know which forecasts its kernels belong to."""
    path = RunFolder(made / "run").rank_trace(0, 1)
    path.parent.mkdir()
    path.write_text(json.dumps({"traceEvents": [event(f"{STEP_MARK}1", "user_annotation", 0, 100)]}))
    with pytest.raises(UserError, match=f"module {MODULE}"):
        calibrated(path, Cluster("cpu", gpus=1), None, Reporter())
    assert not marker.exists()


def test_files_of_run_folders_however_they_are_reached(made, tmp_path):
    """run.json by its name, also alone; any file that lies in a run folder; links to them."""
    run = made / "run"
    beside = run / "logs" / "mine.yaml"
    beside.parent.mkdir()
    beside.write_text(f"callbacks: ['{MODULE}:Watch']\n")
    link, folder = tmp_path / "mine.json", tmp_path / "folder"
    link.symlink_to(made / "copy" / "run.json")
    folder.symlink_to(run)
    for file in (run / "run.json", beside, link, folder / "run.json", made / "copy" / "deep" / ".." / "run.json"):
        for load in (
            lambda file=file: load_run(file, {}),
            lambda file=file: Run.load(file),
            lambda file=file: as_request(file),
        ):
            with pytest.raises(UserError) as error:
                load()
            assert {one.kind for one in error.value.problems} <= {"untrusted-model", "untrusted-callback"}


@pytest.mark.parametrize(
    ("model", "name", "refused"),
    [
        ("mlp", "torch.nn.Linear", False),
        ("mlp", f"{MODULE}.Linear", True),
        ("mlp", "torchish.nn.Linear", True),
        ("mlp", MODULE, True),
        ("mlp", 5, True),
        (f"{MODULE}:make", f"{MODULE}.layers.Linear", False),
        (f"{MODULE}:make", "os.Linear", True),
    ],
)
def test_modules_that_a_deepspeed_json_names(model, name, refused):
    """DeepSpeed would import them."""
    found = unrelated_modules({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": [name]}}, model)
    assert [one.kind for one in found] == ["unrelated-module"] * refused


def test_a_module_in_a_run_files_json_is_not_imported(marker):
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": [f"{MODULE}.Linear"]}
    run = {"model": "mlp", "data": "digits", "ds_config": {"torch_autocast": autocast}, "ranks": 1, "steps": 1}
    Path("own.json").write_text(json.dumps(run))
    done = CliRunner().invoke(main, ["simulate", "own.json", "--json"])
    assert done.exit_code == 2 and "unrelated-module" in done.stdout, done.output
    assert not marker.exists()


def test_what_the_user_names_is_trusted(made, tmp_path):
    own = tmp_path / "run.yaml"
    own.write_text(f"model: {MODULE}:make\ncallbacks: ['{MODULE}:Watch']\n")
    assert read_request(str(own), {}).run.model == f"{MODULE}:make"
    assert read_request(f"{MODULE}:make", {"callbacks": ("a:B",)}).run.callbacks == ("a:B",)
    run = str(made / "run")
    trusted = read_request(run, {}, trust_model_code=True).run
    assert (trusted.model, trusted.callbacks) == (f"{MODULE}:make", (f"{MODULE}:Watch",))
    assert Run.load(made / "run" / "run.json", trust_model_code=True).model == f"{MODULE}:make"
    with pytest.raises(UserError) as error:  # a flag is the user's word for its own field alone
        read_request(run, {"callbacks": ("a:B",)})
    assert [one.kind for one in error.value.problems] == ["untrusted-model"]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [({}, {"callbacks": ["os:system"]}), ({"model": "os:system"}, {}), ({}, {"ranks": "many"}), ({}, {"output": "/"})],
)
def test_a_kept_choice_of_fit_names_layouts_alone(tmp_path, given, chosen):
    folder, whole = RunFolder(tmp_path), {"ranks": 1, "global_batch": 4, "ds_config": {}}
    choice = FittedLayout(given={}, chosen=whole, why=("so",), reserved_bytes=1)
    replace(JOB, fit=choice).write(folder, {})
    assert read_choice(folder) == choice
    replace(JOB, fit=replace(choice, given=given, chosen=whole | chosen)).write(folder, {})
    assert read_choice(folder) is None
