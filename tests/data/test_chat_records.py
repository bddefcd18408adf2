"""Records with tool calls, weights, reasoning and judged answers: what templates get, and what is learned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.chats import unmarked, write_tokenizer
from zerofit.data.chat_records import CHAT_FIELDS, Arguments, ChatMessages, conversation_of
from zerofit.data.chat_template import EncodedChat, open_chat_template
from zerofit.data.limited import Exceeded, limited
from zerofit.data.tokenizer import open_tokenizer

CITY = {"city": "Tromsø", "days": [1, 2], "exact": None}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "mm", "parameters": {"type": "object"}}}]
# as families of models write a call: an object that is formatted, a text that is joined, either
CALLS = {
    "formatted": "{{- call.function.arguments | tojson }}",
    "joined": "{{- '' + call['function']['arguments'] + '' }}",
    "written": "{{- call.function.arguments }}",
    "either": "{%- if call.function.arguments is string %}{{- call.function.arguments }}"
    "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}",
}
TEXTS = {"formatted": False, "joined": True, "written": True, "either": True}  # what transformers must be given
TEMPLATE = """{%- if tools %}{{- '<|system|>' + (tools | tojson) }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content }}
        {%- for call in m.tool_calls or [] %}{{- '<tool>' + call.function.name + ' ' }}CALL{%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def calling(arguments, **fields):
    call = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    return [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "assistant", "content": "12 mm"},
    ]


def read(row, form="messages"):
    found = conversation_of(row, CHAT_FIELDS[form])
    assert isinstance(found, ChatMessages), found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


def encoded(folder, tmp_path, template, *chats):
    (tmp_path / "t.jinja").write_text(template)
    found = open_chat_template(tmp_path / "t.jinja", open_tokenizer(str(folder))).encode_all(chats)
    assert not any(isinstance(chat, str) for chat in found), found
    return [chat for chat in found if isinstance(chat, EncodedChat)]


@pytest.mark.parametrize("content", ["let me see", None])
@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_written_as_transformers_writes_them(folder, tmp_path, kind, content):
    from transformers import AutoTokenizer

    text, template = json.dumps(CITY, ensure_ascii=False), TEMPLATE.replace("CALL", CALLS[kind])
    as_object, as_text = calling(CITY, content=content), calling(text, content=content)
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        as_text if TEXTS[kind] else as_object,
        tools=TOOLS,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    rows = [{"messages": one, "tools": tools} for one in (as_object, as_text) for tools in (TOOLS, json.dumps(TOOLS))]
    for written in (template, unmarked(template)):
        for chat in encoded(folder, tmp_path, written, *map(read, rows)):
            assert chat.ids.tolist() == wanted["input_ids"]
            assert chat.targets.astype(int).tolist() == wanted["assistant_masks"]
            assert chat.unused == ("messages.tool_call_id",)


def test_calls_that_a_template_leaves_out_are_refused(tmp_path, refused):
    lines = [{"messages": calling("{}")}] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    problems = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64, chat_template=tmp_path / "t.jinja")
    assert [p.where for p in problems] == [f"{tmp_path}/a.jsonl:{n}" for n in (1, 2, 3)]
    assert "does not write the tool calls of message 2" in problems[0].message


def test_older_and_shorter_forms_are_the_same_calls():
    text = json.dumps(CITY)
    wanted = read({"messages": calling(text), "tools": TOOLS})
    old = calling(text)
    old[1] = {"role": "assistant", "content": None, "function_call": {"name": "rain", "arguments": text}}
    old[2] = {"role": "function", "content": "12"}
    turns = [
        {"from": "human", "value": "rain?"},
        {"from": "function_call", "value": json.dumps({"name": "rain", "arguments": CITY})},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "12 mm"},
    ]
    flat = [tool["function"] for tool in TOOLS]
    others = (
        read({"messages": old, "functions": flat}),
        read({"conversations": turns, "tools": json.dumps(flat)}, "conversations"),
    )
    for chat in others:
        assert chat.variables == wanted.variables
        for mine, theirs in zip(chat.messages, wanted.messages, strict=True):
            assert (mine["role"], mine.get("content")) == (theirs["role"], theirs.get("content"))
        (call,), (other,) = chat.messages[1]["tool_calls"], wanted.messages[1]["tool_calls"]
        assert call["function"] == other["function"] and isinstance(call["function"]["arguments"], Arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"function": {"arguments": "{}"}}, "names no function"),
        ({"function": {"name": "f", "arguments": "{oops"}}, "not JSON"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "list, need an object"),
        ({"function": {"name": "f", "arguments": 5}}, "int, need an object"),
        ("f()", "names no function"),
    ],
)
def test_broken_calls_have_a_reason(call, words):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    found = conversation_of({"messages": messages}, CHAT_FIELDS["messages"])
    assert isinstance(found, str) and words in found and "message 2, tool call 1" in found


@pytest.mark.parametrize("marks", [True, False])
def test_a_turn_of_weight_0_is_read_and_not_learned(folder, tmp_path, marks):
    weights = (0, 1, 0.0, True, None)
    messages = []
    for n, weight in enumerate(weights):
        messages += [
            {"role": "user", "content": f"q {n}"},
            {"role": "assistant", "content": f"a {n}", "weight": weight},
        ]
    template = TEMPLATE.replace("CALL", "")
    (chat,) = encoded(folder, tmp_path, template if marks else unmarked(template), read({"messages": messages}))
    said = open_tokenizer(str(folder)).decode(chat.ids[chat.targets].tolist())
    assert said == "a 1<|im_end|>a 3<|im_end|>a 4<|im_end|>"
    assert chat.unused == ()
    for weight in (0.5, 2, "0"):
        messages[1]["weight"] = weight
        assert "weight" in str(conversation_of({"messages": messages}, CHAT_FIELDS["messages"]))


def test_what_has_no_effect_is_counted_and_remembered(tmp_path, opened):
    turns = [
        {"role": "user", "content": "q", "name": "kim", "weight": 1},
        {"role": "assistant", "content": "a", "reasoning_content": "because", "score": 3},
    ]
    row = {"messages": turns, "tools": TOOLS, "documents": [{"text": "d"}], "id": 7, "source": None}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    for _ in range(2):  # made, and mapped
        data = opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=400)
        (note,) = [note for note in data.notes if note.startswith("training ignores")]
        for name in ("documents", "id", "messages.name", "messages.score", "messages.weight (except"):
            assert f"{name}" in note
        assert "(2 conversations)" in note
        assert not any(name in note for name in ("tools", "reasoning", "source", "content ("))
    said = [label for label in data.train.batch([0], [0])["labels"][0].tolist() if label >= 0]
    assert "because" in data.decode(said)


def test_histories_and_prompts_are_conversations(folder, tmp_path):
    alpaca = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}
    texts = [(one["role"], one["content"]) for one in read(alpaca, "instruction").messages]
    assert texts == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    pair = read({"prompt": "a", "completion": "b"}, "completion")
    assert [(one["role"], one["content"]) for one in pair.messages] == texts[:2]
    turns = [{"role": role, "content": text} for role, text in texts]
    chat = read({"prompt": turns[:3], "completion": turns[3:]}, "completion")
    (found,) = encoded(folder, tmp_path, TEMPLATE.replace("CALL", ""), chat)  # TRL learns completions alone
    assert open_tokenizer(str(folder)).decode(found.ids[found.targets].tolist()) == "d<|im_end|>"


def said_of(data):
    """The first sample's text, and the part of it that is learned."""
    batch = data.train.batch([0], [0])
    labels = batch["labels"][0].tolist()
    return data.decode(batch["inputs"][0].tolist()), data.decode([label for label in labels if label >= 0])


def run_jq(hint, file):
    """Run the command of a hint on a file; return the file that it writes."""
    if not shutil.which("jq"):
        pytest.skip("needs jq")
    command = hint[hint.index("jq ") :].split(" > ")[0].replace("FILE", str(file))
    made = file.with_name("mended.jsonl")
    made.write_text(subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout)
    return made


@pytest.mark.parametrize(("speaker", "text"), [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("in_lines", [True, False])
def test_a_file_of_one_conversation_is_named_and_its_command_mends_it(tmp_path, refused, speaker, text, in_lines):
    messages = [{speaker: "user", text: "2 + 2?"}, {speaker: "assistant", text: "4"}]
    content = "\n".join(map(json.dumps, messages)) if in_lines else json.dumps(messages)
    (tmp_path / "one.json").write_text(content)
    (problem,) = refused(data=f"jsonl:{tmp_path}/one.json")
    assert problem.kind == "one-conversation" and "{messages: flatten}" in problem.hint
    made = run_jq(problem.hint, tmp_path / "one.json")
    (problem,) = refused(data=f"jsonl:{made}")
    assert json.loads(made.read_text()) == {"messages": messages} and "has one conversation;" in problem.message


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]


GEMINI_QUESTION = {"role": "user", "parts": [{"text": "2 + 2?"}]}
GEMINI_ANSWER = {"role": "model", "parts": [{"text": "4"}]}


def exported(role, text, parent, child):
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}
    return {"message": message, "parent": parent, "children": [child]}


TREE = {  # ChatGPT's: the answer "5" was regenerated, so the branch of the current node does not have it
    "root": {"message": None, "parent": None, "children": ["s"]},
    "s": exported("system", "", "root", "q"),
    "q": exported("user", "2 + 2?", "s", "a"),
    "wrong": exported("assistant", "5", "q", ""),
    "a": exported("assistant", "4", "q", ""),
}


@pytest.mark.parametrize(
    "content",
    [
        {"version": 1, "data": [{"messages": CHAT}] * 2},
        {"conversations": [{"messages": CHAT}] * 2},
        [{"custom_id": "a", "method": "POST", "body": {"messages": CHAT}}] * 2,
        [{"id": 1, "conversation": CHAT}] * 2,
        [{"id": 1, "turns": TURNS}] * 2,
        [{"title": "t", "mapping": TREE, "current_node": "a"}] * 2,
        [{"name": "n", "chat_messages": [{"sender": "human", "text": "2 + 2?"}, {"sender": "assistant", "text": "4"}]}]
        * 2,
        [{"contents": [{"role": "user", "parts": [{"text": "2 + "}, {"text": "2?"}]}, GEMINI_ANSWER]}] * 2,
        [{"systemInstruction": {"parts": [{"text": "s"}]}, "contents": [GEMINI_QUESTION, GEMINI_ANSWER]}] * 2,
    ],
)
def test_commands_extract_nested_conversations_and_exports(tmp_path, refused, opened, content):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=1))
    made = run_jq(refused(data=f"jsonl:{tmp_path}/a.json")[0].hint, tmp_path / "a.json")
    text, learned = said_of(opened(data=f"jsonl:{made}", seq_len=96, packing=False))
    assert text.count("<|assistant|>") == 1 and "2 + 2?" in text and learned == "4<|end|>\n"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": CHAT},
        {"conversations": [{"from": "Human", "value": "2 + 2?"}, {"from": "GPT", "value": "4"}]},
        {"messages": [{"role": "User", "content": ["2 +", " 2?"]}, {"role": "model", "content": "4"}]},
        {"messages": json.dumps(CHAT)},
        CHAT,
    ],
)
def test_turns_of_either_form_and_other_words_for_roles(tmp_path, opened, row):
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 2)
    text, learned = said_of(opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64, packing=False))
    assert text.startswith("<|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>") and learned == "4<|end|>\n"


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_a_system_field_is_the_first_message_once(field, form):
    for turns in (CHAT, [{"role": "system", "content": "s"}, *CHAT]):
        for value in ("s", [{"text": "s"}]):
            chat = read({field: value, form: turns}, form)
            assert [one["content"] for one in chat.messages] == ["s", "2 + 2?", "4"] and chat.unread == ()


@pytest.mark.parametrize("switch", ["train", "training", "loss"])
def test_answers_that_are_switched_off_are_not_learned(tmp_path, opened, switch):
    bad, good = [{**turn, switch: on} for turn, on in zip(CHAT[1:] * 2, (False, True), strict=True)]
    row = {"messages": [CHAT[0], {**bad, "content": "5"}, CHAT[0], good, CHAT[0], {**CHAT[1], switch: 2.5}]}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 2)
    data = opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=200, packing=False)
    text, learned = said_of(data)
    assert "5<|end|>" in text and learned == "4<|end|>\n" * 2
    assert f"messages.{switch} (1 conversations)" in " ".join(data.notes)  # 2.5 is no switch


def test_empty_answers_are_not_learned_and_counted(tmp_path, opened, refused):
    empty = {"role": "assistant", "content": " \n"}
    for row, wanted in (([*CHAT, CHAT[0], empty], True), ([*CHAT, CHAT[0], {**empty, "weight": 0}], False)):
        (tmp_path / "a.jsonl").write_text((json.dumps({"messages": row}) + "\n") * 2)
        data = opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=200, packing=False)
        assert said_of(data)[1] == "4<|end|>\n" and ("empty answers (1" in " ".join(data.notes)) == wanted
    assert read({"messages": [CHAT[0], {**empty, "reasoning_content": "hm"}]}).unread == ()
    for row in ([CHAT[0], empty], [CHAT[0]], [{"role": "system", "content": "s"}], [CHAT[0], {**CHAT[1], "weight": 0}]):
        (tmp_path / "a.jsonl").write_text((json.dumps({"messages": row}) + "\n") * 3)
        (problem,) = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)
        assert "no assistant's message to learn" in problem.message


@pytest.mark.parametrize("media", [{"images": ["a.png"]}, {"image": "a.png"}, {"videos": ["a.mp4"]}])
def test_conversations_about_images_are_refused(tmp_path, refused, opened, media):
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": CHAT, **media}) + "\n") * 2)
    assert "only text can be trained on" in refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)[0].message
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": CHAT, **{name: [] for name in media}}) + "\n") * 2)
    assert len(opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64).train) == 1


@pytest.mark.parametrize(
    ("row", "trainer", "words"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "DPOTrainer", "completion: .chosen"),
        ({"chosen": "a", "rejected": "b"}, "DPOTrainer", "--text-field chosen"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": []}, "DPOTrainer", "messages: .chosen"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "DPOTrainer", "jq"),
        ({"input": {}, "preferred_output": [], "non_preferred_output": []}, "DPOTrainer", ".preferred_output"),
        ({"prompt": "p", "completion": "c", "label": True}, "KTOTrainer", "select(.label)"),
        ({"conversations": [], "kto_tag": False}, "KTOTrainer", "select(.kto_tag)"),
        ({"prompt": "p", "completions": ["a"], "labels": [True]}, "PRMTrainer", "all"),
    ],
)
def test_judged_answers_are_recognised(tmp_path, refused, row, trainer, words):
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (problem,) = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64)
    assert problem.kind == "judged-answers" and trainer in problem.hint and words in problem.hint


def test_a_field_that_is_named_is_read(tmp_path, opened):
    row = {"chosen": "Human: hello " * 30, "rejected": "b", "completion": "words " * 30}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 30)
    for field in ("chosen", "completion"):  # without a prompt a completion is plain text
        assert not opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=16, text_field=field).counts


def test_nulls_that_arrow_adds_are_no_arguments(tmp_path, opened, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [calling({"city": "Oslo"}), calling({"day": 5})]
    datasets.Dataset.from_dict({"messages": rows}).save_to_disk(str(tmp_path / "set"))
    data = opened(data=f"hf:{tmp_path}/set", seq_len=600)
    texts = [data.decode(part.batch([0], [0])["inputs"][0].tolist()) for part in (data.train, data.valid)]
    assert sorted('{"city": "Oslo"}' in text for text in texts) == [False, True]
    assert sorted('{"day": 5}' in text for text in texts) == [False, True]


def test_templates_past_limits_are_refused(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("zerofit.data.limited.MORE_BYTES", 1 << 28)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    doubled = "{% set x = namespace(s='aaaaaaaa') %}{% for a in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}x"
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
    for text, words in (
        (loops, "seconds of processor time"),
        (doubled, "GiB of memory"),
        ("{{ 'a' * 10**11 }}", "GiB of memory"),
        ("{% for a in range(999) %}{{ 'a' * 1000000 }}{% endfor %}", "more than 67,108,864 characters"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested"),
        ("{{" + "[" * 5000 + "]" * 5000 + "}}", "recursion"),
    ):
        monkeypatch.setattr("zerofit.data.limited.SECONDS", 0.2 if text == loops else 60)
        (tmp_path / "t.jinja").write_text(text)
        problem = refused(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=64, chat_template=tmp_path / "t.jinja")[0]
        assert problem.kind == "chat-template" and words in problem.message, (text[:40], problem)


def test_a_limited_process_that_is_killed_within_an_answer_is_reported():
    def work(number):
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # kills it while the pipe is full
        return "a" * 300_000

    answers = limited(work, range(2))
    assert next(answers) == "a" * 300_000
    time.sleep(0.5)
    with pytest.raises(Exceeded, match="SIGALRM"):
        next(answers)


def test_a_limited_process_ends_with_its_parent():
    code = "import os, signal; from zerofit.data.limited import limited\n"
    code += "answers = limited(lambda n: (os.getpid(), 'a' * 300_000), range(9)); print(next(answers)[0], flush=True)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":  # dead, perhaps not reaped
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the process waits for a reader that is gone")


def test_weights_and_calls_go_through_bytes(tmp_path, opened):
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": calling(json.dumps(CITY))}) + "\n") * 2)
    data = opened(data=f"jsonl:{tmp_path}/a.jsonl", seq_len=300)
    labels = data.train.batch([0], [0])["labels"][0].numpy()
    said = bytes(labels[labels >= 0].astype(np.uint8)).decode()
    arguments = json.dumps(CITY, ensure_ascii=False)
    assert said == (f'<tool_call>\n{{"name": "rain", "arguments": {arguments}}}\n</tool_call><|end|>\n12 mm<|end|>\n')
