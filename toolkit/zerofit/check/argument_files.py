"""Files used with a DeepSpeed JSON: training arguments, or Accelerate's configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from zerofit.check.document import parse, parse_yaml
from zerofit.check.dotted import leaves, put
from zerofit.check.finding import as_number
from zerofit.check.scan import ParsedValue, SyntaxFault

# No word of a script contains a NUL, since programs get their arguments as C strings.
UNKNOWN = "\0"  # marks the part of a word that is known only when the script runs
RUN = r"\$\(\(.*?\)\)|[$<>]\([^)]*\)|`[^`]*`"  # arithmetic, and command and process substitution inside a word
WORD = rf"""(?:'[^']*'|"(?:\\.|[^"\\])*"|{RUN}|\$\{{[^}}]*\}}|\\[^\n]|[^\s;&|<>'"\\`)])+"""
# The order of the alternatives matters: the 2 of `2>log` would also be a word. In `x2>log` the word is x2, as in bash.
TOKEN = re.compile(
    rf"""(?P<joined>\\\r?\n)
    |(?P<redirection>(?:(?<!\S)\d+|&)?(?:>>?|<{{1,3}})(?!\()(?:&[\d-]|&?[ \t]*{WORD}))
    |(?P<end>\r?\n|;|&&|\|\|?|&)
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<array>[A-Za-z_]\w*\+?=\()|(?P<close>\))
    |(?P<word>{WORD})
    |(?P<blank>.)""",
    re.DOTALL | re.VERBOSE,
)
PART = re.compile(
    rf"""'(?P<raw>[^']*)'|"(?P<quoted>(?:\\.|[^"\\])*)"|(?P<bare>(?:{RUN}|\$\{{[^}}]*\}}|\\.|[^'"])+)""", re.DOTALL
)
REFERENCE = re.compile(
    rf"""\\(?P<escaped>.)|{RUN}|\$\{{(?P<name>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}}]*))?\}}
    |\$(?P<short>\w+|[@*\#?$!-])|\$\{{[^}}]*\}}""",
    re.DOTALL | re.VERBOSE,
)
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
BEFORE = re.compile("export|local|declare|readonly|-[a-zA-Z]+")  # words before an assignment
KEPT = '$`"\\\n'  # in double quotes, a backslash before any other character is a character
THREADS = "OMP_NUM_THREADS"
FLAGS = {"true": True, "yes": True, "false": False, "no": False}
AXOLOTL = ("base_model", "micro_batch_size")  # axolotl's files have both keys; the Trainer's arguments have neither
ACCELERATE_JSON = "deepspeed_config.deepspeed_config_file"
# these set OMP_NUM_THREADS=1 if it is unset and they start several ranks (torch's distributed/run.py:980)
ONE_THREAD = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
TRAINING_FLAGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "deepspeed",
    "bf16",
    "fp16",
)


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of a command, and its line."""

    text: str
    line: int


def commands(text: str) -> Iterator[list[Word]]:
    """Yield the words of each command, without redirections and with the script's variables."""
    known: dict[str, list[Word]] = {}  # one word, or the words of an array
    words: list[Word] = []
    array: str | None = None
    line = 1
    for found in TOKEN.finditer(text):
        kind, token = found.lastgroup, found.group()
        if kind == "array":
            array = token[: token.index("=")].rstrip("+")
            known[array] = known.get(array, []) if "+=" in token else []
        elif kind == "close":
            array = None
        elif kind == "word" and array:
            known[array] = [*known[array], *_expanded(token, line, known)]
        elif kind == "word":
            # NAME=value at the beginning of a command, perhaps after `export`
            assigned = ASSIGNED.match(token) if all(BEFORE.fullmatch(word.text) for word in words) else None
            if assigned:
                value = " ".join(word.text for word in _expanded(assigned["value"], line, known))
                before = [*known.get(assigned["name"], [])] if assigned["more"] else []
                # `ARGS+=" --bf16"` adds words, which have a line of their own; `BATCH+=0` continues a word
                if before and not value[:1].isspace():
                    value = before.pop().text + value
                known[assigned["name"]] = [*before, Word(text=value, line=line)]
            else:
                words += _expanded(token, line, known)
        elif kind == "end" and words and not array:
            yield words
            words = []
        line += token.count("\n")
    if words:
        yield words


def _expanded(token: str, line: int, known: Mapping[str, list[Word]]) -> list[Word]:
    """Expand the variables of a token."""
    # An array, or a variable without quotes, may become several words.
    quoted = token.startswith('"')
    reference = REFERENCE.fullmatch(token.strip('"') if "[@]" in token else token)
    name = (reference["name"] or reference["short"] or "") if reference else ""
    if name in known:
        parts = ((word, [word.text] if quoted else word.text.split()) for word in known[name])
        return [Word(text=part, line=word.line) for word, texts in parts for part in texts]

    # Single quotes keep everything as it is. In double quotes and without quotes, \ escapes and $ expands.
    def unquoted(part: re.Match[str]) -> str:
        # In one pass: an escaped $ is no reference, and the text of a variable has no escapes.
        def replaced(found: re.Match[str]) -> str:
            escaped, words = found["escaped"], known.get(found["name"] or found["short"] or "")
            if escaped is None:
                return (found["default"] or UNKNOWN) if words is None else " ".join(word.text for word in words)
            return "" if escaped == "\n" else found.group() if part["quoted"] and escaped not in KEPT else escaped

        return part["raw"] or REFERENCE.sub(replaced, part["quoted"] or part["bare"] or "")

    return [Word(text=PART.sub(unquoted, token), line=line)]


@dataclass(frozen=True, kw_only=True)
class GivenValue:
    """A value and its line. The value is None if it is known only when the program runs."""

    value: object
    line: int


@dataclass(frozen=True, kw_only=True)
class ArgumentFile:
    """The values of one file that is used with the JSON, by dotted name."""

    file: str
    kind: str  # "trainer", "axolotl" or "accelerate"
    values: Mapping[str, GivenValue] = field(default_factory=dict)
    open: bool = False  # the command may get more arguments than this file shows
    one_thread: str | None = None  # the launcher that sets one thread per rank, and its place

    def get(self, name: str) -> Any:
        """Return a value, or None if it is missing or unknown."""
        return self.values[name].value if name in self.values else None

    def place(self, name: str) -> str:
        """Return the file and line of a value."""
        return f"{self.file}:{self.values[name].line}" if name in self.values else self.file

    @property
    def config_file(self) -> str | None:
        """The DeepSpeed JSON that the file names."""
        name = self.get(ACCELERATE_JSON if self.kind == "accelerate" else "deepspeed")
        return name if isinstance(name, str) else None

    def section(self, name: str) -> tuple[dict[str, Any], Mapping[str, int]]:
        """Return the known values in a section, and the line of each by dotted name."""
        prefix = f"{name}."
        values = {k.removeprefix(prefix): given for k, given in self.values.items() if k.startswith(prefix)}
        config: dict[str, object] = {}
        for path, given in values.items():
            put(config, path, given.value)
        return config, {path: given.line for path, given in values.items()}

    @property
    def ranks(self) -> int | None:
        """The number of ranks that the command starts; None if the command does not set it."""
        # DeepSpeed's launcher, then torchrun; Accelerate counts the ranks of all nodes together
        per_node = self._first_count("num_gpus", "nproc_per_node")
        if per_node:
            nodes = self._first_count("num_nodes", "nnodes")
            # `--nnodes $NODES` and `--nnodes 1:4` are decided when the script runs, as are the hosts of a hostfile
            is_open = nodes is None and any(name in self.values for name in ("num_nodes", "nnodes", "hostfile"))
            return None if is_open else per_node * (nodes or 1)
        return self._first_count("num_processes")

    def _first_count(self, *names: str) -> int | None:
        """Return the first of these arguments that is a positive integer, or None."""
        values = (self.get(name) for name in names)
        return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def read_argument_file(file: str, text: str, *, accelerate: bool) -> ArgumentFile:
    """Read a JSON, YAML or shell script.

    Raises SyntaxFault for bad syntax or a script without a training command.
    """
    script = not accelerate and not file.endswith((".json", ".yaml", ".yml")) and not text.lstrip().startswith("{")
    if script:
        return _of_script(file, text)
    values = dict(_given((parse if text.lstrip().startswith("{") else parse_yaml)(text).root))
    kind = "accelerate" if accelerate else "axolotl" if all(name in values for name in AXOLOTL) else "trainer"
    return ArgumentFile(file=file, kind=kind, values=values)


def of_mapping(values: Mapping[str, object], *, accelerate: bool) -> ArgumentFile:
    """Return values from Python as an `ArgumentFile`, all at line 1."""
    given = {key: GivenValue(value=_parsed(value), line=1) for key, value in leaves(values)}
    return ArgumentFile(
        file="accelerate_config" if accelerate else "training_args",
        kind="accelerate" if accelerate else "trainer",
        values=given,
    )


def _given(value: ParsedValue, prefix: str = "") -> Iterator[tuple[str, GivenValue]]:
    for member in value.members:
        name = f"{prefix}{member.key}"
        if member.value.members:
            yield from _given(member.value, f"{name}.")
        else:
            yield name, GivenValue(value=_parsed(member.value.data), line=member.place.line)


def _of_script(file: str, text: str) -> ArgumentFile:
    """Return the arguments of the first command in a shell script that trains."""
    for words in commands(text):
        values = dict(_flags(words))
        if any(name in values for name in TRAINING_FLAGS):
            # A word like "$@" or $EXTRA_ARGS may be more arguments, unless it is the value of a flag.
            previous = ["", *(word.text for word in words)]
            open_ended = any(
                word.text == UNKNOWN and not (before.startswith("--") and "=" not in before)
                for before, word in zip(previous, words, strict=False)
            )
            # Anywhere in the script: it may be exported, set before the command, or an argument of `env`.
            one_thread = None if THREADS in text else _one_thread(file, words, values)
            return ArgumentFile(file=file, kind="trainer", values=values, open=open_ended, one_thread=one_thread)
    raise SyntaxFault("no command with training arguments (--per_device_train_batch_size, --deepspeed, ...)", 1, 1)


def _one_thread(file: str, words: list[Word], values: Mapping[str, GivenValue]) -> str | None:
    """Return the launcher that starts several ranks with one thread each, or None."""
    for word in takewhile(lambda word: not word.text.endswith(".py"), words):
        name = word.text.rpartition("/")[2]
        if name in ONE_THREAD:
            count = values.get("num_processes" if name == "accelerate" else "nproc_per_node")
            # The default of torchrun is one rank, that of Accelerate all GPUs.
            several = name == "accelerate" if count is None else count.value != 1
            return f"{name} ({file}:{word.line})" if several else None
    return None


def _flags(words: list[Word]) -> Iterator[tuple[str, GivenValue]]:
    """Yield the flags of a command: `--name value`, `--name=value` and `--name` (true)."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        if not word.text.startswith("--"):
            continue
        name, sign, value = word.text[2:].partition("=")
        if not sign:
            value = "true" if following is None or following.text.startswith("--") else following.text
        # transformers accepts - and _ in a flag's name alike
        yield name.replace("-", "_"), GivenValue(value=_parsed(value), line=word.line)


def _parsed(value: object) -> object:
    """Return the number or boolean that a text means; None for a value of a later time."""
    if not isinstance(value, str):
        return value
    if UNKNOWN in value:
        return None
    number = as_number(value)
    return FLAGS.get(value.lower(), value) if number is None else number
