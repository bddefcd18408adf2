"""Names that people type for models, matched with the presets: another spelling, a hub's repository, a quantized file.

A name is cut into words ("Qwen/Qwen3-8B-Instruct-GGUF": qwen, 3, 8b), without what changes no shape (instruct, dates).
A preset is taken where all words are equal to its own, or to those of a repository of its shape; else where it is the
only one that has all of them ("deepseek-r1:7b"). So neither size nor generation ever differs from what was typed.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from zerofit.models.presets import NAMED, Preset
from zerofit.spec.errors import Problem, UserError

WORDS = re.compile(r"\d+(?:\.\d+)?x\d+(?:\.\d+)?b|a\d+(?:\.\d+)?b|\d+(?:\.\d+)?[bmk](?![a-z])|v?\d+(?:\.\d+)*|[a-z]+")
SIZE = re.compile(r"[\dx.]+[bm]")
SAME_SHAPE = frozenset(
    ["meta", "instruct", "it", "chat", "hf", "pt", "sft", "dpo", "qat", "ud", "preview", "latest", "bf16", "fp16"]
)
DATE = re.compile(r"(0[1-9]|1[0-2])[0-3]\d|2[3-9](0[1-9]|1[0-2])")  # 0324, 2507
# what a file's name says of weights in few bits: -bnb-4bit, -AWQ, -GPTQ-Int4, -GGUF, :q4_K_M
QUANTIZED = re.compile(
    r"(?<![a-z0-9])(unsloth-)?(bnb|gguf|awq|gptq|exl[23]|mlx|nf4|fp8|nvfp4|mxfp4|imatrix|i?q\d_\w+|q\d|int[48]|[48]-?bit"
    r"|w\da\d+|quantized|dynamic)(?![a-z])"
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """The preset that a name is taken for."""

    name: str  # the preset's
    note: str  # what a user should know of it; empty where the name is the preset's own, or its repository's


def preset_of(name: str) -> Match | None:
    """Return the preset of a name, however it is spelled; None where none or several could be meant.

    >>> preset_of("qwen3:8b").note, preset_of("Qwen/Qwen3-8B").note, preset_of("qwen3")
    ('qwen3:8b is taken as qwen3-8b', '', None)
    """
    if name in NAMED:
        return Match(name=name, note="")
    plain = QUANTIZED.sub("", name.lower())
    found = _repositories().get(name.lower()) or _of_words(plain)
    if found is None:
        return None
    itself = _joined(_words(name)) == _joined(_words(found.name)) and name.lower() in _repositories()
    note = "" if itself else f"{name} is taken as {found.name}"
    if plain != name.lower():
        note += "; quantized weights cannot be trained as they are: only the shape is taken"
    return Match(name=found.name, note=note)


def left_out(model: str) -> str:
    """Return what a preset leaves out of the published model, as a sentence; empty where it leaves out nothing."""
    return f"{model} is {NAMED[model].note}" if model in NAMED and NAMED[model].note else ""


def relatives(name: str) -> list[str]:
    """Return names that a name could mean, in the table's order: those that begin alike, or a misspelling's nearest."""
    typed = _words(QUANTIZED.sub("", name.lower()))
    common = {spelled: _common(typed, words) for spelled, _, words in reversed(_spellings())}
    most = max(common.values())
    alike = {spelled: preset.name for spelled, preset, _ in _spellings() if common[spelled] == most}
    if most:
        own = {spelled: spelled if name not in alike else name for spelled, name in alike.items()}
        return list(dict.fromkeys(own.values()))
    return difflib.get_close_matches(name.lower().rpartition("/")[2], NAMED, n=3, cutoff=0.75)


def model_table(words: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return name, kind (its task), parameters and source of the models that have all words; of all without words.

    A word is looked for in a model's name, kind, family and repositories. Denoisers are left out where diffusers is not
    installed. Raises UserError where no model has all words.
    """
    rows = []
    for preset in NAMED.values():
        searched = " ".join((preset.name, preset.family, preset.kind, *preset.hub)).lower()
        if preset.library != "diffusers" or importlib.util.find_spec("diffusers"):
            row = {"name": preset.name, "kind": preset.kind, "parameters": preset.parameters, "source": preset.origin}
            rows += [row] if all(re.search(_from_start(word), searched) for word in words) else []
    if not rows:
        message, hint = f"no model has {' and '.join(words)} in its name", "`zerofit models` lists all names"
        raise UserError(Problem(kind="unknown-model", message=message, hint=hint, where="WORD"))
    return rows


def _of_words(plain: str) -> Preset | None:
    """Return the only preset with these words, all of them if there is one, without the date if need be."""
    typed = _words(plain)
    for words in filter(None, (typed, _undated(typed))):
        if (key := _joined(words)) in _joins():
            return _joins()[key]
        having = {preset.name for _, preset, theirs in _spellings() if set(words) <= set(theirs)}
        if len(having) == 1 and any(word.isalpha() and len(word) > 1 for word in words):
            return NAMED[having.pop()]
    return None


def _words(name: str) -> tuple[str, ...]:
    """Cut a name into words, its owner left out; "base" is a size where there is no other (bert-base)."""
    words = WORDS.findall(name.lower().rpartition("/")[2])
    base = {"base"} if any(map(SIZE.fullmatch, words)) else set()
    return tuple(word for word in words if word not in SAME_SHAPE | base)


def _joined(words: tuple[str, ...]) -> str:
    """Join words so that "llama3-8b" and "llama-3-8b" are equal, and "llama-38b" is another."""
    return re.sub(r"(?<=[a-z]) (?=[a-z])|(?<=[a-z]) (?=\d)|(?<=\d) (?=[a-z])", "", " ".join(words))


def _common(typed: tuple[str, ...], words: tuple[str, ...]) -> int:
    """Count the words with which both names begin."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(typed, words, strict=False))])


def _from_start(word: str) -> str:
    """Return the pattern of a word: one that begins with a digit, "4b", is not part of a longer number."""
    return (r"(?<![\d.])" if word[:1].isdigit() else "") + re.escape(word.lower())


@cache
def _spellings() -> list[tuple[str, Preset, tuple[str, ...]]]:
    """Return each preset's name with its words, and so each of its repositories."""
    spelled = [(name, preset) for preset in NAMED.values() for name in (preset.name, *preset.hub)]
    return [(name, preset, _words(name)) for name, preset in spelled]


@cache
def _repositories() -> dict[str, Preset]:
    return {name.lower(): preset for preset in NAMED.values() for name in preset.hub}


@cache
def _joins() -> dict[str, Preset]:
    """Return presets by their joined words: a preset's own name counts before repositories, these before undated."""
    found = {_joined(_words(preset.name)): preset for preset in reversed(NAMED.values())}
    dated = [(_joined(words), preset) for _, preset, words in _spellings()]
    sized = [(preset, words) for _, preset, words in _spellings() if any(map(SIZE.fullmatch, words))]
    undated = [(_joined(_undated(words)), preset) for preset, words in sized]
    for pairs in (dated, undated):
        meant: dict[str, set[str]] = {}
        for key, preset in pairs:
            meant.setdefault(key, set()).add(preset.name)
        found |= {key: preset for key, preset in pairs if len(meant[key]) == 1 and key not in found}
    return found


def _undated(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if not DATE.fullmatch(word))
