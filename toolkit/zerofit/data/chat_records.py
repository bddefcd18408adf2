"""The forms of conversations in files, and their messages as chat templates accept them.

    record:    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], ...}
    ChatForm   recognizes the record by its field "conversations" and reads its turns (`CHAT_FIELDS`)
    messages:  [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]

Forms are OpenAI's messages, ShareGPT's turns, Alpaca's instructions, and TRL's prompts with completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerofit.spec.errors import Problem, nearest
from zerofit.spec.foreign import Unreadable, parse_json

Record = Mapping[str, object]  # a JSON object of a file
Message = dict[str, Any]  # "role", "content", and other fields that a template may read

_ANSWERS = ("response", "answer", "completion", "target")  # other words for Alpaca's "output", e.g. Dolly's
_ROLES = {  # words of data sets, in lower case -> roles of templates
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
_SYSTEM = ("system", "system_prompt")  # fields for a system message
_SWITCHES = ("train", "training", "loss")  # other words for a weight of 0 or 1: axolotl's, ms-swift's
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that transformers treats like the first name
_TEMPLATE_FIELDS = ("tools", "functions", "documents", "chat_template_kwargs")  # fields next to the messages


class NotAConversation(ValueError):
    """A record is not a conversation in the expected form; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class ChatMessages:
    """Messages in order, in the form that chat templates accept."""

    messages: list[Message]  # {"role", "content"}, and other fields for templates; "weight" 0: not learned
    variables: dict[str, object] = field(default_factory=dict)  # "tools" and others that a template may read
    unread: tuple[str, ...] = ()  # fields of the record that its form does not use


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """One file format of conversations."""

    title: str  # as shown to the user
    field: str  # field that identifies the form
    partner: str | None = None  # a second field that must exist; if it is missing, `field` contains plain text
    read: Callable[[Record], list[Message]]  # returns the messages of a record; raises NotAConversation
    fields: tuple[str, ...]  # all fields that it reads
    example: str

    def hint(self, row: Record) -> str:
        """Return how to change a record that is not a conversation in this form."""
        nested = _nested(row)
        return _command(nested, "chats.jsonl") if nested else f"the {self.title} form is {self.example}"


def form_of(row: Record, text_field: str) -> ChatForm | None:
    """Return a record's form; None if `text_field` has plain text or the form is unknown."""
    if text_field in row and text_field not in CHAT_FIELDS:
        return None
    forms = [CHAT_FIELDS[text_field]] if text_field in CHAT_FIELDS else CHAT_FIELDS.values()
    return next((form for form in forms if form.field in row and form.partner in (None, *row)), None)


def refused_record(row: Record, text_field: str, where: str) -> Problem | None:
    """Return the problem that makes zerofit refuse a record; None if it accepts the record."""
    if text_field not in row and _is_turn(row):
        message = f"{where} is one conversation: each of its records is a message"
        hint = "make each record a conversation; for this file: jq -sc '{messages: flatten}' FILE > chats.jsonl"
        return Problem(kind="one-conversation", message=message, hint=hint, where=where)
    return judged_answers(row, text_field, where)


def _is_turn(row: Record) -> bool:
    """Return whether an object is a message in OpenAI's or ShareGPT's form."""
    return any(text in row and _role(row.get(speaker)) for speaker, text in (("role", "content"), ("from", "value")))


def judged_answers(row: Record, text_field: str, where: str) -> Problem | None:
    """Return a problem if a record has good and bad answers, which zerofit does not train on."""
    # The full text would teach the bad answers too. The prompt alone would teach no answers.
    has = {name for name, value in row.items() if value is not None}
    judged = next((judged for judged in _JUDGED if has >= judged[0]), None)
    if judged is None or text_field in has:
        return None
    _, title, trainer, keep = judged
    command = _command(keep, "good.jsonl")
    # DPO records may have the full conversation, as messages or as text, in place of an answer.
    if isinstance(row.get("chosen"), list):
        command = _command("{messages: .chosen}", "good.jsonl")
    elif isinstance(row.get("chosen"), str) and "prompt" not in has:
        command = "--text-field chosen"
    message = f"{where}: a {title}; zerofit trains on all text, so it would also learn bad answers"
    hint = f"TRL's {trainer} trains on these records; to learn the good answers alone: {command}"
    return Problem(kind="judged-answers", message=message, hint=hint, where=where)


# Records that need one of TRL's training methods: fields that identify them, what they are, TRL's trainer, and jq's
# expression for what can be learned of a record.
_JUDGED = (
    (
        {"chosen", "rejected"},
        "preference record (one answer is chosen, one rejected)",
        "DPOTrainer",
        "{prompt, completion: .chosen}",
    ),
    (
        {"preferred_output", "non_preferred_output"},
        "preference record (one answer is preferred)",
        "DPOTrainer",
        "{messages: (.input.messages + .preferred_output)}",
    ),
    (
        {"completion", "label"},
        "KTO record (a label marks the completion as good or bad)",
        "KTOTrainer",
        "select(.label) | {prompt, completion}",
    ),
    (
        {"kto_tag"},
        "KTO record (a tag marks the conversation as good or bad)",
        "KTOTrainer",
        "select(.kto_tag) | del(.kto_tag)",
    ),
    (
        {"completions", "labels"},
        "record of steps (a label marks each as right or wrong)",
        "PRMTrainer",
        'select(.labels | all) | {prompt, completion: (.completions | join("\\n"))}',
    ),
)


_EXPORTS = (  # fields of a chat program's export, and jq's expression for the conversation
    (
        {"mapping", "current_node"},  # ChatGPT's tree of messages: the branch that ends with the current one
        ".mapping as $all | {messages: ([.current_node | recurse($all[.].parent; . != null) | $all[.].message"
        ' | select(.content.content_type? == "text" and (.content.parts | add) != "")'
        " | {role: .author.role, content: (.content.parts | add)}] | reverse)}",
    ),
    ({"chat_messages"}, "{messages: [.chat_messages[] | {role: .sender, content: .text}]}"),  # Claude's
)
_GEMINI = (  # jq's expression for a record of Gemini's tuning files
    '{messages: [((.systemInstruction // .system_instruction // empty) | .role = "system"), .contents[]'
    ' | {role, content: (.parts | map(.text // error("a part without text")) | add)}]}'
)


def _command(expression: str, file: str) -> str:
    """Return a command that applies a jq expression to all records and writes `file`."""
    return f"jq -c '(arrays[], objects) | {expression}' FILE > {file}"


def _nested(row: Record) -> str:
    """Return jq's expression for conversations within a record; "" if there are none."""
    for fields, expression in _EXPORTS:
        if fields <= row.keys():
            return expression
    for name, value in row.items():
        path = f".[{json.dumps(name)}]"
        first = value[0] if isinstance(value, list) and value else None
        if name == "contents" and isinstance(first, Mapping) and "parts" in first:
            return _GEMINI
        if isinstance(value, Mapping) and form_of(value, ""):
            return path
        if isinstance(first, Mapping) and form_of(first, ""):
            return f"{path}[]"
        if name not in CHAT_FIELDS and isinstance(first, Mapping) and _is_turn(first):
            return f"{{messages: {path}}}"
    return ""


def field_hint(row: Record, field: str) -> str:
    """Return a hint for records without `field`."""
    if nested := _nested(row):
        return f"{_command(nested, 'chats.jsonl')} extracts the conversations"
    close = nearest(field, map(str, row))
    texts = [name for name, value in row.items() if isinstance(value, str)]
    lists = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1 and len(texts) < 2:
        return f"{_command(f'.[{json.dumps(lists[0])}][]', 'records.jsonl')} extracts the records"
    if close.startswith("did you mean") or len(texts) < 2:
        return f"set --text-field: {close}"
    # Records with several texts are often pairs, and training on one of the texts is seldom intended.
    first, second = (json.dumps(name) for name in texts[:2])
    command = _command(f"{{prompt: .[{first}], completion: .[{second}]}}", "pairs.jsonl")
    return f"--text-field NAME trains on that field alone; if one field is the answer to another, run {command}"


def conversation_of(row: Record, form: ChatForm) -> ChatMessages | str:
    """Return the conversation of a record, or the reason why it contains none."""
    row = {name: value for name, value in row.items() if value is not None}
    if form.field not in row:
        if other_form := form_of(row, ""):
            return f"this record has the {other_form.title} form, but earlier records have another form"
        return f"no field {form.field!r}; the record has {', '.join(map(str, row)) or 'none'}"
    if media := [name for name in _MEDIA if row.get(name)]:
        return f"the record has {', '.join(media)}; only text can be trained on"
    if form.field == "completion" and (judged := judged_answers(row, "", "")):
        return judged.message.removeprefix(": ")
    try:
        messages = form.read(row)
        variables = _variables(row) if form.field != "instruction" else {}
    except NotAConversation as error:
        return str(error)
    unread = [str(name) for name in row if name not in form.fields]
    # An empty answer would teach the model to end its turn at once.
    empty = [message for message in messages if message["role"] == "assistant" and not _has_text(message)]
    if any(message.get("weight", 1) for message in empty):
        unread.append("empty answers")
    for message in empty:
        message["weight"] = 0
    return ChatMessages(messages=messages, variables=variables, unread=tuple(unread))


def _variables(row: Record) -> dict[str, object]:
    """Return the template's variables in a record. Raises NotAConversation."""
    arguments = row.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise NotAConversation(f"'chat_template_kwargs' is {type(arguments).__name__}, need an object")
    documents = row.get("documents") or None
    if not isinstance(documents, list | None) or not all(isinstance(document, Mapping) for document in documents or ()):
        raise NotAConversation("'documents' is not a list of objects")
    named = {"tools": read_tools(row), "documents": documents}
    return {**arguments, **{name: value for name, value in named.items() if value is not None}}


def _chat(field: str) -> Callable[[Record], list[Message]]:
    """Return a reader of turns in OpenAI's or ShareGPT's form, and of a system message."""

    def read(row: Record) -> list[Message]:
        turns = row[field]
        if isinstance(turns, str):  # in columns of CSV and Parquet
            turns = _parsed(turns, field)
        if not isinstance(turns, list) or not turns:
            what = "empty" if isinstance(turns, list) else type(turns).__name__
            raise NotAConversation(f"{field!r} is {what}, need a list of turns")
        # Turns of ShareGPT become messages of OpenAI's form first, so both forms are checked by the same rules.
        messages = read_messages([_turn(turn, n) for n, turn in enumerate(turns, 1)])
        # Some records repeat their first message as the system message.
        return [*(message for message in read_messages(_system(row)) if message != messages[0]), *messages]

    return read


def _turn(turn: object, number: int) -> object:
    """Return a turn as a message that keeps the turn's other fields."""
    if not isinstance(turn, Mapping) or "role" in turn or "from" not in turn:
        return turn
    speaker, text = turn["from"], turn.get("value")
    if not (role := _role(speaker)):
        raise NotAConversation(f"turn {number} is from {speaker!r}; known: {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise NotAConversation(f"turn {number} ({speaker}) has no text for its value")
    fields = {key: value for key, value in turn.items() if key not in ("from", "value")}
    # ShareGPT's function_call is the assistant's turn, and its text is the JSON of one call or several.
    if speaker != "function_call":
        return {**fields, "role": role, "content": text}
    try:
        calls = parse_json(text)
    except Unreadable as error:
        raise NotAConversation(f"turn {number} (function_call) is not JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {**fields, "role": "assistant", "tool_calls": [tool_call(call, f"turn {number}") for call in calls]}


def _alpaca(row: Record) -> list[Message]:
    texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise NotAConversation(f"{name!r} is {type(text).__name__}, need a string")
    if not texts["output"]:
        others = [name for name, value in row.items() if isinstance(value, str) and name not in texts]
        answer = next(iter([name for name in others if name in _ANSWERS] or others), "")
        command = f"; if {answer!r} is the answer: {_command(f'.output = .[{json.dumps(answer)}]', 'NEW')}"
        raise NotAConversation("the instruction has no 'output'" + (command if answer else ""))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise NotAConversation("'history' is not a list of [instruction, answer]")
    prompt = "\n\n".join(str(texts[name]) for name in ("instruction", "input") if texts[name])
    pairs = [message for pair in [*history, [prompt, texts["output"]]] for message in _question_and_answer(*pair)]
    return read_messages([*_system(row), *pairs])


def _completion(row: Record) -> list[Message]:
    """Return the messages of TRL's prompt and completion, each a text or a list of messages."""
    prompt, completion = row.get("prompt"), row.get("completion")
    question, answer = _question_and_answer(prompt, completion)
    questions = prompt if isinstance(prompt, list) else [question]
    answers = completion if isinstance(completion, list) else [answer]
    messages = read_messages([*questions, *answers])
    for message in messages[: len(questions)]:
        if message["role"] == "assistant":
            message["weight"] = 0  # answers within the prompt are not learned
    return messages


def _question_and_answer(question: object, answer: object) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def _system(row: Record) -> list[Message]:
    """Return the system message that is a field of the record, if any."""
    return [{"role": "system", "content": row[name]} for name in _SYSTEM if row.get(name)]


def _role(word: object) -> str | None:
    return _ROLES.get(word.lower()) if isinstance(word, str) else None


def _has_text(message: Message) -> bool:
    """Return whether there is something to learn in an assistant's message."""
    return any(message.get(name) for name in ("tool_calls", *REASONING)) or bool(message.get("content", "").strip())


def _parsed(text: str, field: str) -> object:
    try:
        return parse_json(text) if text.strip() else []
    except Unreadable as error:
        raise NotAConversation(f"{field!r} is not JSON: {error}") from None


# Templates with `| tojson` need the dict: they would encode a string, such as OpenAI's JSON, a second time. Templates
# with `{{ arguments }}` need the text: they would print a dict in Python's notation. Records have either form.
class Arguments(dict[str, object]):
    """Arguments of a tool call: a dict for some templates, its JSON text for others."""

    def __init__(self, values: Mapping[str, object], text: str):
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, suffix: str) -> str:
        return self._text + suffix

    def __radd__(self, prefix: str) -> str:
        return prefix + self._text


def read_messages(turns: Sequence[object]) -> list[Message]:
    """Return messages in OpenAI's form without null fields, as transformers does.

    Raises NotAConversation.
    """
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: object, number: int) -> Message:
    message = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    role = _role(message.get("role"))
    if role is None:
        raise NotAConversation(f"message {number} has the role {message.get('role')!r}; known: {', '.join(_ROLES)}")
    message["role"] = role
    if role == "assistant":
        # Templates accept calls only in the newer form, not as OpenAI's "function_call".
        calls = message.pop("tool_calls", [])
        if not isinstance(calls, list):
            raise NotAConversation(f"message {number}: 'tool_calls' is {type(calls).__name__}, need a list")
        if "function_call" in message:
            calls = [*calls, message.pop("function_call")]
        if calls:
            place = f"message {number}, tool call"
            message["tool_calls"] = [tool_call(call, f"{place} {n}") for n, call in enumerate(calls, 1)]
        weight = message.get("weight", 1)
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise NotAConversation(f"message {number} has the weight {weight!r}; must be 1 (learned) or 0 (not)")
        switches = [message.pop(name) for name in _SWITCHES if isinstance(message.get(name), bool)]
        if not all(switches):
            message["weight"] = 0
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(part, number) for part in message["content"])
    if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
        raise NotAConversation(f"message {number} ({role}) has no text for its content")
    return message


def _part(part: object, number: int) -> str:
    """Return the text of one part of a message's content. Raises NotAConversation."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise NotAConversation(f"message {number} has a part of type {kind!r}; only text can be trained on")


def tool_call(call: object, place: str) -> dict[str, object]:
    """Return a call with its name and arguments under "function". Raises NotAConversation."""
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise NotAConversation(f"{place} names no function; expected {{'function': {{'name', 'arguments'}}}}")
    known = {"type": "function"} if function is call else {"type": "function", **call}
    return {**known, "function": {**function, "arguments": _arguments(function.get("arguments"), place)}}


def _arguments(arguments: object, place: str) -> Arguments:
    values = arguments
    if isinstance(arguments, str):
        try:
            values = parse_json(arguments) if arguments.strip() else {}
        except Unreadable as error:
            raise NotAConversation(f"{place}: its arguments are not JSON: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise NotAConversation(f"{place}: its arguments are {type(values).__name__}, need an object")
    text = arguments if isinstance(arguments, str) and arguments.strip() else json.dumps(values, ensure_ascii=False)
    return Arguments(values, text)


def read_tools(row: Record) -> list[dict[str, object]] | None:
    """Return the tools of a record as JSON schemas.

    The record may have them as JSON in a string, or as OpenAI's older "functions".
    """
    tools: list[dict[str, object]] = []
    for name in ("tools", "functions"):
        schemas = row.get(name) or []
        if isinstance(schemas, str):
            schemas = _parsed(schemas, name)
        if not isinstance(schemas, list) or not all(isinstance(tool, Mapping) for tool in schemas):
            raise NotAConversation(f"{name!r} is {type(schemas).__name__}, need a list of JSON schemas")
        for tool in schemas:
            is_bare = "name" in tool and "function" not in tool
            tools.append({"type": "function", "function": dict(tool)} if is_bare else dict(tool))
    return tools or None


CHAT_FIELDS: dict[str, ChatForm] = {
    form.field: form
    for form in (
        ChatForm(
            title="OpenAI messages",
            field="messages",
            read=_chat("messages"),
            fields=("messages", *_SYSTEM, *_TEMPLATE_FIELDS),
            example='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        ),
        ChatForm(
            title="ShareGPT",
            field="conversations",
            read=_chat("conversations"),
            fields=("conversations", *_SYSTEM, *_TEMPLATE_FIELDS),
            example='{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        ),
        ChatForm(
            title="Alpaca",
            field="instruction",
            read=_alpaca,
            fields=("instruction", "input", "output", *_SYSTEM, "history"),
            example='{"instruction": "...", "input": "...", "output": "..."}',
        ),
        ChatForm(
            title="prompt and completion",
            field="completion",
            partner="prompt",
            read=_completion,
            fields=("prompt", "completion", *_TEMPLATE_FIELDS),
            example='{"prompt": "...", "completion": "..."}, both texts or both lists of messages',
        ),
    )
}
