"""`zerofit ckpt` on a run's folder of made checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from tests.checkpoint.made import Made, make
from zerofit.checkpoint.conversion import ConvertResult
from zerofit.cli.ckpt import show_converted
from zerofit.cli.main import main
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.run import Run

INPUTS = ImageInputs(channels=1, size=8, classes=10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder with the checkpoints of steps 1, 2 and 3, of which each moves every weight by 1."""
    folder = tmp_path_factory.mktemp("run")
    model = build(find("mlp"), INPUTS, {"hidden": 4})
    state = model.state_dict()
    for step in (1, 2, 3):
        run = Run(model="mlp", model_args={"hidden": 4}, data="digits", precision="fp32", optimizer="adamw")
        what = Made(model=model, run=run, task="image", inputs=INPUTS, step=step)
        make(folder, what, lambda name, kind, _, step=step: state[name] + step)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def zerofit(*args, code=0):
    done = CliRunner().invoke(main, ["ckpt", *map(str, args), "--json"])
    assert done.exit_code == code, done.output
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    shown = CliRunner().invoke(main, ["ckpt", *map(str, args)])  # for people, now perhaps with the output there
    assert "Traceback" not in shown.output
    return answer


def step(run, number):
    return run / "checkpoints" / f"step-{number:08}"


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_ls_says_which_are_whole(run):
    (step(run, 2) / "ranks" / "rank-00001.json").unlink()
    damage(step(run, 3) / "state" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    rows = zerofit("ls", run)["checkpoints"]
    assert [(row["step"], row["samples"], row["whole"]) for row in rows] == [(1, 4, True), (2, 8, False), (3, 12, True)]
    assert rows[1]["problems"] == [{"file": "ranks/rank-00001.json", "kind": "missing", "message": ""}]
    assert rows[0]["layout"]["zero_stage"] == 2 and rows[0]["bytes"] > 3000
    assert [row["whole"] for row in zerofit("ls", run / "checkpoints", "--deep")["checkpoints"]] == [True, False, False]


def test_show_names_what_it_is_of(run):
    shown = zerofit("show", run)
    assert (shown["step"], shown["model"], shown["precision"], shown["world_size"]) == (3, "mlp", "fp32", 2)
    assert shown["parameters"] == 64 * 4 + 4 + 40 + 10


def test_verify(run):
    assert zerofit("verify", step(run, 2)) == {"path": str(step(run, 2)), "step": 2, "ok": True, "problems": []}
    name = "state/mp_rank_00_model_states.pt"
    damage(step(run, 3) / name)
    found = zerofit("verify", run, code=2)
    assert (found["step"], found["ok"]) == (3, False)
    assert [(p["file"], p["kind"]) for p in found["problems"]] == [(name, "changed")]
    (step(run, 1) / "manifest.json").unlink()
    assert zerofit("verify", step(run, 1), code=2)["problems"][0]["kind"] == "manifest"


def test_export_takes_the_newest_that_is_whole(run, tmp_path):
    damage(step(run, 3) / "state" / "mp_rank_00_model_states.pt")
    done = zerofit("export", run, tmp_path / "out", "--dtype", "bf16")
    assert done == {
        "out": str(tmp_path / "out"),
        "files": ["model.safetensors", "zerofit.json"],
        "parameters": 310,
        "dtype": "bf16",
    }
    assert json.loads((tmp_path / "out" / "zerofit.json").read_text())["step"] == 2
    error = zerofit("export", step(run, 3), tmp_path / "other", code=2)["error"]
    assert error["kind"] == "damaged-checkpoint" and "mp_rank_00" in error["message"]
    assert zerofit("export", run, tmp_path / "out", code=2)["error"]["kind"] == "output-exists"
    assert zerofit("export", run, tmp_path / "x", "--max-shard-size", "much", code=2)["error"]["kind"] == "bad-size"


def test_convert(run, tmp_path):
    done = zerofit("convert", run, tmp_path / "out")
    assert done["tag"] == "step-00000003" and done["parameters"] == 310 and done["bytes"] == 310 * 4 * 3


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("config.json", "from_pretrained(folder)"),
        ("adapter_config.json", "PeftModel.from_pretrained(model, folder)"),
        ("model.safetensors", "load_state_dict(safetensors.torch.load_file"),
    ],
)
def test_how_to_load_converted_weights(tmp_path, capsys, file, how):
    (tmp_path / file).touch()
    show_converted(ConvertResult(out=tmp_path, tag="", parameters=1, bytes=4, format="hf"))
    assert how in "".join(capsys.readouterr().out.split("\n"))


def test_diff(run):
    assert zerofit("diff", step(run, 1), step(run, 1), "--states")["equal"] is True
    found = zerofit("diff", step(run, 1), run, code=1)
    assert (found["equal"], found["compared"], found["identical"]) == (False, 4, 0)
    assert found["max_abs"] == pytest.approx(2.0, abs=1e-6) and found["tensors"][0]["apart"] > 0


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("show", "nowhere"), "no-checkpoint"),
        (("ls", "."), "no-checkpoint"),
        (("export", "nowhere", "out"), "no-checkpoint"),
        (("diff", "nowhere", "nowhere"), "no-checkpoint"),
        (("convert", "nowhere", "out"), "no-checkpoint"),
        (("verify", "nowhere"), "no-checkpoint"),
    ],
)
def test_a_path_without_checkpoints(args, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = zerofit(*args, code=2)["error"]
    assert error["kind"] == kind and error["hint"]
