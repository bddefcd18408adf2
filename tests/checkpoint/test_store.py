"""Checkpoints on the disk, without any rank: what is listed, taken, passed over, pruned; what damage is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.made import JOB
from zerofit.checkpoint.store import Manifest, Store, files_of, folder_name, marks_of, verify
from zerofit.models.inputs import ImageInputs


def write(store: Store, step: int) -> Path:
    staging = store.staging_path(step)
    (staging / "state").mkdir(parents=True)
    for name in ("state/model.pt", "state/optimizer.pt", "latest"):
        (staging / name).write_bytes(f"{name} of {step} ".encode() * 50)
    facts = {"samples": step * 4, "world_size": 2, "created": "", "versions": {}, "job": JOB, "figures": {}}
    inputs = ImageInputs(channels=1, size=8, classes=10)
    Manifest(step=step, inputs=inputs, files=marks_of(staging, files_of(staging)), **facts).write(staging)
    return store.make_visible(step)


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        write(made, step)
    return made


def steps(store: Store) -> list[int]:
    return [entry.step for entry in store.entries()]


def test_the_newest_is_taken(store):
    assert steps(store) == [10, 20, 30]
    assert store.newest_complete().step == 30
    assert store.newest_complete().manifest.samples == 120


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "changed": lambda path, other: flip(path),
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "size": lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
    "missing": lambda path, other: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", ["state/model.pt", "latest", "manifest.json"])
def test_damage_is_named_and_passed_over(store, kind, file):
    newest, before = (store.folder / folder_name(step) for step in (30, 20))
    DAMAGE[kind](newest / file, before / file)
    (found,) = verify(newest)
    assert (found.file, found.kind) == (file, "manifest" if file == "manifest.json" else kind)
    passed_over = []
    assert store.newest_complete(passed_over.append).step == 20
    assert [entry.step for entry in passed_over] == [30]
    assert newest.exists()


def test_folders_that_changed_places(store):
    for one, other in (("00000030", "x"), ("00000020", "00000030"), ("x", "00000020")):
        (store.folder / f"step-{one}").rename(store.folder / f"step-{other}")
    assert {d.kind for d in verify(store.folder / folder_name(30))} == {"misplaced"}
    assert store.newest_complete().step == 10


def test_what_a_kill_leaves_is_not_listed(store):
    for name in (".saving-step-00000040", ".leaving-step-00000010"):
        (store.folder / name).mkdir()
        (store.folder / name / "part.pt").touch()
    assert steps(store) == [10, 20, 30]
    store.remove_incomplete()
    assert sorted(path.name for path in store.folder.iterdir()) == [folder_name(step) for step in (10, 20, 30)]


def test_pruning_keeps_the_last_and_every_nth(store):
    for step in (40, 50):
        write(store, step)
    assert [path.name for path in store.prune(keep_last=2, keep_every=20)] == [folder_name(10), folder_name(30)]
    assert steps(store) == [20, 40, 50]


def test_pruning_leaves_damaged_ones_alone(store):
    (store.folder / folder_name(10) / "latest").unlink()
    store.prune(keep_last=1, keep_every=0)
    assert steps(store) == [10, 30]


def test_nothing_is_overwritten(store):
    (store.folder / folder_name(30) / "latest").unlink()
    write(store, 30)
    assert not verify(store.folder / folder_name(30))
    assert (store.folder / f"{folder_name(30)}.put-by-1/state/model.pt").exists()
