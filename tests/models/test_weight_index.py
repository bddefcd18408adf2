"""Names of files of weights that an index gives: none leaves the model's folder, for whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerofit.app.job.hub_models import missing_files
from zerofit.infer.saved_model import read_weights
from zerofit.models.catalog import ModelError, find, weight_names
from zerofit.spec.errors import UserError
from zerofit.spec.foreign import Unreadable

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's folder, whose weights are in one shard, and a file of weights outside of it."""
    path = tmp_path / "repository" / "snapshots" / "revision"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "pytorch_model-0.bin").touch()  # a pretrained folder
    for name in (path / "model-1.safetensors", tmp_path / "outside.safetensors"):
        save_file({"a": torch.ones(2)}, name)
    return path


def write_index(folder: Path, name: object, kind: str = "model.safetensors") -> None:
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


def test_names_in_the_folder(folder):
    write_index(folder, "model-1.safetensors")
    assert weight_names(folder) == ["model-1.safetensors"]
    assert read_weights(folder).tensors["a"].shape == (2,)
    assert find(str(folder)).origin == "pretrained folder"
    assert missing_files(folder) == []


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "name",
    [
        *("../../../outside.safetensors", "a/../../../../outside.safetensors", "..", ".", "", "model\n.bin"),
        *("{}/outside.safetensors", "link.safetensors", "linked/outside.safetensors", 5, None, ["a"], {"b": "c"}),
    ],
)
def test_names_that_leave_the_folder(folder, tmp_path, name, kind):
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    write_index(folder, name.format(tmp_path) if isinstance(name, str) else name, kind)
    with pytest.raises(Unreadable):
        weight_names(folder)
    with pytest.raises(UserError) as error:
        read_weights(folder)
    assert [one.kind for one in error.value.problems] == ["weights-damaged"]
    with pytest.raises(ModelError) as refused:
        find(str(folder))
    assert refused.value.kind == "model-weights" and str(folder) in refused.value.message
    assert len(missing_files(folder)) == 1


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": []}', "[" * 10**5, "\0"])
def test_what_is_no_index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(Unreadable):
        weight_names(folder)


def test_the_hubs_cache_is_links_to_blobs(folder, tmp_path):
    blobs = tmp_path / "repository" / "blobs"
    blobs.mkdir()
    (folder / "model-1.safetensors").rename(blobs / "9f2a")
    (folder / "model-1.safetensors").symlink_to("../../blobs/9f2a")
    (blobs / "5c").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (folder / "model.safetensors.index.json").symlink_to("../../blobs/5c")
    assert weight_names(folder) == ["model-1.safetensors"]
    (tmp_path / "by-link").symlink_to(folder)
    assert weight_names(tmp_path / "by-link") == ["model-1.safetensors"]
    assert read_weights(tmp_path / "by-link").tensors["a"].shape == (2,)


def test_one_file_that_is_a_link_out_of_the_folder(folder, tmp_path):
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(Unreadable, match="outside the folder"):
        weight_names(folder)
