from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from zerofit.data.imagefolder import ImageFile
from zerofit.data.loader import Order, default_workers, eval_batches, micro_batches

CLASSES = ("cat", "dog", "eel")


def paint(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    for i in range(30):
        paint(tmp_path / "pics" / CLASSES[i % 3] / f"{i:02}.png", i)
    return tmp_path / "pics"


@pytest.fixture
def broken(folder):
    """One file cut in the middle, one that is no image."""
    whole = (folder / "cat" / "03.png").read_bytes()
    (folder / "cat" / "03.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "99.jpg").write_text("not an image")
    return folder


def test_a_tenth_is_held_out(folder, opened):
    data = opened("image", data=f"imagefolder:{folder}", image_size=32)
    assert (len(data.train), len(data.valid)) == (27, 3)
    assert not set(data.train.files) & set(data.valid.files)
    assert data.inputs.classes == 3 and data.inputs.channels == 3 and data.inputs.size == 32
    for name, label in zip(data.train.files, data.train.labels, strict=True):
        assert CLASSES.index(name.split("/")[0]) == label
    batch = data.train.batch([0, 5], [1, 2])
    assert batch["inputs"].shape == (2, 3, 32, 32) and batch["inputs"].dtype == torch.float32
    assert opened("image", data=f"imagefolder:{folder}").inputs.size == 224


def test_train_and_val_folders(tmp_path, opened, refused):
    for i in range(6):
        paint(tmp_path / "train" / CLASSES[i % 2] / f"{i}.png", i)
    paint(tmp_path / "val" / "dog" / "9.png", 9)
    data = opened("image", data=f"imagefolder:{tmp_path}", image_size=16)
    assert (len(data.train), len(data.valid)) == (6, 1) and data.valid.labels.tolist() == [1]
    paint(tmp_path / "val" / "yak" / "9.png", 9)
    (problem,) = refused("image", data=f"imagefolder:{tmp_path}", image_size=16)
    assert problem.kind == "unknown-class" and "yak" in problem.message


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "validation"), ("TRAIN", "dev")])
def test_splits_are_no_classes_whatever_they_are_called(tmp_path, opened, names):
    for i in range(4):
        paint(tmp_path / names[i // 2] / CLASSES[i % 2] / f"{i}.png", i)
    data = opened("image", data=f"imagefolder:{tmp_path}", image_size=16)
    assert data.inputs.classes == 2 and data.valid.files == tuple(
        f"{names[1]}/{c}/{i}.png" for i, c in ((2, "cat"), (3, "dog"))
    )


def test_one_class_is_refused_and_the_folder_of_an_archive_is_named(folder, opened, refused):
    (problem,) = refused("image", data=f"imagefolder:{folder.parent}")
    assert problem.kind == "data-classes" and f"imagefolder:{folder}" in problem.hint
    for name in CLASSES[1:]:
        (folder / name).rename(folder.parent / name)
    (problem,) = refused("image", data=f"imagefolder:{folder}")
    assert problem.kind == "data-classes" and "1 class (cat)" in problem.message
    assert opened("gan", data=f"imagefolder:{folder}").inputs.classes == 1


def test_files_that_are_no_images_are_counted(folder, opened):
    for name in ("cat/a.HEIC", "dog/b.heic", "dog/notes.txt"):
        (folder / name).write_bytes(b"")
    notes = opened("image", data=f"imagefolder:{folder}", image_size=16).notes
    assert "3 files skipped, whose suffix is not an image's: 2 .heic, 1 .txt" in notes


def test_broken_images_are_named(broken, refused):
    (problem,) = refused("image", data=f"imagefolder:{broken}")
    assert problem.kind == "bad-image" and "2 images" in problem.message and "--skip-bad" in problem.hint
    assert f"{broken}/cat/03.png" in problem.message and f"{broken}/dog/99.jpg" in problem.message


def test_broken_images_are_skipped_and_counted(broken, opened):
    data = opened("image", data=f"imagefolder:{broken}", image_size=16, skip_bad=True)
    assert len(data.train) + len(data.valid) == 29
    assert "2 broken images skipped" in data.notes
    data.train.batch(range(len(data.train)), range(len(data.train)))


def test_files_are_checked_once(broken, opened, refused, monkeypatch):
    import zerofit.data.imagefolder as check

    seen = []
    why = check._why_unreadable
    monkeypatch.setattr(check, "_why_unreadable", lambda path: seen.append(path.name) or why(path))
    refused("image", data=f"imagefolder:{broken}")
    assert len(seen) == 31
    opened("image", data=f"imagefolder:{broken}", skip_bad=True)
    assert len(seen) == 31
    paint(broken / "cat" / "03.png", 3)  # mended
    (problem,) = refused("image", data=f"imagefolder:{broken}")
    assert seen[31:] == ["03.png"] and "cannot decode 1 image in" in problem.message


def test_identity_is_name_size_and_time():
    a = ImageFile(name="a", label=0, stamp=(1, 2)).identity
    assert a == ImageFile(name="a", label=1, stamp=(1, 2)).identity
    assert len({a, ImageFile(name="b", label=0, stamp=(1, 2)).identity}) == 2
    assert ImageFile(name="a", label=0, stamp=(1, 3)).identity != a


@pytest.mark.parametrize("what", ["missing", "file", "no classes", "no images"])
def test_folders_that_cannot_be_used(tmp_path, refused, what):
    path = tmp_path / "pics"
    if what == "file":
        path.write_text("")
    elif what == "no classes":
        paint(path / "loose.png", 0)
    elif what == "no images":
        (path / "cat").mkdir(parents=True)
    kind = {"missing": "data-missing", "file": "data-missing", "no classes": "no-classes"}.get(what, "empty-data")
    problems = refused("image", data=f"imagefolder:{path}")
    assert problems[0].kind == kind and str(path) in problems[0].message and problems[0].hint


def test_augmentation_is_a_function_of_the_key_and_leaves_the_generator_alone(folder, opened):
    train = opened("image", data=f"imagefolder:{folder}", image_size=24).train
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, again = train.batch([4, 5], [1, 2]), train.batch([5, 4], [2, 1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one["inputs"].flip(0), again["inputs"])
    assert not torch.equal(one["inputs"], train.batch([4, 5], [3, 4])["inputs"])


def test_validation_does_not_depend_on_the_key(folder, opened):
    valid = opened("image", data=f"imagefolder:{folder}", image_size=24).valid
    assert torch.equal(valid.batch([0], [1])["inputs"], valid.batch([0], [2])["inputs"])


@pytest.mark.parametrize("shm_bytes", [0, 1 << 62])
def test_loader_processes_give_the_same(folder, opened, monkeypatch, shm_bytes):
    monkeypatch.setattr("zerofit.data.loader.ROOMY_BYTES", shm_bytes)
    data = opened("image", data=f"imagefolder:{folder}", image_size=16)
    assert default_workers(data, ranks=1) >= 1
    order = Order(len(data.train), 3)
    slices = [range(i * 4, i * 4 + 4) for i in range(10)]
    here = list(micro_batches(data.train, order, slices, workers=0))
    there = list(micro_batches(data.train, order, iter(slices), workers=2))
    assert len(here) == len(there) == 10
    for a, b in zip(here, there, strict=True):
        assert a["positions"] == b["positions"] and (a["indices"] == b["indices"]).all()
        assert torch.equal(a["inputs"], b["inputs"]) and torch.equal(a["labels"], b["labels"])


def test_evaluation_with_loader_processes(folder, opened):
    valid = opened("image", data=f"imagefolder:{folder}", image_size=16).valid
    here, there = (list(eval_batches(valid, 1, 2, 2, None, workers=w)) for w in (0, 1))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a["inputs"], b["inputs"]) and torch.equal(a["labels"], b["labels"])


def test_a_file_that_breaks_later_is_named(folder, opened):
    data = opened("image", data=f"imagefolder:{folder}", image_size=16)
    (folder / data.train.files[0]).write_text("gone")
    with pytest.raises(OSError, match=data.train.files[0]):
        data.train.batch([0], [0])


def test_gan_images_lie_in_minus_one_to_one(folder, opened):
    batch = opened("gan", data=f"imagefolder:{folder}", image_size=32).train.batch([0, 1], [0, 1])
    assert batch["inputs"].min() >= -1 and batch["inputs"].max() <= 1 and len(batch["labels"]) == 2
