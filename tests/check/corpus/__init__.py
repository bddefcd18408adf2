"""Broken configurations, one fault each, and what is said of them in their first lines.

// seen: where it was reported, or "constructed"
// also: why a second rule speaks of the same fault (where one does)
// setting: ranks=4 rank=0 accelerator=cpu pipeline=2 model=tiny precisions=fp32+bf16 (what the rule needs)
//          reader=deepspeed schedule=dualpipev one_thread=torchrun
// deepspeed: what the installed DeepSpeed does, as tests/check/deepspeed_says.py reads it
{ ... the faulty line ends with `// <- CODE`, or more of them ... }
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.check.document import Document, parse
from zerofit.check.subject import TargetHardware
from zerofit.spec.model_facts import ModelFacts

FOLDER = Path(__file__).parent
TINY = ModelFacts(
    task="causal-lm",
    parameters=1_200_000,
    largest_parameter=262_144,
    hidden_size=256,
    forward_flops=None,
    attention_heads=6,
    kv_heads=2,
)
_NUMBERS = ("ranks", "pipeline")


@dataclass(frozen=True)
class Case:
    """One file of the corpus."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def document(self) -> Document:
        return parse(self.text)

    def header(self, key: str) -> str:
        """What follows `// key:`; "" where there is no such line."""
        found = re.search(rf"^// {key}: (.*)$", self.text, re.MULTILINE)
        return found.group(1) if found else ""

    @cached_property
    def marks(self) -> list[tuple[int, str]]:
        """Line and code of all that `// <- CODE` marks."""
        lines = enumerate(self.text.splitlines(), 1)
        return sorted((n, code) for n, line in lines for code in line.partition("// <- ")[2].split())

    @cached_property
    def words(self) -> dict[str, str]:
        """The words of the setting line."""
        return dict(word.split("=") for word in self.header("setting").split())

    @cached_property
    def setting(self) -> TargetHardware:
        known: dict[str, Any] = {key: int(self.words[key]) for key in _NUMBERS if key in self.words}
        if "precisions" in self.words:
            known["precisions"] = tuple(self.words["precisions"].split("+"))
        if self.words.get("model") == "tiny":
            known["facts"] = TINY
        known["schedule"] = self.words.get("schedule", "1f1b")
        known["reader"] = self.words.get("reader", "zerofit")
        known |= {key: self.words.get(key) for key in ("accelerator", "one_thread")}
        return TargetHardware(**known)


def cases() -> list[Case]:
    """All of them, by name."""
    return [Case(path) for path in sorted(FOLDER.glob("*.json"))]
