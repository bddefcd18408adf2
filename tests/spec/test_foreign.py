import json
import random
from pathlib import Path

import pytest

from zerofit.spec.foreign import MAX_DEPTH, Unreadable, parse_json, read_json
from zerofit.spec.foreign_yaml import parse_yaml, read_own_yaml, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expecting value (line 1, column 1)"),
        ('{"a": 1,\n "b" 2}', "expecting ':' delimiter (line 2, column 6)"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 500 + "]" * 500, "nested more than 100 deep"),
        ('{"a": ' + "9" * 5000 + "}", "more than 40 digits"),
        ('{"a": ' + "9" * 400 + "}", "more than 40 digits"),
        (r'{"name": "\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    ],
)
def test_json_that_is_not_readable(text, reason):
    with pytest.raises(Unreadable) as caught:
        parse_json(text)
    assert reason in str(caught.value)


def test_json_that_is_readable():
    assert parse_json('\ufeff{"a": [1, 2.5, "é"]}'.encode()) == {"a": [1, 2.5, "é"]}
    assert parse_json(r'["\ud83d\ude00"]') == ["😀"]
    deep = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    assert str(parse_json(deep)).replace(" ", "") == deep
    digits = "7" * 40
    assert parse_json(f'[{digits}, "{digits}9"]') == [int(digits), digits + "9"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("steps: !!int abc\n", "'abc' is not an int"),
        ("a: 1\nmodel: 2026-99-99\n", "'2026-99-99' is not a timestamp: month must be in 1..12 (line 2, column 8)"),
        ("a: 1\nb: 2\na: 3\n", "duplicate key 'a', first on line 1 (line 3, column 1)"),
        ("{a: 1, a: 2}", "duplicate key 'a', first on line 1 (line 1, column 8)"),
        ("x:\n  a: 1\n  a: 2\n", "duplicate key 'a', first on line 2 (line 3, column 3)"),
        ("[" * 5000, "nested more than 100 deep"),
        ("&a [*a]", "nested more than 100 deep"),
        (LAUGHS, "more than 1,000,000 values"),
        ("a: " + "9" * 5000, "more than 40 digits"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: [1", "expected ',' or ']'"),
        ("a: \x00", "special characters are not allowed"),
        ("? [a]\n: 1\n", "unhashable"),
        ("a: *b", "undefined alias"),
    ],
)
def test_yaml_that_is_not_readable(text, reason):
    with pytest.raises(Unreadable) as caught:
        parse_yaml(text)
    assert reason in str(caught.value)


def test_yaml_gives_the_lines_of_keys():
    value, lines = parse_yaml("# mine\nmodel: gpt2\nds_config:\n  a: &x 1\n  b: *x\nsteps: 3\n")
    assert value == {"model": "gpt2", "ds_config": {"a": 1, "b": 1}, "steps": 3}
    assert lines == {"model": 2, "ds_config": 3, "steps": 6}
    assert parse_yaml("base: &b {x: 1}\nmine: {<<: *b, y: 2}\n")[0]["mine"] == {"x": 1, "y": 2}
    assert parse_yaml("") == (None, {})


def test_files_are_of_the_kind_that_is_expected(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text("[1]")
    assert read_json(file, list) == [1]
    with pytest.raises(Unreadable, match="expected an object, got a list"):
        read_json(file)
    with pytest.raises(Unreadable, match="expected a mapping, got a list"):
        read_yaml(file)
    file.write_text("null")
    with pytest.raises(Unreadable, match="expected an object, got nothing"):
        read_json(file)


def test_whatever_the_text_it_is_a_value_or_unreadable():
    random_ = random.Random(0)
    pieces = [
        *"{}[]:,\"\\-&*!?|>#%@`' \n\t",
        "a: ",
        "- ",
        "!!int ",
        "!!set ",
        "&a ",
        "*a ",
        "<<: ",
        "1e999",
        "0x",
        "1:2",
    ]
    pieces += [
        "NaN",
        "null",
        '"\\ud800"',
        "2026-99-99",
        "é",
        "\ufeff",
        "\x00",
        "? ",
        "---\n",
        "...",
        "9" * 350,
        "true",
        "~",
    ]
    for _ in range(3000):
        text = "".join(random_.choices(pieces, k=random_.randrange(1, 25)))
        for parse in (parse_json, parse_yaml):
            try:
                parse(random_.choice([text, text.encode()]))
            except Unreadable as error:
                assert error.reason


def test_files_of_zerofits_own_have_the_numbers_of_json(tmp_path: Path):
    random_ = random.Random(0)
    numbers = [
        0,
        -1,
        1e-5,
        1e22,
        5e-324,
        1.5,
        *(random_.uniform(-1, 1) * 10.0 ** random_.randrange(-9, 30) for _ in range(300)),
    ]
    numbers += ["1E5", "1e+05", "-0.0", "12.50e-3", "123456789012345678901234567890"]
    texts = [number if isinstance(number, str) else json.dumps(number) for number in numbers]
    (tmp_path / "a.yaml").write_text("".join(f"k{n}: {text}\n" for n, text in enumerate(texts)))
    value, lines, faults = read_own_yaml(tmp_path / "a.yaml")
    assert list(map(repr, value.values())) == [repr(json.loads(text)) for text in texts]
    assert list(lines.values()) == list(range(1, len(texts) + 1)) and not faults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("128:0.5", "128:0.5"),
        ("2026-11-27", "2026-11-27"),
        ("2026-11-27 12:00:00", "2026-11-27 12:00:00"),
        ("1.2.3", "1.2.3"),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("'010'", "010"),
        ("'1e5'", "1e5"),
        ("e5", "e5"),
        ("-", [None]),
    ],
)
def test_what_stands_in_files_of_zerofits_own(tmp_path: Path, text, value):
    (tmp_path / "a.yaml").write_text(f"a:\n  {text}\n")
    assert read_own_yaml(tmp_path / "a.yaml") == ({"a": value}, {"a": 1}, [])


def test_all_faults_of_zerofits_own_files_come_at_once(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        "a: 010\nb: {x: -0o7, y: 1, y: 2}\na: [08]\nc: 0\nd: 0.5\ne: 0b11\nf: !!int '010'\n"
    )
    faults = read_own_yaml(tmp_path / "a.yaml")[2]
    assert sorted((fault.line, fault.column) for fault in faults) == [
        (1, 4),
        (2, 8),
        (2, 20),
        (3, 1),
        (3, 5),
        (6, 4),
        (7, 4),
    ]


def test_json_of_zerofits_own_is_read_as_json(tmp_path: Path):
    written = {"a": "\U0001f600", "b": {"c": 1e-05}, "k" * 2000: 1}  # what YAML's reader makes otherwise, or refuses
    (tmp_path / "a.json").write_text(json.dumps(written, indent="\t"))
    assert read_own_yaml(tmp_path / "a.json")[0] == written
    (tmp_path / "a.json").write_text('{\n\t"a": 1,\n\t"a": 2}')
    value, lines, (fault,) = read_own_yaml(tmp_path / "a.json")
    assert (value, lines, fault.line) == ({"a": 2}, {"a": 3}, 3)
    (tmp_path / "a.json").write_text('{"a": 010}')
    with pytest.raises(Unreadable, match="line 1, column 8"):
        read_own_yaml(tmp_path / "a.json")
