from __future__ import annotations

import pytest

from zerofit.spec.files import JsonlTail


@pytest.mark.parametrize("bad", [b"\0" * 10, b'{"step": 2, "loss', b'{"text": "\xc3"}', b"17", b"[]"])
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


def test_lines_of_before_are_read_where_asked_for(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    assert list(JsonlTail(path).read()) == []
    assert list(JsonlTail(path, from_start=True).read()) == [{"step": 1}]
