"""`zerofit generate --chat`: models that have learned two answers by heart, asked for them turn after turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.data.chats import write_tokenizer
from tests.infer.small import save
from zerofit.cli.main import main
from zerofit.data.chat_records import ChatMessages
from zerofit.data.chat_template import open_chat_template, tokenizer_files
from zerofit.data.tokenizer import open_tokenizer
from zerofit.infer.generate import Prompt, _TextStreamer
from zerofit.models.inputs import TextInputs

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello <you>!"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4, naïvely"},
]


def learned(folder: Path, tokenizer: str, template: str | None) -> Path:
    """A model that has learned TURNS, with its tokenizer and template."""
    given = Path(template) if template else None
    opened = open_chat_template(given, open_tokenizer(tokenizer))
    inputs = TextInputs(vocab_size=opened.tokenizer.vocab_size, seq_len=160)
    model = save(
        folder, "llama-tiny", {**TINY, "intermediate_size": 96, "vocab_size": inputs.vocab_size}, inputs
    ).train()
    (chat,) = opened.encode_all([ChatMessages(messages=TURNS)])
    ids = torch.from_numpy(chat.ids)[None]
    labels = torch.where(torch.from_numpy(chat.targets)[None], ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    model.save_pretrained(folder)
    tokenizer_files(tokenizer, given)(folder)
    card = json.loads((folder / "zerofit.json").read_text())
    (folder / "zerofit.json").write_text(json.dumps({**card, "tokenizer": tokenizer}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat")
    learned(path / "bytes", "bytes", None)
    learned(path / "tokens", str(write_tokenizer(path / "tokenizer")), "chatml")
    return path


def said(*args: object, typed: str, code: int = 0):
    done = CliRunner().invoke(main, ["generate", *map(str, args)], input=typed)
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize("name", ["bytes", "tokens"])
def test_each_line_is_a_turn(folder, name):
    """The end of a turn is a token of one model, and a text of the other; neither is shown."""
    options = ("--chat", "--temperature", 0, "--max-new-tokens", 60)
    done = said(folder / name, *options, "--json", typed="Hi\n\n2 + 2?\n/exit\nnever\n")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["turns"] == TURNS
    assert answer["tokens"] > 2 and answer["device_map"] == {"": "cpu"}
    assert said(folder / name, *options, typed="Hi\n2 + 2?").stdout == "Hello <you>!\n4, naïvely\n"


def test_a_template_by_name_and_a_system_message(folder):
    options = ("--chat", "--temperature", 0, "--max-new-tokens", 4, "--json", "--system", "Be brief.")
    done = said(folder / "tokens", *options, "--chat-template", "llama3", typed="Hi\n")
    assert [turn["role"] for turn in json.loads(done.stdout.splitlines()[-1])["turns"]] == [
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        (("--chat", "--prompt", "a"), "usage", "either --prompt TEXT or --chat"),
        ((), "usage", "--prompt TEXT or --chat"),
        (("--prompt", "a", "--system", "b"), "usage", "--system: only with --chat"),
        (("--chat", "--chat-template", "chatlm"), "chat-template", "did you mean chatml"),
    ],
)
def test_bad_input(folder, args, kind, words):
    done = said(folder / "bytes", *args, "--json", typed="", code=2)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["kind"] == kind and words in error["message"] + error["hint"]


def test_a_model_without_a_template_names_the_flag(folder, tmp_path):
    learned(tmp_path / "model", str(folder / "tokenizer"), "chatml")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    done = said(tmp_path / "model", "--chat", "--json", typed="Hi\n", code=2)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "has no chat template" in error["message"] and error["hint"].startswith("--chat-template ")


def test_a_conversation_that_is_too_long_ends(folder):
    done = said(folder / "bytes", "--chat", "--json", "--max-new-tokens", 4, typed="a" * 3000, code=2)
    assert json.loads(done.stdout.splitlines()[-1])["error"]["kind"] == "too-long"


def test_an_end_text_is_held_back_until_it_is_none():
    pieces: list[str] = []
    prompt = Prompt(ids=(1,), end_ids=frozenset([256]), decode=lambda ids: bytes(ids).decode(), end_text="<|end|>")
    stream = _TextStreamer(prompt, pieces.append)
    stream.put(torch.tensor([[1]]))
    for byte in b"a <|en b\n<|end|>":
        assert not stream.has_ended(torch.zeros(1, 1), None).any()
        stream.put(torch.tensor([byte]))
    assert stream.has_ended(torch.zeros(1, 1), None).all()
    stream.end()
    assert stream.text == "".join(pieces) == "a <|en b\n"
    assert not any("<|end" in piece for piece in pieces)
