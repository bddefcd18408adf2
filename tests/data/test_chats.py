"""Conversations: their forms, templates, what is learned of them, and how they are packed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.data.chats import TEMPLATES, conversation, unmarked, write_chats, write_tokenizer
from zerofit.data import loader
from zerofit.data.chat_records import ChatMessages
from zerofit.data.chat_template import open_chat_template
from zerofit.data.chats import _count_targets, pack
from zerofit.data.tokenizer import open_tokenizer
from zerofit.spec.errors import UserError

CHATS = [conversation(n) for n in range(25)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of tokenizers by template."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: write_tokenizer(folder / name, text) for name, text in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_transformers(tokenizers, name):
    folder = tokenizers[name]
    template = open_chat_template(None, open_tokenizer(str(folder)))
    theirs = AutoTokenizer.from_pretrained(folder)
    found = template.encode_all([ChatMessages(messages=messages) for messages in CHATS])
    for messages, chat in zip(CHATS, found, strict=True):
        wanted = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert chat.ids.tolist() == wanted["input_ids"]
        assert chat.targets.astype(int).tolist() == wanted["assistant_masks"]
        assert 0 < chat.targets.sum() < len(chat.ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_marks_prefixes_find_the_same(tokenizers, tmp_path, name):
    tokenizer = open_tokenizer(str(tokenizers[name]))
    (tmp_path / "plain.jinja").write_text(unmarked(TEMPLATES[name]))
    plain = open_chat_template(tmp_path / "plain.jinja", tokenizer)
    assert not plain.marked
    chats = [ChatMessages(messages=messages) for messages in CHATS]
    marked = open_chat_template(None, tokenizer).encode_all(chats)
    for one, other in zip(plain.encode_all(chats), marked, strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.targets, other.targets)


def test_bytes_have_a_template_of_their_own():
    template = open_chat_template(None, open_tokenizer("bytes"))
    (chat,) = template.encode_all([ChatMessages(messages=CHATS[0])])
    said = bytes(chat.ids[chat.targets].astype(np.uint8)).decode()
    assert said == "".join(m["content"] + "<|end|>\n" for m in CHATS[0] if m["role"] == "assistant")


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path, refused):
    """As those do that drop the thoughts of earlier answers."""
    forgetful = unmarked(TEMPLATES["chatml"]).replace("m.content", "(m.content if loop.last else m.content[:3])", 1)
    (tmp_path / "forgetful.jinja").write_text(forgetful)
    lines = [json.dumps({"messages": conversation(n, turns)}) for n, turns in enumerate([1, 2, 1, 3] * 10)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    problems = refused(data=f"jsonl:{tmp_path}/chats.jsonl", seq_len=64, chat_template=tmp_path / "forgetful.jinja")
    assert [p.where for p in problems] == [f"{tmp_path}/chats.jsonl:{n}" for n in range(2, 41, 2)]
    assert {p.kind for p in problems} == {"chat-template"} and "differently if more messages follow" in problems[
        0
    ].message
    assert "{% generation %}" in problems[0].hint


def test_tool_calls_need_a_template_that_writes_them(tmp_path, opened, refused):
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "calls.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    asked = {"data": f"jsonl:{tmp_path}/calls.jsonl", "seq_len": 512}
    problems = refused(**asked, chat_template="chatml")
    assert "chatml writes no tool_calls, and message 2 has no other text" in problems[0].message
    data = opened(**asked, chat_template="qwen")
    assert "weather" in data.decode(data.train.batch([0], [0])["inputs"][0].tolist())


def test_templates_that_there_are_not(tmp_path, refused):
    chats = write_chats(tmp_path / "chats.jsonl")
    bare = write_tokenizer(tmp_path / "bare")
    assert refused(data=f"jsonl:{chats}", seq_len=64, tokenizer=str(bare))[0].kind == "chat-template"
    why = "roles must alternate user and assistant, " * 9 + "as in the last line"
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('" + why + "') }}")
    problems = refused(data=f"jsonl:{chats}", seq_len=64, chat_template=tmp_path / "strict.jinja")
    assert problems[0].message.endswith(f"rejects this conversation: {why}")
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    (problem,) = refused(data=f"jsonl:{chats}", seq_len=64, chat_template=tmp_path / "bad.jinja")
    assert problem.where == f"{tmp_path}/bad.jinja:1"
    (tmp_path / "a.txt").write_text("words " * 99)
    (problem,) = refused(data=f"text:{tmp_path}/a.txt", seq_len=8, chat_template=tmp_path / "bad.jinja")
    assert "plain text" in problem.message
    assert refused("masked-lm", 64, data=f"jsonl:{chats}")[0].kind == "data-task"


def test_forms_are_recognised(tmp_path, opened):
    asked, answer = "Add two.\n\n2 + 2", "4"
    forms = {
        "OpenAI messages": {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]},
        "ShareGPT": {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]},
        "Alpaca": {"instruction": "Add two.", "input": "2 + 2", "output": answer},
    }
    batches = []
    for title, row in forms.items():
        (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
        data = opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)
        assert title in data.notes[0]
        batches.append(data.train.batch([0], [0]))
    for name in ("inputs", "labels", "position_ids"):
        assert all((one[name] == batches[0][name]).all() for one in batches)
    said = [label for label in batches[0]["labels"][0].tolist() if label >= 0]
    assert data.decode(said) == "4<|end|>\n"


def test_broken_and_mixed_lines_are_listed(tmp_path, refused):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [
        good,
        {"conversations": [{"from": "human", "value": "a"}]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"other": 1},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\n{]\n"
    (tmp_path / "a.jsonl").write_text(text)
    problems = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)
    assert [p.where.split(":")[1] for p in problems] == list("2345678")
    words = ["ShareGPT", "'robot'", "'image_url'", "empty", "no text", "no field 'messages'", "not JSON"]
    assert all(word in p.message for word, p in zip(words, problems, strict=True))


def test_the_text_field_decides_where_there_are_both(tmp_path, opened):
    row = {"text": "plain words " * 9, "messages": conversation(1)}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 30)
    assert not opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16).counts
    assert opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=256, text_field="messages").counts["conversations"] == 28


@pytest.mark.parametrize("packing", [True, False])
def test_rows_have_each_conversation_once(tmp_path, opened, tokenizers, packing):
    chats = write_chats(tmp_path / "chats.jsonl", 80)
    silent = json.dumps({"messages": [{"role": "user", "content": "hello?"}]})
    with chats.open("a") as file:
        file.write(f"{silent}\n" * 40)
    length, folder = 80, tokenizers["chatml"]
    data = opened(data=f"jsonl:{chats}", seq_len=length, tokenizer=str(folder), packing=packing)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected, cut = [], 0
    for messages in [conversation(n) for n in range(80)]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = theirs.apply_chat_template(messages, **options)
        ids, mask = found["input_ids"][: length + 1], found["assistant_masks"][: length + 1]
        if any(mask[1:]):
            cut += len(found["input_ids"]) > length + 1
            said = [token if learned else -100 for token, learned in zip(ids[1:], mask[1:], strict=True)]
            expected.append((ids[:-1], said))
    seen, rows, cuts = [], 0, 0
    for split in (data.train, data.valid):
        batch = split.batch(range(len(split)), range(len(split)))
        assert (batch["labels"] >= 0).sum() == split.targets(range(len(split)))
        assert ("position_ids" in batch) == packing
        rows += len(split)
        for row in range(len(split)):
            at = 0
            for places in split.lengths(row):
                part = slice(at, at + places)
                seen.append((batch["inputs"][row, part].tolist(), batch["labels"][row, part].tolist()))
                if packing:
                    assert batch["position_ids"][row, part].tolist() == list(range(places))
                at += places
            assert (batch["labels"][row, at:] == -100).all()
            assert not packing or batch["position_ids"][row, at:].tolist() == list(range(length - at))
    assert sorted(seen) == sorted(expected)
    assert rows < len(seen) if packing else rows == len(seen)
    counts = data.counts
    assert counts["conversations"] + counts["validation_conversations"] == 120
    dropped = counts["conversations"] - sum(len(data.train.row(row)) for row in range(len(data.train)))
    assert 0 < counts["dropped"] == dropped
    cuts = sum(len(inputs) == length for inputs, _ in expected)
    assert 0 < counts["truncated"] <= cut <= cuts
    assert len(opened(data=f"jsonl:{chats}", seq_len=length, tokenizer=str(folder), packing=packing).train) == len(
        data.train
    )  # from the cache


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 5))
def test_targets_are_counted_also_with_empty_conversations(tokens, longest):
    marks = np.random.default_rng(sum(tokens)).random(sum(tokens)) < 0.5
    starts = np.concatenate([[0], np.cumsum(tokens)])
    used = np.minimum(np.maximum(np.diff(starts) - 1, 0), longest)
    expected = [marks[start + 1 : start + 1 + n].sum() for start, n in zip(starts, used, strict=False)]
    assert _count_targets(marks, starts[:-1] + 1, used).tolist() == expected


@given(st.lists(st.integers(1, 50), max_size=60))
def test_packing_loses_nothing(lengths):
    rows = pack(lengths, 50)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    totals = [sum(lengths[number] for number in row) for row in rows]
    assert all(total <= 50 for total in totals)
    assert all(one + other > 50 for n, one in enumerate(totals) for other in totals[:n])


def test_batches_come_whole_through_a_pipe(tmp_path, opened):
    data = opened(data=f"jsonl:{write_chats(tmp_path / 'chats.jsonl')}", seq_len=200)
    batch = {**data.train.batch([0, 1], [0, 0]), "positions": range(2), "indices": np.arange(2)}
    arrays = loader._to_arrays(batch)
    assert all(isinstance(arrays[name], np.ndarray) for name in ("inputs", "labels", "position_ids"))
    back = loader._to_tensors(arrays)
    assert all((back[name] == batch[name]).all() for name in batch if name != "positions")
    assert type(back["indices"]) is np.ndarray


@pytest.mark.parametrize("split", ["train", "validation"])
def test_conversations_of_a_data_set(tmp_path, opened, refused, monkeypatch, split):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    write_chats(tmp_path / "set" / "train.jsonl", 40)
    if split == "validation":
        write_chats(tmp_path / "set" / "validation.jsonl", 7)
    data = opened(data=f"hf:{tmp_path}/set", seq_len=400)
    expected = (40, 7) if split == "validation" else (38, 2)
    assert (data.counts["conversations"], data.counts["validation_conversations"]) == expected
    assert "OpenAI" in data.notes[0]
    said = [label for label in data.train.batch([0], [0])["labels"][0].tolist() if label >= 0]
    assert data.decode(said).endswith("<|end|>\n")
    write_chats(tmp_path / "set" / "train.jsonl", 3)
    with (tmp_path / "set" / "train.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "robot", "content": "hello"}]}\n')
    problems = refused(data=f"hf:{tmp_path}/set", seq_len=400)
    assert [p.where for p in problems] == [f"hf:{tmp_path}/set: train[3]"]


def test_nothing_to_learn_is_refused(tmp_path, refused):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 30)
    assert refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)[0].kind == "data-too-short"


def test_a_tokenizer_without_places_is_refused(tmp_path):
    class Slow:
        is_fast = False

    tokenizer = open_tokenizer("bytes")
    object.__setattr__(tokenizer, "loaded", Slow())
    with pytest.raises(UserError, match="does not return the character offsets"):
        open_chat_template(None, tokenizer)
