from __future__ import annotations

import pytest


@pytest.fixture
def folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 5], trainer)
    target = tmp_path / "tokenizer"
    target.mkdir()
    made.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 300)
    return f"text:{tmp_path}/a.txt"


def test_a_local_tokenizer(folder, text, opened):
    data = opened(data=text, tokenizer=str(folder), seq_len=32)
    assert data.inputs.vocab_size <= 300
    row = data.train.file.array()
    assert row[-1] == data.encode("<|endoftext|>")[0] == 0
    assert data.decode(row[:-1].tolist()) + data.decode(data.valid.file.array()[:-1].tolist()) == (
        "the quick brown fox\n" * 300
    )
    same = opened(data=text, tokenizer=str(folder / "tokenizer.json"), seq_len=32)
    assert same.train.file.path == data.train.file.path  # the content counts, not where it lies


def test_another_tokenizer_is_another_cache(folder, text, opened):
    one = opened(data=text, tokenizer=str(folder), seq_len=32).train.file.path
    assert opened(data=text, seq_len=32).train.file.path != one


def test_masked_training_needs_a_mask(folder, text, refused):
    (problem,) = refused("masked-lm", 32, data=text, tokenizer=str(folder))
    assert problem.kind == "tokenizer" and "mask" in problem.message


def test_data_and_tokenizer_are_both_told_of(tmp_path, refused):
    (tmp_path / "empty").mkdir()
    problems = refused(data=f"text:{tmp_path}/none*", tokenizer=str(tmp_path / "empty"))
    assert [p.kind for p in problems] == ["empty-data", "tokenizer"]
