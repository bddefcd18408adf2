"""Checkpoints and model folders of somebody else: no code of theirs runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.made import Made, make
from tests.cli.asking import answer
from zerofit.checkpoint.model_folder import ModelInfo
from zerofit.models.build import build
from zerofit.models.catalog import ModelError, find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.run import Run

IMAGES = ImageInputs(channels=1, size=8, classes=10)


def command(folder: Path) -> Run:
    """A run whose model is a shell command."""
    return Run(model="os:system", model_args={"command": f"touch {folder / 'PWNED'}"}, data="digits")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    model = build(find("mlp"), IMAGES, {"hidden": 4})
    state = model.state_dict()
    made = Made(model=model, run=command(tmp_path), task="image", inputs=IMAGES)
    return make(tmp_path / "run", made, lambda name, *_: state[name])


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    ModelInfo.of_run(command(tmp_path), "image", IMAGES, step=1, dtype="float32").write(path)
    return path


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("words", [("ckpt", "export", "checkpoint", "out"), ("eval", "checkpoint"), ("eval", "folder")])
def test_a_command_as_the_model(checkpoint, folder, tmp_path, words, trusted):
    paths = {"checkpoint": checkpoint, "folder": folder, "out": tmp_path / "out"}
    words = [paths.get(word, word) for word in words]
    if trusted:  # then it does run, and what it gives is not a model
        assert "not a torch.nn.Module" in answer(*words, "--trust-model-code", code=2)["error"]["message"]
        assert (tmp_path / "PWNED").exists()
        return
    error = answer(*words, code=2)["error"]
    assert error["kind"] == "untrusted-model" and "--trust-model-code" in error["hint"]
    for part in ("module os", "system", f"command='touch {tmp_path / 'PWNED'}'"):
        assert part in error["message"]
    assert not (tmp_path / "PWNED").exists() and not (tmp_path / "out").exists()


def test_generate_asks_too(checkpoint, tmp_path):
    error = answer("generate", checkpoint, "--prompt", "a", code=2)["error"]
    assert error["kind"] == "untrusted-model"
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "name", ["os:system\n", "..os:system", "os.:system", ".os:path.join", "os:", "a.1b:c", "a b:c"]
)
def test_names_that_are_no_module_and_callable(name):
    with pytest.raises(ModelError, match=r"unknown model|model file or folder"):
        find(name)
