"""Text that is read as it comes: the same tokens in the same order, wherever a run goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data.chats import write_tokenizer
from zerofit.data import stream
from zerofit.data.loader import Order

LENGTH, WINDOWS = 16, 5
BLOCK = LENGTH * WINDOWS
VALID = 3


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(stream, "BLOCK_TOKENS", BLOCK + 3)  # whole windows alone count
    monkeypatch.setattr(stream, "VALID_WINDOWS", VALID)
    monkeypatch.setattr(stream, "AT_ONCE", 7)


@pytest.fixture
def folder(tmp_path):
    """A set of 30 texts in two files; its tokens as one row."""
    (tmp_path / "set").mkdir()
    texts = [f"number {n}: " + "ä" * (n % 9) for n in range(30)]
    for part in range(2):
        lines = [json.dumps({"text": text, "other": 1}) for text in texts[part * 15 : part * 15 + 15]]
        (tmp_path / "set" / f"train-{part}.jsonl").write_text("\n".join(lines))
    row = [np.append(np.frombuffer(text.encode(), np.uint8), np.uint16(256)) for text in texts]
    return tmp_path / "set", np.concatenate(row)


def blocks_of(data, count):
    return [np.array(data.train.stream.block(n).array()) for n in range(count)]


def test_blocks_are_the_texts_one_after_the_other(folder, opened, cache):
    path, row = folder
    data = opened(data=f"hf:{path}", stream=True, seq_len=LENGTH)
    endless = np.tile(row, 4)
    assert (data.valid.file.array() == row[: VALID * LENGTH + 1]).all() and len(data.valid) == VALID
    count = 2 * len(row) // BLOCK  # past the end, where the first comes again
    found = blocks_of(data, count)
    for number, block in enumerate(found):
        start = VALID * LENGTH + number * BLOCK
        assert (block == endless[start : start + BLOCK + 1]).all()
    files = sorted(cache.glob("streams/*/block-*.bin"))
    assert len(files) == stream.KEPT
    for file in [*files, *cache.glob("streams/*/before-[1-9]*.json")]:
        file.unlink()
    assert (data.train.stream.block(count - 2).array() == found[-2]).all()  # from the very first, as on another machine
    for file in cache.glob("streams/*/block-*.bin"):
        file.unlink()
    assert (data.train.stream.block(count - 1).array() == found[-1]).all()  # from where it stood


def test_samples_are_windows_in_an_order_of_each_block(folder, opened):
    path, row = folder
    data = opened(data=f"hf:{path}", stream=True, seq_len=LENGTH)
    order = Order.of(data.train, seed=3)
    seen = order.indices(0, 4 * WINDOWS)
    assert [sorted(seen[n : n + WINDOWS]) for n in range(0, 4 * WINDOWS, WINDOWS)] == [
        list(range(n, n + WINDOWS)) for n in range(0, 4 * WINDOWS, WINDOWS)
    ]
    assert list(seen) != sorted(seen)
    assert (order.indices(7, 13) == seen[7:13]).all()
    batch = data.train.batch(seen, seen)
    for place, index in enumerate(seen):
        start = VALID * LENGTH + index * LENGTH
        window = np.tile(row, 4)[start : start + LENGTH + 1]
        assert (batch["inputs"][place].numpy() == window[:-1]).all()
        assert (batch["labels"][place].numpy() == window[1:]).all()
    assert data.train.targets(seen) == batch["labels"].numel()


def test_a_split_to_validate_on_leaves_nothing_out(folder, opened):
    path, row = folder
    (path / "validation.jsonl").write_text("\n".join(json.dumps({"text": "held out " * 3}) for _ in range(9)))
    data = opened(data=f"hf:{path}", stream=True, seq_len=LENGTH)
    assert (np.array(data.train.stream.block(0).array())[1:] == row[:BLOCK]).all()
    assert bytes(data.valid.file.array()[:8].astype(np.uint8)) == b"held out"


def test_a_short_split_to_validate_on_is_read_once(folder, opened, tmp_path):
    path, _ = folder
    (path / "validation.jsonl").write_text(json.dumps({"text": "held out"}))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    data = opened(data=f"hf:{path}", stream=True, seq_len=LENGTH, tokenizer=str(tokenizer))
    assert data.decode(data.valid.file.array().tolist()) == "held out</s>"
    data = opened(data=f"hf:{path}", stream=True, seq_len=LENGTH)
    assert data.valid.file.array().tolist() == [*b"held out", 256]
    batch = data.valid.batch(np.arange(1), np.arange(1))
    assert len(data.valid) == 1 and (batch["labels"] != -100).sum() == data.valid.targets(np.arange(1)) == len(
        "held out"
    )


def test_few_long_texts_can_be_streamed(tmp_path, opened):
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "train.jsonl").write_text(json.dumps({"text": "a long text " * 50}))
    data = opened(data=f"hf:{tmp_path}/long", stream=True, seq_len=LENGTH)
    row = np.tile(np.array([*(b"a long text " * 50), 256]), 2)
    start = VALID * LENGTH
    assert (np.array(data.train.stream.block(0).array()) == row[start : start + BLOCK + 1]).all()


def test_what_cannot_be_streamed(folder, tmp_path, refused):
    path, _ = folder
    assert refused(data=f"text:{path}/*", stream=True, seq_len=LENGTH)[0].kind == "stream"
    assert refused("masked-lm", LENGTH, data=f"hf:{path}", stream=True)[0].kind == "stream"
    (problem,) = refused(data=f"hf:{path}", stream=True, text_field="othre", seq_len=LENGTH)
    assert "did you mean other?" in problem.hint
    assert refused(data=f"hf:{path}", stream=True, text_field="other", seq_len=LENGTH)[0].kind == "text-field"
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "train.jsonl").write_text('{"text": "few"}\n')
    assert refused(data=f"hf:{tmp_path}/short", stream=True, seq_len=LENGTH)[0].kind == "data-too-short"
