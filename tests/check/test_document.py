"""Reading with places, and mending in place: against Python's own json module."""

from __future__ import annotations

import json

import pytest
import yaml

from zerofit.check.document import of_data, parse, parse_yaml
from zerofit.check.edit import Assignment, Deletion, Move, Removal, Renaming, apply
from zerofit.check.scan import SyntaxFault

COMMENTED = """{
  // lines and /* blocks */ are taken off
  "a": {"b": [1, -2.5e-3, true, null], "c//": "x // y # z"},  # so is this
  /* and
     this */
  "d": "\\u00e9\\n",
}
"""


def test_comments_and_a_last_comma_do_no_harm():
    document = parse(COMMENTED)
    assert document.config == {"a": {"b": [1, -2.5e-3, True, None], "c//": "x // y # z"}, "d": "é\n"}
    (comma,) = document.commas
    assert (comma.line, comma.column) == (6, 18)


def test_deepspeeds_own_reader_takes_the_same():
    import hjson

    assert parse(COMMENTED).config == hjson.loads(COMMENTED)


@pytest.mark.parametrize("value", [{}, [], {"a": []}, {"a": {"b": {"c": [{"d": 1e300}, "", 0]}}}, [1, [2]], "x", 3.5])
def test_plain_json_reads_as_with_the_standard_library(value):
    for indent in (None, 2):
        text = json.dumps(value, indent=indent)
        assert parse(text).config == json.loads(text)


def test_places_are_those_of_the_keys():
    document = parse(COMMENTED)
    assert [(document.place(p).line, document.place(p).column) for p in ("a", "a.b", "d")] == [(3, 3), (3, 9), (6, 3)]
    assert document.place("a.missing.deeper") == document.place("a")
    assert document.place("nowhere").line == 1


def test_a_key_that_stands_twice_counts_last():
    document = parse('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}')
    assert document.config == {"a": 3, "b": {"c": 2}}
    assert [(path, first.place.column, last.place.column) for path, first, last in document.duplicates()] == [
        ("a", 2, 33),
        ("b.c", 16, 24),
    ]


@pytest.mark.parametrize(
    ("text", "line", "column", "word"),
    [
        ('{"a": 1,\n "b": }', 2, 7, "}"),
        ('{"a" 1}', 1, 6, "colon"),
        ('{"a": 1 "b": 2}', 1, 9, "comma"),
        ('{\n"a": 1', 2, 7, "ends"),
        ("", 1, 1, "empty"),
        ("{'a': 1}", 1, 2, "double quotes"),
        ('{"a": NaN}', 1, 7, "NaN"),
        ('{"a": 01}', 1, 8, "1"),
        ('{"a":\n "\\ud800"}', 2, 2, "surrogate"),
        ("[" * 20000, 1, 1, ""),
    ],
)
def test_what_does_not_parse_is_placed(text, line, column, word):
    with pytest.raises(SyntaxFault) as fault:
        parse(text)
    if not text.startswith("[["):
        assert (fault.value.line, fault.value.column) == (line, column)
    assert word in fault.value.message


EDITS = [
    (Assignment("zero.stage", 2), {"zero": {"stage": 2, "x": 1}, "b": [1], "e": {}}),
    (Assignment("b", {"c": [1, {"d": 2}]}), {"zero": {"stage": 3, "x": 1}, "b": {"c": [1, {"d": 2}]}, "e": {}}),
    (Assignment("zero.new.deep", True), {"zero": {"stage": 3, "x": 1, "new": {"deep": True}}, "b": [1], "e": {}}),
    (Assignment("e.f", "auto"), {"zero": {"stage": 3, "x": 1}, "b": [1], "e": {"f": "auto"}}),
    (Assignment("b.c", 1), {"zero": {"stage": 3, "x": 1}, "b": {"c": 1}, "e": {}}),
    (Assignment("n", 1), {"zero": {"stage": 3, "x": 1}, "b": [1], "e": {}, "n": 1}),
    (Removal("zero"), {"b": [1], "e": {}}),
    (Removal("zero.x"), {"zero": {"stage": 3}, "b": [1], "e": {}}),
    (Removal("b"), {"zero": {"stage": 3, "x": 1}, "e": {}}),
    (Removal("e"), {"zero": {"stage": 3, "x": 1}, "b": [1]}),
    (Removal("missing.key"), {"zero": {"stage": 3, "x": 1}, "b": [1], "e": {}}),
    (Renaming("zero.x", "y"), {"zero": {"stage": 3, "y": 1}, "b": [1], "e": {}}),
]
LAYOUTS = [
    '{"zero": {"stage": 3, "x": 1}, "b": [1], "e": {}}',
    '{\n  "zero": {\n    "stage": 3, // three\n    "x": 1 /* , */\n  },\n  "b": [1], # a list\n  "e": {}\n}\n',
    '{\n\t"zero": {"stage": 3,\n"x": 1,}, "b":\n[1]\n\t,\n\t"e": {} // last\n}',
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("edit", "expected"), EDITS)
def test_an_edit_changes_what_it_names_and_nothing_else(layout, edit, expected):
    mended = parse(apply(parse(layout), [edit]))
    assert mended.config == expected
    assert not list(mended.duplicates())


def test_comments_survive_an_edit():
    mended = apply(parse(LAYOUTS[1]), [Assignment("zero.stage", 1), Removal("b"), Assignment("n.m", 1)])
    assert parse(mended).config == {"zero": {"stage": 1, "x": 1}, "e": {}, "n": {"m": 1}}
    assert "// three" in mended and "/* , */" in mended
    assert '\n  "n": {"m": 1}' in mended


def test_everything_can_be_removed():
    document = of_data({"a": 1, "b": 2})
    assert parse(apply(document, [Removal("a"), Removal("b")])).config == {}


@pytest.mark.parametrize("end", ["\n}", "}", ",}", " // two\n}", "\r\n}"])
def test_the_comment_before_the_last_member_stays(end):
    mended = apply(parse(f'{{\n  "a": 1, // one\n  "b": 2{end}'), [Removal("b")])
    assert parse(mended).config == {"a": 1} and "// one" in mended


@pytest.mark.parametrize("text", ['{"a": {"b": 1,}}', '{"a": {\n  "b": 1 // one\n  ,\n}, "c": 2}'])
def test_the_only_member_is_removed_with_its_comma(text):
    document = parse(text)
    assert parse(apply(document, [Removal("a.b")])).config == {**document.config, "a": {}}


def test_cuts_come_before_the_other_edits():
    text = '{"a": 1, "b": 2,}'
    assert json.loads(apply(parse(text), [Assignment("b", 3), Deletion(text.rindex(","), text.rindex(",") + 1)])) == {
        "a": 1,
        "b": 3,
    }


def test_duplicates_are_cut_out_whatever_stands_around_them():
    from zerofit.check.check import mend
    from zerofit.check.subject import TargetHardware

    text = '{"bf16": {"enabled": false, "enabled": true} /* a, b */ , "train_batch_size": 1, "bf16": {"enabled": true}}'
    mended = parse(mend(parse(text), TargetHardware()))
    assert mended.config["bf16"] == {"enabled": True}
    assert not list(mended.duplicates())


YAML = """# a comment
{
  "a": {b: 1, "c": [1, 2], },  # of a
  'd': True,
  e: 1.0e-8, f: 1e-8, g: 2026-01-02, h: .inf, i: null
}
"""


def test_yaml_reads_as_pyyaml_does_and_knows_its_places():
    document = parse_yaml(YAML)
    theirs = yaml.safe_load(YAML)
    assert document.config == theirs | {"g": "2026-01-02", "h": ".inf"}  # of which JSON has no values
    assert [(document.place(p).line, document.place(p).column) for p in ("a.b", "a.c", "d", "f")] == [
        *((3, 9), (3, 15), (4, 3), (5, 14)),
    ]
    for path, text in (("a.b", "b"), ("a.c", '"c"'), ("d", "'d'")):
        place = document.place(path)
        assert YAML[place.start : place.end] == text


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Assignment("d", False), {"d": False}),
        (Assignment("a.z", {"y": 1}), {"a": {"b": 1, "c": [1, 2], "z": {"y": 1}}}),
        (Removal("a.c"), {"a": {"b": 1}}),
        (Renaming("a.b", "bb"), {"a": {"bb": 1, "c": [1, 2]}}),
        (Move("a.b", "b"), {"a": {"c": [1, 2]}, "b": 1}),
    ],
)
def test_yaml_in_braces_is_mended_in_place(edit, expected):
    text = apply(parse_yaml(YAML), [edit])
    assert yaml.safe_load(text) == yaml.safe_load(YAML) | expected
    assert "# of a" in text and "# a comment" in text


def test_yaml_by_indentation_is_not_edited_and_merges_are_followed():
    document = parse_yaml("base: &b\n  x: 1\nmine:\n  <<: *b\n  y: 2\n")
    assert not document.editable and parse_yaml(YAML).editable
    assert document.config["mine"] == {"x": 1, "y": 2}
    with pytest.raises(SyntaxFault) as fault:
        parse_yaml("a: 1\nb: [1\nc: 2\n")
    assert (fault.value.notation, fault.value.line) == ("YAML", 3)
