from __future__ import annotations

import json

import pytest

from zerofit.spec.files import JsonlTail, open_jsonl, read_jsonl


@pytest.mark.parametrize("bad", [b"\0" * 10, b"\0\r\0", b'{"step": 2, "loss', b'{"text": "\xc3"}', b"17", b"[]"])
def test_a_bad_line_is_skipped_with_one_warning(tmp_path, bad):
    path, told = tmp_path / "metrics.jsonl", []
    tail = JsonlTail(path, on_bad_line=told.append)
    path.write_bytes(b'{"step": 1}\n' + bad + b"\n" + bad + b'\n{"step": 2}\n{"st')
    assert [record["step"] for record in tail.read()] == [1, 2]
    with path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert [record["step"] for record in tail.read()] == [3]
    assert len(told) == 1
    assert "at byte 12" in told[0]


BAD = [
    b"\0" * 10,
    b'{"step": 2, "loss',
    b'{"text": "\xc3"}',
    b"17",
    b"[]",
    b"[" * 10**5,
    b'{"step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_whole_file_is_read_without_bad_lines_and_without_half_of_the_last(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n' + bad + b'\n{"text": "a\xe2\x80\xa8b"}\n{"st')
    assert read_jsonl(path) == [{"step": 1}, {"text": "a\u2028b"}]  # which str.splitlines would cut in two
    assert list(JsonlTail(path).read()) == []  # what stands there already is not new


def test_what_is_added_after_half_a_line_has_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    told: list[str] = []
    for text in ('{"event": "pha', '{"event": "saved"}\n', '{"event": "eval"}\n'):
        tail = JsonlTail(path, on_bad_line=told.append)
        with open_jsonl(path) as file:
            file.write(text)
        assert list(tail.read()) == ([json.loads(text)] if text.endswith("\n") else [])
        assert not told  # of the end of a line that was cut before this tail was made
    assert path.read_text() == '{"event": "pha\n{"event": "saved"}\n{"event": "eval"}\n'
