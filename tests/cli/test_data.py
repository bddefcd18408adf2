"""Conversations on the command line: a look at them, and commands that count their mask."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tests.cli.asking import answer
from tests.cli.test_named_inputs import refused
from zerofit.cli.main import main

TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
LINE = json.dumps({"messages": TURNS}) + "\n"
SMALL = ["llama-tiny", "--model-args", '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}']


def test_a_look_at_conversations(tmp_path):
    (tmp_path / "chats.jsonl").write_text(LINE * 4)
    shown = CliRunner().invoke(main, ["data", f"{tmp_path}/chats.jsonl", "--seq-len", "100", "--show", "1"])
    assert shown.exit_code == 0, shown.output
    assert (
        shown.stdout.count("⟦4<|end|>") == 2
        and "OpenAI" in shown.stdout
        and "padding" in shown.stdout.partition("⟧\n(")[2]
    )
    assert (
        shown.stdout.count(
            "the loss counts the text that is between ⟦ and ⟧; the model also reads the rest, but does not learn it"
        )
        == 1
    )
    view = answer("data", f"jsonl:{tmp_path}/chats.jsonl", "--seq-len", 100, "--show", 1)
    (sample,) = view["samples"]
    assert [[(seen["text"], seen["learned"]) for seen in document] for document in sample["documents"]] == [
        [("<|user|>\n2 + 2?<|end|>\n<|assistant|>\n", False), ("4<|end|>\n", True)]
    ] * 2
    assert view["counts"]["conversations"] == 3 and view["counts"]["dropped"] == 0


def test_a_look_at_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("plain words " * 99)
    (sample,) = answer("data", f"{tmp_path}/a.txt", "--seq-len", 12, "--show", 1)["samples"]
    assert [(seen["text"], seen["learned"]) for seen in sample["documents"][0]] == [
        ("p", False),
        ("lain words p", True),
    ]


def test_bad_lines_are_bad_input(tmp_path):
    (tmp_path / "chats.jsonl").write_text(LINE + '{"messages": 5}\n')
    assert "chats.jsonl:2:" in refused("data", f"{tmp_path}/chats.jsonl")
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * 200_000 + "}\n")
    (tmp_path / "long.jsonl").write_text('{"text": ' + "1" * 5_000 + "}\n")
    for name, words in (("deep", "nested more than"), ("long", "an integer has more than")):
        found = refused("data", f"{tmp_path}/{name}.jsonl")
        assert f"{name}.jsonl:1:1: not JSON: " in found and words in found
    assert "unknown kind of data" in refused("data", "nothing")


def test_the_same_fault_in_many_lines_is_one_message(tmp_path):
    row = {"instruction": "2 + 2?", "response": "4"}
    (tmp_path / "dolly.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    said = CliRunner().invoke(main, ["data", f"{tmp_path}/dolly.jsonl"]).stderr
    assert said.count("error:") == 1 and "at:" not in said
    assert f" also: {tmp_path}/dolly.jsonl:2, {tmp_path}/dolly.jsonl:3, {tmp_path}/dolly.jsonl:4 and more" in said
    assert """.output = .["response"]' FILE > NEW""" in said
    (tmp_path / "new.jsonl").write_text(f"{json.dumps(row | {'output': row['response']})}\n" * 9)
    assert answer("data", f"{tmp_path}/new.jsonl", "--seq-len", 100)["counts"]["dropped"] == 0


def test_data_does_not_command_the_terminal(tmp_path):
    """Here a window's title, and a text that is hidden."""
    row = json.dumps({"text": "\x1b]0;owned\x07" + "seen\tand\n" * 50 + "\x1b[8mhidden\x9b"})
    (tmp_path / "bad.jsonl").write_text(f"{row}\n" * 30)
    shown = CliRunner().invoke(main, ["data", f"{tmp_path}/bad.jsonl", "--seq-len", "500", "--show", "1"], color=True)
    assert shown.exit_code == 0, shown.output
    assert "\\x1b]0;owned\\x07seen\tand\n" in shown.stdout.replace("⟦", "")
    assert not set("\x1b\x07\x9b") & set(shown.stdout.replace("\x1b[1m", "").replace("\x1b[0m", ""))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"\x1b]0;owned\x07": 1}) + "\n")
    shown = CliRunner().invoke(main, ["data", f"{tmp_path}/bad.jsonl"])
    assert shown.exit_code == 2 and "the record has \\x1b]0;owned\\x07" in shown.stderr


def test_a_mask_is_counted_where_it_is_asked_for():
    pinned = [*SMALL, "--gpus", "2", "--gpu", "l4", "--seq-len", 1024, "--micro-batch", 1, "--zero-stage", 2]
    layouts = [answer("plan", *pinned, *more)["layouts"] for more in ([], ["--input", "packed"])]
    plain, packed = (rows[0]["peak_bytes"] for rows in layouts)
    pairs = 1024 * 1024  # of places: a byte for each, and torch's copy in 16 bits in each of two layers
    assert plain + pairs + 2 * pairs < packed <= plain + pairs + 2 * 2 * pairs
    assert all(row["pp"] == row["sp"] == 1 for row in layouts[1])
    assert "has no input packed" in refused("simulate", "t5-small", "--input", "packed", "--gpus", 2, "--gpu", "l4")
