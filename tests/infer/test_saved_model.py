"""What a folder holds, and what is wrong with it, before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tests.infer.small import save, save_small
from zerofit.infer.evaluate import scratch_folder
from zerofit.infer.saved_model import find_folder as find
from zerofit.infer.saved_model import is_checkpoint, open_saved, read_weights
from zerofit.models.inputs import ImageInputs, TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter


def find_folder(path):
    return find(path, Reporter())


def kinds(work) -> list[str]:
    with pytest.raises(UserError) as wrong:
        work()
    return [p.kind for p in wrong.value.problems]


def test_a_runs_folder_means_its_model(tmp_path):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "model", "lenet")
    assert find_folder(tmp_path / "run") == tmp_path / "run" / "model"
    assert find_folder(tmp_path / "run" / "model") == tmp_path / "run" / "model"
    assert not is_checkpoint(tmp_path / "run" / "model")
    saved = open_saved(tmp_path / "run" / "model")
    assert (saved.task, saved.inputs.classes, saved.info.step, saved.weights.dtype) == ("image", 8, 7, torch.float32)


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_no_model(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert kinds(lambda: find_folder(tmp_path / name)) == ["no-model"]


def test_a_folder_of_transformers_alone(tmp_path):
    """Without zerofit.json the config says what it takes."""
    save_small(tmp_path / "text", "gpt2")
    save_small(tmp_path / "image", "vit")
    for folder in ("text", "image"):
        (tmp_path / folder / "zerofit.json").unlink()
    text, image = open_saved(tmp_path / "text"), open_saved(tmp_path / "image")
    assert (text.task, text.inputs, text.longest) == ("causal-lm", TextInputs(vocab_size=100, seq_len=32), 32)
    assert (image.inputs, image.longest) == (ImageInputs(channels=3, size=32, classes=8), None)


def test_weights_without_a_word_of_what_they_are(tmp_path):
    save(tmp_path / "model", "lenet")
    (tmp_path / "model" / "zerofit.json").unlink()
    assert kinds(lambda: open_saved(tmp_path / "model")) == ["no-model"]


def test_a_file_cut_short(tmp_path):
    save_small(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    for part in (whole[:-1], whole[:200], whole[:5], whole + b"x", b""):
        file.write_bytes(part)
        assert kinds(lambda: read_weights(tmp_path / "model")) == ["weights-damaged"]


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"{", b'{"a": {"data_offsets": []}}']
)
def test_a_header_that_is_none(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-damaged"]


def test_every_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-missing"] * 2
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-damaged"]


def test_a_config_without_weights(tmp_path):
    save_small(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert kinds(lambda: open_saved(find_folder(tmp_path / "model"))) == ["weights-missing"]


class Sneaky:
    """Runs code where it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


def test_a_pickle_runs_nothing(tmp_path):
    save_small(tmp_path / "model", "gpt2")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"a": Sneaky(tmp_path / "trace")}, tmp_path / "model" / "pytorch_model.bin")
    assert kinds(lambda: open_saved(tmp_path / "model")) == ["unsafe-file"]
    assert not (tmp_path / "trace").exists()
    torch.save([torch.ones(3)], tmp_path / "model" / "pytorch_model.bin")
    assert kinds(lambda: open_saved(tmp_path / "model")) == ["weights-damaged"]


def test_a_scratch_folder_goes_and_the_users_stays(tmp_path):
    with scratch_folder(tmp_path / "mine") as scratch:
        (scratch / "weights").touch()
        assert scratch.parent == tmp_path / "mine"
    assert not list((tmp_path / "mine").iterdir())
    with pytest.raises(UserError, match="cannot write to"), scratch_folder(Path("/proc/nowhere")):
        pass


def test_a_folder_with_the_name_of_a_model(tmp_path, monkeypatch):
    save_small(tmp_path / "gpt2", "gpt2")
    monkeypatch.chdir(tmp_path)
    assert open_saved(Path("gpt2")).longest == 32  # the preset's is 1024


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [True, 2]},
        {"shape": [2.0]},
        {"shape": [2**62, 8]},
        {"shape": None},
        {"dtype": "F16"},
        {"dtype": "X9"},
        {"data_offsets": [8, 0]},
        {"data_offsets": [-8, 8]},
        {"data_offsets": [0, 16]},
        {"data_offsets": [4, 8]},
        {"data_offsets": [0, 8, 16]},
        {"other": {**GOOD, "data_offsets": [0, 8]}},
        {"other": {**GOOD, "data_offsets": [4, 12]}},
        {"other": {**GOOD, "data_offsets": [12, 20]}},
    ],
)
def test_headers_that_lie(tmp_path, lie):
    """Each is refused by the library's own loader, too; 8 to 20 bytes follow, as far as the header says."""
    header = {"a": GOOD | lie}
    if "other" in lie:
        header = {"a": GOOD, "b": lie["other"]}
    text = json.dumps(header).encode()
    end = max([8, *(max(one["data_offsets"]) for one in header.values())])
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-damaged"]
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "model.safetensors", framework="pt")


def test_a_name_that_a_header_gives_twice(tmp_path):
    """The library's loader takes the last one, others the first."""
    one, other = (json.dumps({"a": GOOD | {"shape": shape}})[1:-1] for shape in ([2], [1, 2]))
    text = f"{{{one}, {other}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-damaged"]


def test_a_tensor_in_two_shards(tmp_path):
    for name in ("one", "two"):
        save_file({"a": torch.ones(2), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kinds(lambda: read_weights(tmp_path)) == ["weights-damaged"]
