"""Chat templates by name: the texts that the families of models document, and what is learned of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.data.chats import conversation, write_chats, write_tokenizer
from zerofit.data.chat_records import ChatMessages
from zerofit.data.chat_template import NAMED_TEMPLATES, open_chat_template, tokenizer_files
from zerofit.data.tokenizer import open_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2 + 2?"},
]
VICUNA = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
VICUNA += "detailed, and polite answers to the user's questions."
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# the conversation above, up to the next answer, as documented; then what replaces its system message without one
DOCUMENTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
        ("<|im_start|>system\nBe brief.<|im_end|>\n", ""),
    ),
    "qwen": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
        ("Be brief.", QWEN),
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>", ""),
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] 2 + 2? [/INST]",
        ("<<SYS>>\nBe brief.\n<</SYS>>\n\n", ""),
    ),
    "mistral": ("<s>[INST] Be brief.\n\nHi[/INST] Hello!</s>[INST] 2 + 2?[/INST]", ("Be brief.\n\n", "")),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n",
        ("Be brief.\n\n", ""),
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n<|user|>\n2 + 2?<|end|>\n"
        "<|assistant|>\n",
        ("<|system|>\nBe brief.<|end|>\n", ""),
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hello!<|im_end|><|im_start|>user<|im_sep|>2 + 2?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        ("<|im_start|>system<|im_sep|>Be brief.<|im_end|>", ""),
    ),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello!</s>\n<|user|>\n2 + 2?</s>\n<|assistant|>\n",
        ("<|system|>\nBe brief.</s>\n", ""),
    ),
    "vicuna": ("<s>Be brief. USER: Hi ASSISTANT: Hello!</s>USER: 2 + 2? ASSISTANT:", ("Be brief.", VICUNA)),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello!</s>\n\n"
        "### Instruction:\n2 + 2?\n\n### Response:\n",
        ("Be brief.", ALPACA),
    ),
}
ENDS = {  # what the assistant has to write after its words
    **dict.fromkeys(("chatml", "qwen", "phi4"), "<|im_end|>"),
    **dict.fromkeys(("mistral", "zephyr", "vicuna", "alpaca"), "</s>"),
    "llama2": " </s>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
}
OF_TRL = {"llama3": "llama3", "phi3": "phi3", "qwen": "qwen2_5", "gemma": "gemma3"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A tokenizer without a template."""
    return str(write_tokenizer(tmp_path_factory.mktemp("bare") / "tokenizer"))


def named(name: str, tokenizer: str):
    return open_chat_template(Path(name), open_tokenizer(tokenizer))


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_the_documented_text_and_marks(name, bare, tmp_path):
    template = named(name, bare)
    text, (system, default) = DOCUMENTED[name]
    assert template.prompt(TURNS) == text
    assert template.prompt(TURNS[1:]) == text.replace(system, default)
    tokenizer_files(bare, Path(name))(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == text
    wanted = saved.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    (chat,) = template.encode_all([ChatMessages(messages=TURNS)])
    assert isinstance(chat.ids.tolist(), list) and chat.ids.tolist() == wanted["input_ids"]
    assert chat.targets.astype(int).tolist() == wanted["assistant_masks"]
    said = template.tokenizer.decode(chat.ids[chat.targets].tolist())
    assert said.lstrip() == "Hello!" + ENDS[name]
    assert template.turn_end.startswith(ENDS[name])


@pytest.mark.parametrize("name", OF_TRL)
def test_trl_has_the_same(name, bare):
    """With tools and their calls where the format has them."""
    trl = pytest.importorskip("trl")
    text = (Path(trl.__file__).parent / "chat_templates" / f"{OF_TRL[name]}.jinja").read_text()
    theirs = AutoTokenizer.from_pretrained(bare)
    theirs.chat_template = text
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}] * 2
    answers = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    chats = [(conversation(n), None) for n in range(9)]
    if name == "qwen":
        for content in ("", "I add."):
            turn = {"role": "assistant", "content": content, "tool_calls": [call, call]}
            chats.append(([*TURNS, turn, *answers, {"role": "assistant", "content": "7"}], tools))
    shipped = AutoTokenizer.from_pretrained(bare)
    shipped.chat_template = named(name, bare).text
    for messages, given in chats:
        for prompt in (True, False):
            options = {"tokenize": False, "add_generation_prompt": prompt, "tools": given}
            wanted = theirs.apply_chat_template(messages, **options)
            assert shipped.apply_chat_template(messages, **options) == wanted


def test_names_are_checked(bare, tmp_path, refused, opened, monkeypatch):
    chats = write_chats(tmp_path / "chats.jsonl")
    (problem,) = refused(data=f"jsonl:{chats}", seq_len=64, tokenizer=bare, chat_template=Path("Llama-3"))
    assert (problem.kind, problem.where) == (
        "chat-template",
        "--chat-template",
    ) and "did you mean llama3" in problem.hint
    (problem,) = refused(data=f"jsonl:{chats}", seq_len=64, tokenizer=bare, chat_template=Path("none.jinja"))
    assert "cannot read" in problem.message
    (problem,) = refused(data=f"jsonl:{chats}", seq_len=64, chat_template=Path("mistral"))
    assert "--tokenizer bytes lacks" in problem.message
    notes = opened(data=f"jsonl:{chats}", seq_len=99, tokenizer=bare, chat_template=Path("phi4")).notes
    assert any(note.startswith("<|im_sep|>: not in the tokenizer") for note in notes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert named("chatml", bare).prompt(TURNS[1:2]) == "Hi!"


@pytest.mark.parametrize(
    ("tokens", "likely"),
    [
        (("<|im_start|>", "<|im_end|>"), "chatml"),
        (("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "phi4"),
        (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "llama3"),
        (("[INST]", "[/INST]"), "mistral"),
        (("<start_of_turn>", "<end_of_turn>"), "gemma"),
        ((), "zephyr"),
    ],
)
def test_without_a_template_the_likely_name_is_offered(tokens, likely, bare, tmp_path, refused):
    chats = write_chats(tmp_path / "chats.jsonl")
    file = json.loads((Path(bare) / "tokenizer.json").read_text())
    kept = {"<s>", "</s>", *tokens}
    added = [{**file["added_tokens"][0], "id": 500 + n, "content": token} for n, token in enumerate(tokens)]
    file["added_tokens"] = [one for one in file["added_tokens"] if one["content"] in kept - set(tokens)] + added
    vocabulary = file["model"]["vocab"]
    file["model"]["vocab"] = {
        token: number for token, number in vocabulary.items() if token in kept or token[0] not in "<["
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (problem,) = refused(data=f"jsonl:{chats}", seq_len=64, tokenizer=str(tmp_path))
    assert problem.hint.startswith(f"--chat-template {likely} ")
