from __future__ import annotations

import json

import numpy as np
import pytest

EOD = 256


def documents(dataset):
    """The documents of a row of byte tokens."""
    row = np.array(dataset.file.array())
    ends = np.flatnonzero(row == EOD)
    assert ends[-1] == len(row) - 1
    return [bytes(part[part != EOD].astype(np.uint8)).decode() for part in np.split(row, ends + 1)[:-1]]


def test_files_go_whole_to_one_side(tmp_path, opened):
    texts = {f"{i:03}.txt": f"file {i} ä\r\n" * 9 for i in range(100)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, newline="")
    data = opened(data=f"text:{tmp_path}/*.txt", seq_len=16)
    train, valid = documents(data.train), documents(data.valid)
    assert sorted(train + valid) == sorted(texts.values())
    assert len(valid) == 5
    assert train == [t for t in texts.values() if t not in valid]  # in the order of the paths


def test_a_moved_folder_keeps_split_and_cache(tmp_path, opened, cache):
    (tmp_path / "one").mkdir()
    for i in range(40):
        (tmp_path / "one" / f"{i}.txt").write_text(f"number {i} " * 20)
    before = opened(data=f"text:{tmp_path}/one/*.txt", seq_len=16)
    (tmp_path / "one").rename(tmp_path / "two")
    after = opened(data=f"text:{tmp_path}/two/*.txt", seq_len=16)
    assert before.train.file.path == after.train.file.path


def test_a_path_with_brackets_is_a_file_and_not_a_pattern(tmp_path, opened):
    folder = tmp_path / "[a] b"
    folder.mkdir()
    (folder / "c[1].txt").write_text("a line\n" * 40)
    (folder / "c1.txt").write_text("another\n" * 40)  # matches the same words as a pattern
    (train,) = documents(opened(data=f"text:{folder}/c[1].txt", seq_len=16).train)
    assert "a line" in train and "another" not in train


def test_one_file_is_held_out_at_a_lines_end(tmp_path, opened):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    data = opened(data=f"text:{tmp_path}/a.txt", seq_len=16)
    (train,), (valid,) = documents(data.train), documents(data.valid)
    assert train + valid == text and train.endswith("\n")
    assert len(valid) / len(text) == pytest.approx(0.05, abs=0.01)


def test_a_file_whose_last_character_is_at_95_percent_has_no_held_out_part(tmp_path, opened):
    (tmp_path / "a.txt").write_text("你好你好", encoding="utf-8")  # 12 bytes: byte 11 is inside the last character
    (tmp_path / "b.txt").write_text("a line\n" * 40)
    data = opened(data=f"text:{tmp_path}/*.txt", seq_len=16)
    assert documents(data.train)[0] == "你好你好"


@pytest.mark.parametrize("chunk", [7, 64, 1 << 22])
def test_long_files_are_read_in_pieces_without_a_loss(tmp_path, opened, monkeypatch, chunk):
    monkeypatch.setattr("zerofit.data.text_sources.CHUNK_BYTES", chunk)
    text = "äöü€😀" * 500  # no line ends at all
    (tmp_path / "a.txt").write_text(text)
    data = opened(data=f"text:{tmp_path}/a.txt", seq_len=16)
    assert documents(data.train)[0] + documents(data.valid)[0] == text


def test_bytes_that_are_not_utf8_are_all_named(tmp_path, refused):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"fine\nab\xff\n" if i else b"fine " * 50)
    problems = refused(data=f"text:{tmp_path}/*.txt", seq_len=16)
    assert [p.where for p in problems] == [f"{tmp_path}/{i}.txt:2:3" for i in (1, 2)]
    assert "0xff" in problems[0].message


def test_jsonl(tmp_path, opened):
    rows = [{"id": i, "body": f"text {i} \n \ud83d\ude00" * 5} for i in range(60)]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    data = opened(data=f"jsonl:{tmp_path}/*.jsonl", text_field="body", seq_len=16)
    valid = documents(data.valid)
    assert len(valid) == 3
    assert sorted(documents(data.train) + valid) == sorted(json.loads(json.dumps(r))["body"] for r in rows)


def test_jsonl_names_every_bad_line(tmp_path, refused):
    lines = ['{"text": "a"}', '{"text" "b"}', "[1]", '{"txt": "c"}', '{"text": 5}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    problems = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)
    path = f"{tmp_path}/a.jsonl"
    assert [p.where for p in problems] == [f"{path}:2:9", f"{path}:3:1", f"{path}:4:1", f"{path}:5:1"]
    assert "did you mean txt?" in problems[2].hint and "int" in problems[3].message


def test_jsonl_that_is_not_utf8(tmp_path, refused):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n{"text": "b\xe4"}\n')
    problems = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)
    assert [p.where for p in problems] == [f"{tmp_path}/a.jsonl:{place}" for place in ("2:11", "3:12")]


def test_jsonl_stops_at_twenty_bad_lines(tmp_path, refused, cache):
    (tmp_path / "a.jsonl").write_text("oops\n" * 1000)
    assert len(refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)) == 20
    assert list(cache.glob("tokens/*/")) in ([], [cache / "tokens" / "index"])


@pytest.mark.parametrize("valid_rows", [0, 7])
def test_hf_folder(tmp_path, opened, monkeypatch, valid_rows):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", 40), ("validation", valid_rows)):
        if rows:
            lines = [json.dumps({"text": f"{split} {i} " * 9}) for i in range(rows)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
    data = opened(data=f"hf:{folder}", seq_len=16)
    train, valid = documents(data.train), documents(data.valid)
    assert (len(train), len(valid)) == ((40, 7) if valid_rows else (38, 2))
    assert all(text.startswith("validation") == bool(valid_rows) for text in valid)


def test_hf_saved_to_disk_and_a_wrong_column(tmp_path, opened, refused):
    datasets = pytest.importorskip("datasets")
    rows = {"content": [f"row {i} " * 9 for i in range(30)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    data = opened(data=f"hf:{tmp_path}/saved", text_field="content", seq_len=16)
    assert len(documents(data.train)) == 28
    (problem,) = refused(data=f"hf:{tmp_path}/saved", text_field="contents", seq_len=16)
    assert problem.kind == "text-field" and "did you mean content?" in problem.hint


def test_no_network_is_told_at_once(refused, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("zerofit.data.hf._reachable", lambda endpoint: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    problems = refused(data="hf:nobody/nothing", tokenizer="nobody/nothing")
    assert [p.kind for p in problems] == ["hf", "tokenizer"]
    assert all("nobody/nothing" in p.message and "network" in p.hint for p in problems)


def test_nothing_matches_and_a_folder_needs_a_pattern(tmp_path, refused):
    (problem,) = refused(data=f"text:{tmp_path}/nothing/*.txt")
    assert problem.kind == "empty-data"
    (problem,) = refused(data=f"text:{tmp_path}")
    assert f"text:{tmp_path}/*" in problem.hint


def test_too_short(tmp_path, refused):
    (tmp_path / "a.txt").write_text("0123456789\n" * 10)
    (problem,) = refused(data=f"text:{tmp_path}/a.txt", seq_len=1000)
    assert problem.kind == "data-too-short" and "--seq-len" in problem.hint
    (tmp_path / "b.txt").write_text("")
    assert refused(data=f"text:{tmp_path}/b.txt", seq_len=1)[0].kind == "data-too-short"


def test_notes_tell_of_padding(tmp_path, opened):
    (tmp_path / "a.txt").write_text("0123456789\n" * 105)
    data = opened(data=f"text:{tmp_path}/a.txt", seq_len=16)
    rest = (data.train.tokens - 1) % 16
    assert rest and f"the last training sequence has {rest} of 16 tokens" in data.notes[0]


def test_pysource_opens(opened):
    data = opened(seq_len=128)
    assert data.train.tokens > 1_000_000 and data.valid.tokens > 10_000
    assert 2.5 < data.unigram_entropy_nats < 4
    assert "import" in data.decode(np.array(data.valid.file.array()[:50_000]).tolist())
    assert data.decode(data.encode("naïve\n")) == "naïve\n"
