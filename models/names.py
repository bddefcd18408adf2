"""Find the preset for a typed model name.

The name may be another spelling, a hub repository or a quantized file. It is split into words
("Qwen/Qwen3-8B-Instruct-GGUF": qwen, 3, 8b). Words that do not affect the shape are left out (instruct, dates). A
preset matches if its name or one of its repositories has the same words. A preset also matches if it is the only one
with all the words ("deepseek-r1:7b"). So size and generation never differ from the typed name.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from zerofit.models.presets import NAMED, Preset
from zerofit.spec.errors import Problem, UserError

WORDS = re.compile(r"\d+(?:\.\d+)?x\d+(?:\.\d+)?b|a\d+(?:\.\d+)?b|\d+(?:\.\d+)?[bmk](?![a-z])|v?\d+(?:\.\d+)*|[a-z]+")
SIZE = re.compile(r"[\dx.]+[bm]")
SAME_SHAPE = frozenset(
    ["meta", "instruct", "it", "chat", "hf", "pt", "sft", "dpo", "qat", "ud", "preview", "latest", "bf16", "fp16"]
)
DATE = re.compile(r"(0[1-9]|1[0-2])[0-3]\d|2[3-9](0[1-9]|1[0-2])")  # 0324, 2507
# parts of a file's name about quantization: -bnb-4bit, -AWQ, -GPTQ-Int4, -GGUF, :q4_K_M
QUANTIZED = re.compile(
    r"(?<![a-z0-9])(unsloth-)?(bnb|gguf|awq|gptq|exl[23]|mlx|nf4|fp8|nvfp4|mxfp4|imatrix|i?q\d_\w+|q\d|int[48]|[48]-?bit"
    r"|w\da\d+|quantized|dynamic)(?![a-z])"
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """The preset that matches a name."""

    name: str  # the preset's
    note: str  # for the user; empty if the name is exactly the preset's or its repository's


def preset_of(name: str) -> Match | None:
    """Return the preset that matches a name; None if no preset or several presets match.

    >>> preset_of("qwen3:8b").note, preset_of("Qwen/Qwen3-8B").note, preset_of("qwen3")
    ('using qwen3-8b for qwen3:8b', '', None)
    """
    if name in NAMED:
        return Match(name=name, note="")
    plain = QUANTIZED.sub("", name.lower())
    preset = _repositories().get(name.lower()) or _of_words(plain)
    if preset is None:
        return None
    is_repository = _joined(_words(name)) == _joined(_words(preset.name)) and name.lower() in _repositories()
    note = "" if is_repository else f"using {preset.name} for {name}"
    if plain != name.lower():
        note += "; only its shape is used, since quantized weights cannot be trained"
    return Match(name=preset.name, note=note)


def left_out(model: str) -> str:
    """Return a sentence about the parts that a preset leaves out, or ""."""
    return f"{model} is {NAMED[model].note}" if model in NAMED and NAMED[model].note else ""


def relatives(name: str) -> list[str]:
    """Return the presets that a misspelled or incomplete name may mean, in the table's order.

    These are the presets whose names begin with the same words, or else the nearest spellings.
    """
    typed = _words(QUANTIZED.sub("", name.lower()))
    common = {}  # by spelling: the number of words at its beginning that are equal
    for spelled, _, words in reversed(_spellings()):
        pairs = zip(typed, words, strict=False)
        common[spelled] = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    most = max(common.values())
    alike = {spelled: preset.name for spelled, preset, _ in _spellings() if common[spelled] == most}
    if most:
        names = {spelled: spelled if name not in alike else name for spelled, name in alike.items()}
        return list(dict.fromkeys(names.values()))
    return difflib.get_close_matches(name.lower().rpartition("/")[2], NAMED, n=3, cutoff=0.75)


def model_table(words: tuple[str, ...] = ()) -> list[dict[str, str | int]]:
    """Return name, kind (task), parameters and source of the models that match all `words`.

    A word matches the name, kind, family or hub repository of a model. Denoisers are left out if diffusers is not
    installed. Raises UserError if no model matches.
    """
    # a word that begins with a digit ("4b") must not be part of a longer number
    patterns = [(r"(?<![\d.])" if word[:1].isdigit() else "") + re.escape(word.lower()) for word in words]
    rows: list[dict[str, str | int]] = []
    for preset in NAMED.values():
        searched = " ".join((preset.name, preset.family, preset.kind, *preset.hub)).lower()
        is_usable = preset.library != "diffusers" or importlib.util.find_spec("diffusers")
        if is_usable and all(re.search(pattern, searched) for pattern in patterns):
            row = {"name": preset.name, "kind": preset.kind, "parameters": preset.parameters, "source": preset.origin}
            rows.append(row)
    if not rows:
        message, hint = f"no model matches {' and '.join(words)}", "`zerofit models` lists all names"
        raise UserError(Problem(kind="unknown-model", message=message, hint=hint, where="WORD"))
    return rows


# Without a match, the words are compared again without dates.
def _of_words(plain: str) -> Preset | None:
    """Return the only preset that matches these words, or None."""
    typed = _words(plain)
    for words in filter(None, (typed, _undated(typed))):
        if (key := _joined(words)) in _joins():
            return _joins()[key]
        names = {preset.name for _, preset, preset_words in _spellings() if set(words) <= set(preset_words)}
        if len(names) == 1 and any(word.isalpha() and len(word) > 1 for word in words):
            return NAMED[names.pop()]
    return None


def _words(name: str) -> tuple[str, ...]:
    """Split a name without its owner into words. "base" is dropped if the name has a size."""
    words = WORDS.findall(name.lower().rpartition("/")[2])
    base = {"base"} if any(map(SIZE.fullmatch, words)) else set()
    return tuple(word for word in words if word not in SAME_SHAPE | base)


# Names on the hub, in Ollama and in papers separate words differently: llama3-8b, Llama-3-8B, llama-3:8b. Letters and
# digits are joined, but not two numbers, since 3-8b and 38b are two models.
def _joined(words: tuple[str, ...]) -> str:
    """Join words so that "llama3-8b" equals "llama-3-8b", but not "llama-38b"."""
    return re.sub(r"(?<=[a-z]) (?=[a-z])|(?<=[a-z]) (?=\d)|(?<=\d) (?=[a-z])", "", " ".join(words))


@cache
def _spellings() -> list[tuple[str, Preset, tuple[str, ...]]]:
    spelled = [(name, preset) for preset in NAMED.values() for name in (preset.name, *preset.hub)]
    return [(name, preset, _words(name)) for name, preset in spelled]


@cache
def _repositories() -> dict[str, Preset]:
    return {name.lower(): preset for preset in NAMED.values() for name in preset.hub}


# In the order of preference, because several presets can share a spelling: "qwen3-8b" is the name of a preset, and a
# repository Qwen3-8B-2507 without its date is the same. A spelling that two presets share matches neither.
@cache
def _joins() -> dict[str, Preset]:
    """Return three mappings from joined words to presets.

    The words are those of preset names, those of repositories, and those of both without dates.
    """
    presets = {_joined(_words(preset.name)): preset for preset in reversed(NAMED.values())}
    dated = [(_joined(words), preset) for _, preset, words in _spellings()]
    sized = [(preset, words) for _, preset, words in _spellings() if any(map(SIZE.fullmatch, words))]
    undated = [(_joined(_undated(words)), preset) for preset, words in sized]
    # Full names come before those without dates. A key that stands for several presets is left out.
    for pairs in (dated, undated):
        meant: dict[str, set[str]] = {}
        for key, preset in pairs:
            meant.setdefault(key, set()).add(preset.name)
        presets |= {key: preset for key, preset in pairs if len(meant[key]) == 1 and key not in presets}
    return presets


def _undated(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if not DATE.fullmatch(word))
