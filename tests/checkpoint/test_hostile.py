"""Files that somebody forged: whatever they say, a UserError, and nothing outside the folders that were named."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.made import Made, make
from zerofit.app.checkpoints import Checkpoint
from zerofit.checkpoint.full_state import FullState
from zerofit.checkpoint.model_folder import ModelInfo, read_model_info
from zerofit.checkpoint.store import (
    MANIFEST,
    ManifestError,
    checksum_of,
    files_of,
    mark_of,
    marks_of,
    quick_look,
    read_manifest,
)
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.errors import UserError
from zerofit.spec.run import Run

IMAGES = ImageInputs(channels=1, size=8, classes=10)
INDEX = "ranks/rank-00000.json"
NAME = "hidden.1.weight"
FREELY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS | st.sampled_from(["..", "/etc", "a/b", "fp32", "image", 2**80, -1, "os:system"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of one rank."""
    model = build(find("mlp"), IMAGES, {"hidden": 4})
    state = model.state_dict()
    made = Made(
        model=model, run=Run(model="mlp", model_args={"hidden": 4}, data="digits"), task="image", inputs=IMAGES, ranks=1
    )
    return make(tmp_path_factory.mktemp("run"), made, lambda name, *_: state[name])


@pytest.fixture
def checkpoint(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def forge(checkpoint: Path, content: Any) -> None:
    """Write a manifest whose checksum is right, whatever it says."""
    content = {**content, "checksum": checksum_of(content)} if isinstance(content, dict) else content
    (checkpoint / MANIFEST).write_text(json.dumps(content))


def told(checkpoint: Path, file: str = MANIFEST) -> Any:
    content = json.loads((checkpoint / file).read_text())
    content.pop("checksum", None)
    return content


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def changed(content: Any, place: tuple[Any, ...], value: Any, drop: bool) -> Any:
    if not place:
        return value
    content = copy.deepcopy(content)
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    if drop:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return content


def used(checkpoint: Path, out: Path) -> None:
    """All that is done with a checkpoint; a refusal is well."""
    for work in (
        lambda: Checkpoint.list(checkpoint).to_dict(),
        lambda: Checkpoint(checkpoint).describe().to_dict(),
        lambda: Checkpoint(checkpoint).verify().to_dict(),
        lambda: Checkpoint(checkpoint).diff(checkpoint, states=True).to_dict(),
        lambda: Checkpoint(checkpoint).export(out / "exported"),
        lambda: Checkpoint(checkpoint).convert(out / "converted"),
    ):
        with suppress(UserError):
            work()


@FREELY
@given(content=JSON)
def test_a_manifest_of_any_json(tmp_path, content):
    forge(tmp_path, content)
    with pytest.raises(ManifestError):
        read_manifest(tmp_path)
    assert [d.kind for d in quick_look(tmp_path)[1]] == ["manifest"]


@FREELY
@given(data=st.data(), value=JSON, drop=st.booleans())
def test_a_manifest_with_one_thing_changed(whole, tmp_path_factory, data, value, drop):
    """Read, listed and described; the work with tensors is done below for names that would matter."""
    folder = tmp_path_factory.mktemp("forged")
    content = told(whole)
    forge(folder, changed(content, data.draw(st.sampled_from(places(content))), value, drop))
    for work in (Checkpoint(folder).describe, Checkpoint(folder).verify, lambda: Checkpoint.list(folder)):
        with suppress(UserError):
            json.dumps(work().to_dict())


@FREELY
@given(data=st.data(), value=JSON, drop=st.booleans())
def test_an_index_with_one_thing_changed(whole, tmp_path_factory, data, value, drop):
    checkpoint = Path(shutil.copytree(whole, tmp_path_factory.mktemp("forged") / whole.name))
    content = told(checkpoint, INDEX)
    (checkpoint / INDEX).write_text(
        json.dumps(changed(content, data.draw(st.sampled_from(places(content))), value, drop))
    )
    with suppress(UserError):
        state = FullState(checkpoint)
        for name in state.tensors:
            for kind in state.kinds(name):
                state.read(name, kind)


@FREELY
@given(data=st.data(), value=JSON, drop=st.booleans())
def test_zerofit_json_with_one_thing_changed(tmp_path, data, value, drop):
    run = Run(model="mlp", model_args={"hidden": 4}, data="digits")
    ModelInfo.of_run(run, "image", IMAGES, 1, "float32").write(tmp_path)
    content = told(tmp_path, "zerofit.json")
    place = data.draw(st.sampled_from(places(content)))
    (tmp_path / "zerofit.json").write_text(json.dumps(changed(content, place, value, drop)))
    try:
        read_model_info(tmp_path)
    except UserError as error:
        assert error.problems[0].kind == "bad-about"


@pytest.mark.parametrize("name", ["/elsewhere", "../../../elsewhere", "..", "a/../../../b", "x\n", ""])
@pytest.mark.parametrize("what", ["parameter", "kind", "tie", "buffer"])
def test_names_that_lead_out_of_the_output(checkpoint, tmp_path, name, what):
    if name.startswith("/"):
        name = str(tmp_path / "elsewhere")
    index = told(checkpoint, INDEX)
    engine = index["engines"]["state"]
    (entry,) = (entry for entry in engine["parameters"] if entry["name"] == NAME)
    if what == "parameter":
        entry["name"] = name
        engine["names"][engine["names"].index(NAME)] = name
    elif what == "kind":
        for one in engine["parameters"]:
            one["where"][name] = one["where"]["exp_avg"]
    elif what == "tie":
        engine["ties"][name] = NAME
    else:
        engine["buffers"].append({"name": name, "file": "state/mp_rank_00_model_states.pt", "keys": ["module", NAME]})
    resealed(checkpoint, index)
    with pytest.raises(UserError, match="is not complete"):
        Checkpoint(checkpoint).convert(tmp_path / "out" / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.name]


def resealed(checkpoint: Path, index: Any) -> None:
    """Write an index, and the manifest that goes with it."""
    (checkpoint / INDEX).write_text(json.dumps(index))
    manifest = told(checkpoint)
    manifest["files"][INDEX] = vars(mark_of(checkpoint / INDEX))
    forge(checkpoint, manifest)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../etc/passwd", "state/../../x", ".."])
def test_files_outside_of_the_checkpoint_are_not_looked_at(checkpoint, tmp_path, name):
    manifest = told(checkpoint)
    manifest["files"][name] = {"bytes": 1, "xxh3_128": "0"}
    forge(checkpoint, manifest)
    (found,) = Checkpoint(checkpoint).verify().problems
    assert found.kind == "manifest" and "outside the checkpoint" in found.message
    used(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_as_deep_as_json_can_be(tmp_path):
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path)


def test_torch_files_that_say_something_else(checkpoint, tmp_path):
    for file in (checkpoint / "state").iterdir():
        torch.save({"state": {}, "param_groups": 3}, file)
    manifest = told(checkpoint)
    manifest["files"] = {name: vars(mark) for name, mark in marks_of(checkpoint, files_of(checkpoint)).items()}
    forge(checkpoint, manifest)
    assert Checkpoint(checkpoint).verify().ok
    used(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "converted").exists()
