"""Labelled text: what becomes of rows, by transformers' own tokenizer and by hand, and what is said of bad ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from zerofit.data import labelled_rows
from zerofit.data.jsonl import JsonlSet
from zerofit.data.opening import open_data
from zerofit.models.inputs import LabelledTextInputs, NamedInputs
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "it", "rain", "##ed", "##ing", "stop", "##ped", "now", "sun"]
TAGS = ["O", "WEATHER"]


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory) -> str:
    """A tokenizer as BERT's, of which a word can be two tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def opened(task: Any, data: str, seq_len: int = 16, known=(), **fields) -> Any:
    return open_data(Run(data=data, **fields), task, seq_len, Reporter(), known)


def everything(data: Any, *names: str) -> list[list[Any]]:
    """These parts of the samples of both splits, sorted: who is held out depends on hashes."""
    found = []
    for split in (data.train, data.valid):
        batch = split.batch(np.arange(len(split)), np.arange(len(split)))
        found += list(zip(*(batch[name].tolist() for name in names), strict=True))
    return sorted(map(list, found))


def test_the_first_token_of_a_word_has_its_tag(tmp_path, wordpiece):
    rows = [{"tokens": ["it", "rained", "now"], "tags": ["O", "WEATHER", "O"]}] * 2
    data = opened("tag", write(tmp_path / "rows.jsonl", rows), 8, tokenizer=wordpiece)
    assert data.inputs.classes == ("O", "WEATHER") and data.inputs.tags
    ids, mask, labels = everything(data, "inputs", "attention_mask", "labels")[0]
    assert ids == [2, 4, 5, 6, 10, 3, 0, 0]
    assert mask == [1, 1, 1, 1, 1, 1, 0, 0]
    assert labels == [-100, 0, 1, -100, 0, -100, -100, -100]
    assert data.train.targets([0]) == 3
    cut = opened("tag", write(tmp_path / "rows.jsonl", rows), 4, tokenizer=wordpiece)
    assert everything(cut, "labels")[0] == [[-100, 0, 1, -100]]
    assert any("2 texts are longer" in note for note in cut.notes)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_in_the_cache_is_not_read_again(tmp_path, monkeypatch, kind):
    """Only its first row is, which says whether it has the fields."""
    rows = [{"text": f"it rained {n}", "label": str(n % 2)} for n in range(50)]
    path = tmp_path / f"rows.{kind}"
    data = write(path, rows)
    if kind == "csv":
        path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
        data = f"csv:{path}"
    first = opened("classify", data, 8)
    read = []
    source, name = (labelled_rows.CsvRows, "_lines") if kind == "csv" else (JsonlSet, "lines")
    lines = getattr(source, name)
    monkeypatch.setattr(source, name, lambda self: (read.append(line) or line for line in lines(self)))
    assert everything(opened("classify", data, 8), "inputs", "labels") == everything(first, "inputs", "labels")
    assert len(read) == 1


def test_classes_that_are_integers_are_in_the_order_of_their_values(tmp_path):
    rows = [{"text": "it rained", "label": label} for label in ("10", "-2", "9", "-10")]
    assert opened("classify", write(tmp_path / "rows.jsonl", rows), 8).inputs.classes == ("-10", "-2", "9", "10")


def test_pairs_are_told_apart_and_padding_is_cut_off(tmp_path, wordpiece):
    rows = [{"text": "it rained", "text_pair": "sun now", "label": n % 2 == 0} for n in range(4)]
    data = opened("classify", write(tmp_path / "rows.jsonl", rows), 32, tokenizer=wordpiece)
    assert data.inputs == LabelledTextInputs(vocab_size=12, seq_len=32, classes=("false", "true"), pad_id=0, pairs=True)
    batch = data.train.batch([0, 1], [0, 1])
    trimmed = data.train.trimmed(batch)
    assert batch["inputs"].shape == (2, 32) and trimmed["inputs"].shape == trimmed["attention_mask"].shape == (2, 8)
    assert trimmed["inputs"][0].tolist() == [2, 4, 5, 6, 3, 11, 10, 3]
    assert trimmed["token_type_ids"][0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_targets_end_and_are_cut_by_their_own_length(tmp_path):
    rows = [{"from": {"en": "ab"}, "target": "wxyz"}] * 2
    fields = {"text_field": "from.en", "target_len": 3}
    data = opened("seq2seq-lm", write(tmp_path / "rows.jsonl", rows), 5, **fields)
    assert isinstance(data.inputs, NamedInputs) and data.inputs.padded
    assert everything(data, "inputs", "labels")[0] == [[97, 98, 256, 258, 258], [ord("w"), ord("x"), 256]]
    assert data.train.targets([0]) == 3 and data.decode([97, 256]) == "a"


def test_csv_and_data_sets_hold_the_same(tmp_path):
    rows = [{"body": f"no {n}, yes", "kind": "odd" if n % 2 else "even"} for n in range(6)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["body", "kind"])
        writer.writeheader()
        writer.writerows(rows)
    features = datasets.Features({"body": datasets.Value("string"), "kind": datasets.ClassLabel(names=["even", "odd"])})
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows, features=features)}).save_to_disk(tmp_path / "set")
    fields: dict[str, Any] = {"text_field": "body", "label_field": "kind"}
    table = opened("classify", f"csv:{tmp_path}/rows.csv", **fields)
    named = opened("classify", f"hf:{tmp_path}/set", **fields)
    assert table.inputs.classes == named.inputs.classes == ("even", "odd")
    samples = everything(table, "inputs", "labels")
    assert samples == everything(named, "inputs", "labels") and len(samples) == 6
    first = [256, *b"no 0, yes", 256, *[258] * 5]
    assert samples[0] == [first, 0]


def test_a_models_own_order_of_classes_is_kept(tmp_path):
    rows = [{"text": "a", "label": "no"}, {"text": "b", "label": "yes"}]
    data = opened("classify", write(tmp_path / "rows.jsonl", rows), known=("yes", "maybe", "no"))
    assert data.inputs.classes == ("yes", "maybe", "no")
    assert [label for (label,) in everything(data, "labels")] == [0, 2]


@pytest.mark.parametrize(
    "task, rows, said",
    [
        ("classify", [{"text": "a", "label": 0.5}] * 2, "not a class"),
        (
            "classify",
            [{"text": "a", "label": f"{n / 4}"} for n in range(9)],
            "labels like 0.25: a fraction is not a class",
        ),
        ("classify", [{"text": 7, "label": "x"}] * 2, "'text' is int, not a string"),
        ("classify", [{"text": "a", "label": "x"}] * 2, "1 class; 2 to 1,000"),
        ("classify", [{"review": "a", "label": "x"}] * 2, "no field 'text'; it has review, label"),
        ("tag", [{"tokens": ["a", "b"], "tags": ["O"]}] * 2, "a list of 2 tags"),
        ("seq2seq-lm", [{"source": "a", "target": ["b"]}] * 2, "not a string"),
    ],
)
def test_bad_rows_are_named(tmp_path, task, rows, said):
    with pytest.raises(UserError) as caught:
        opened(task, write(tmp_path / "rows.jsonl", rows))
    assert said in str(caught.value.problems[0].message)
    if "need" in said:
        assert f"{tmp_path}/rows.jsonl:1" in caught.value.problems[0].where
