"""Files as people keep them: compressed, arrays, with marks; what is no text is named, with what reads it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma

import pytest

from zerofit.app.data_view import look_at_data
from zerofit.data.jsonl import JsonlSource, elements, is_spread
from zerofit.data.labelled_rows import open_rows
from zerofit.data.text_sources import PlacedRecord

ROWS = [{"text": f"row {n} ä \n" * 5} for n in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TEXT = "".join(f"line {n} €\n" for n in range(900))


def zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.Codec("zstd").compress(content, asbytes=True)


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def tokens(data):
    return [split.file.array().tolist() for split in (data.train, data.valid)]


def same(opened, kind, plain, other, **fields):
    one, two = (opened(data=f"{kind}:{path}", seq_len=16, **fields) for path in (plain, other))
    assert tokens(one) == tokens(two)


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_are_read_as_their_content(tmp_path, opened, refused, suffix, monkeypatch):
    monkeypatch.setattr("zerofit.data.plain_files.SKIPPED_BYTES", 100)
    pack, more = PACKERS[suffix], suffix
    for name, kind, content in (("a.jsonl", "jsonl", LINES), ("a.txt", "text", TEXT)):
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / "plain" / name).write_text(content)
        (tmp_path / name).write_bytes(pack(content.encode()))  # whatever it is called
        same(opened, kind, tmp_path / "plain" / name, tmp_path / name)
        (tmp_path / (name + more)).write_bytes(pack(content.encode())[:-20])
        (problem,) = refused(data=f"{kind}:{tmp_path / (name + more)}", seq_len=16)
        assert problem.kind == "unreadable" and problem.where == f"{tmp_path / (name + more)}"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS, ensure_ascii=False),
        json.dumps(ROWS, indent=4),
        "\n [\n" + ",\n".join(json.dumps(row) for row in ROWS) + "\n]\n\n",
        "".join(json.dumps(row, indent=1) + "\n" for row in ROWS),  # what jq writes
        "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False),
        "\ufeff" + LINES,
        "".join("\ufeff" + json.dumps(row) + "\r\n" for row in ROWS),
        " ".join(map(json.dumps, ROWS)),
        ",\n".join(map(json.dumps, ROWS)) + ",\n",
    ],
    ids=["array", "pretty", "lines", "jq", "mark", "marked lines", "joined files", "one line", "commas"],
)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_arrays_are_the_lines_that_they_would_be(tmp_path, opened, monkeypatch, content, chunk):
    monkeypatch.setattr("zerofit.data.jsonl.CHUNK_CHARACTERS", chunk)
    for folder, text in (("one", LINES), ("two", content)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.json").write_text(text, encoding="utf-8")
    same(opened, "jsonl", tmp_path / "one" / "a.json", tmp_path / "two" / "a.json")


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_elements_know_their_place(monkeypatch, chunk):
    monkeypatch.setattr("zerofit.data.jsonl.CHUNK_CHARACTERS", chunk)
    text = '\ufeff [{"a": "ä€😀"},\n\n  {"b": [1,\n 2]} ,{"c": "]"}]\n'
    found = list(elements(io.BytesIO(text.encode())))
    assert [(json.loads(raw), line, column) for raw, line, column in found] == [
        ({"a": "ä€😀"}, 1, 3),
        ({"b": [1, 2]}, 3, 3),
        ({"c": "]"}, 4, 7),
    ]
    for broken, places in (
        ('[{"a": 1} {"b": 2}]', [(1, 2), (1, 11)]),
        ('[{"a": 1},\n{"b": }]', [(1, 2), (2, 1)]),
        ('[{"a": 1}', [(1, 2), (1, 10)]),
        ('[{"a": 1}]\n[2]', [(1, 2), (2, 1)]),
        ("[" * 9000, [(1, 2)]),
    ):
        found = list(elements(io.BytesIO(broken.encode())))
        assert [(line, column) for _, line, column in found] == places
    assert is_spread(b'[{"a": 1}]\n', b"x\n") and not is_spread(b'[{"a": 1}]\n', b'[{"a": 1}]\n')
    assert not is_spread(b'{"a": 1} oops\n')
    assert not is_spread(b'{"a": 1}\n') and not is_spread(b"oops\n") and not is_spread(b'{"a": "')


@pytest.mark.parametrize("part", [*range(1, 24), 1 << 16])
def test_a_list_in_a_long_first_line_is_one_record(tmp_path, monkeypatch, part):
    monkeypatch.setattr("zerofit.data.jsonl.PART_BYTES", part)
    lists, objects = [[{"role": "a" * 20}], [{"role": "b"}]], [{"text": "a" * 20}, {"text": "b"}]
    for content, records in (
        ("".join(json.dumps(row) + "\n" for row in lists), [{"messages": row} for row in lists]),
        (json.dumps(objects) + "\n", objects),
        ("".join(json.dumps(row) + "\n" for row in objects), objects),
    ):
        (tmp_path / "a.jsonl").write_text(content)
        source = JsonlSource(name="a", files=(("a.jsonl", tmp_path / "a.jsonl"),), what="text")
        assert [line.read() for line in source.lines()] == records


def test_a_cell_can_have_a_long_text(tmp_path):
    (tmp_path / "a.csv").write_text(f"source,target\n{'word ' * 100_000},short\n")
    (row,) = open_rows(f"csv:{tmp_path}/a.csv").records(1)
    assert isinstance(row, PlacedRecord) and len(row.values["source"]) == 500_000


def test_broken_arrays_are_named_by_line_and_column(tmp_path, refused):
    rows = [{"text": "a"}, {"txt": "b"}, 5, {"text": 7}, {"text": "c"}]
    text = json.dumps(rows, indent=1)[:-1] + ',\n {"text"\n: oops}]'
    (tmp_path / "a.json").write_text(text)
    problems = refused(data=f"jsonl:{tmp_path}/a.json", seq_len=16)
    assert [p.where.removeprefix(f"{tmp_path}/a.json:") for p in problems] == ["5:2", "8:2", "9:2", "17:3"]
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"},\n {"text": "\xe4"}]')
    (problem,) = refused(data=f"jsonl:{tmp_path}/a.json", seq_len=16)
    assert problem.where.endswith("a.json:2:12") and "iconv -f" in problem.hint


def test_a_mark_is_not_learned(tmp_path, opened):
    for folder, mark in (("one", ""), ("two", "\ufeff")):
        (tmp_path / folder).mkdir()
        for n in range(25):
            (tmp_path / folder / f"{n}.txt").write_text(mark + f"text {n}\n" * 9, encoding="utf-8")
    same(opened, "text", f"{tmp_path}/one/*", f"{tmp_path}/two/*")


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"PAR1" + bytes(50), "Parquet", "--data hf:"),
        ("\ufeffwords".encode("utf-16-le"), "UTF-16", "iconv -f utf-16"),
        (b"PK\x03\x04" + bytes(50), "zip", "unzip"),
        (gzip.compress(bytes(257) + b"ustar" + bytes(99)), "tar archive", "tar -xf"),
        (b"%PDF-1.7\n" + bytes(9), "PDF", "pdftotext"),
        (b"\x89PNG\r\n\x1a\n" + bytes(9), "image", "imagefolder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_what_is_no_text_is_named(tmp_path, refused, kind, content, what, hint):
    (tmp_path / "a.txt").write_bytes(content)
    (problem,) = refused(data=f"{kind}:{tmp_path}/a.txt", seq_len=16)
    assert problem.kind == "not-text" and what in problem.message and hint in problem.hint


def test_parquet_is_read_by_hf(tmp_path, opened, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.jsonl").write_text(LINES)
    found, wanted = (
        opened(data=f"hf:{tmp_path}/a.parquet", seq_len=16),
        opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16),
    )
    lengths = [sum(map(len, tokens(one))) for one in (found, wanted)]  # rows have other names than lines
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz"])
def test_a_look_at_a_table_of_conversations(tmp_path, monkeypatch, suffix):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    rows, cells = [("prompt", "completion"), ('a "quoted",\ttext', "two\nlines"), ("b;", "c")] * 2, io.StringIO()
    csv.writer(cells, delimiter="\t" if suffix == "tsv" else ",").writerows(rows[:3] + rows[1:2])
    content = cells.getvalue().encode()
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    view = look_at_data(tmp_path / f"a.{suffix}", seq_len=64, packing=False)
    learned = {part.text for sample in view.samples for part in sample.documents[0] if part.learned}
    assert view.train_samples == 2 and learned <= {"two\nlines<|end|>\n", "c<|end|>\n"}


def test_nul_bytes_are_named(tmp_path, refused):
    for text in (LINES.encode() + bytes(512) + b"\n", '{"text": "a"}\n'.encode("utf-16-le")):
        (tmp_path / "a.jsonl").write_bytes(text)
        assert "NUL bytes" in refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)[0].message


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"question": "q", "answer": "a"}, '{prompt: .["question"], completion: .["answer"]}'),
        ({"txt": "q", "answer": "a"}, "did you mean txt?"),
        ({"version": "1", "data": [{"text": "a"}]}, """ .["data"][]' """),
    ],
)
def test_hints_do_not_train_on_answers_alone(tmp_path, refused, row, hint):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (problem,) = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)
    assert hint in problem.hint


def test_empty_and_odd_files_are_bad_input(tmp_path, refused):
    """Files that ended in errors of numpy: no record at all, texts that are all empty, an array that is cut off."""
    silent = json.dumps({"messages": [{"role": "user", "content": ""}]}) + "\n"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "a.jsonl").write_text(silent)
    named = {"data": f"jsonl:{tmp_path}/a.jsonl", "seq_len": 16, "chat_template": tmp_path / "t.jinja"}
    assert refused(**named)[0].kind == "data-too-short"
    (tmp_path / "a.jsonl").write_text("\n\n")
    for task in ("causal-lm", "classify", "tag", "seq2seq-lm"):
        assert refused(task, data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16)[0].kind == "data-too-short"
    (tmp_path / "a.npy").write_bytes(b"")
    assert refused("table", data=f"npy:{tmp_path}/a.npy")[0].kind == "data-missing"
