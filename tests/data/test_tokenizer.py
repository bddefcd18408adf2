from __future__ import annotations

import json

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


def test_files_of_a_vocabulary_are_read_as_transformers_reads_them(folder, tmp_path, text, opened):
    """GPT-2's vocab.json and merges.txt, as folders had them before there was a tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    (old / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    both = [opened(data=text, tokenizer=str(place), seq_len=32).train.file.array() for place in (old, folder)]
    assert (both[0] == both[1]).all()


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "no tokenizer files", "--tokenizer bytes"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.model": "spm"}, "cannot open", "sentencepiece"),
        ({"config.json": '{"model_type": "bert"}', "tokenizer_config.json": "{}"}, "no vocabulary", "tokenizer.json"),
        ({"config.json": '{"model_type": "gpt2"}', "tokenizer_config.json": "{}"}, "no vocabulary", "tokenizer.json"),
        ({"tokenizer.json": "[1"}, "cannot open", "tokenizer.json"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'}, "cannot open", "bytes"),
    ],
)
def test_a_folder_without_a_vocabulary_is_refused(tmp_path, text, refused, files, message, hint):
    place = tmp_path / "model"
    place.mkdir()
    for name, content in files.items():
        (place / name).write_text(content)
    (problem,) = refused(data=text, tokenizer=str(place), seq_len=32)
    assert problem.kind == "tokenizer" and message in problem.message and hint in problem.hint


def test_the_folder_of_a_run_on_bytes_names_them(tmp_path, text, opened):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "zerofit.json").write_text('{"tokenizer": "bytes"}')
    mine = opened(data=text, tokenizer=str(tmp_path / "model"), seq_len=32)
    assert mine.train.file.path == opened(data=text, seq_len=32).train.file.path
