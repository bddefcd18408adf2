"""Changes of a script's own flags, or of its DeepSpeed JSON, that would need less memory. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerofit.check.dotted import get
from zerofit.simulate.knobs import SMALL_BUCKET, edited
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import ScriptCommand
from zerofit.spec.foreign import Unreadable, read_json

_MICRO, _ACCUMULATION = "--per_device_train_batch_size", "--gradient_accumulation_steps"
_ARGUMENTS = (_MICRO, _ACCUMULATION, "--output_dir", "--deepspeed", "--max_steps")  # of TrainingArguments
_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16")
_ON_HOST = {"device": "cpu", "pin_memory": True}
_MAX_STAGE = 3

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScriptKnob:
    """One change of a command."""

    change: str  # in the words of the command or of the JSON
    command: ScriptCommand


def script_knobs(command: ScriptCommand, facts: ScriptFacts, ranks: int, folder: Path) -> list[ScriptKnob]:
    """Return the changes that can be made from outside; edited JSONs are written into `folder`."""
    found = _of_arguments(command, facts) if facts.trainer and _has(command.arguments, _ARGUMENTS) else []
    stages = range(facts.zero_stage + 1, _MAX_STAGE + 1) if facts.engines and ranks > 1 else range(0)
    file = named_config([*command.arguments, *command.launcher_words])
    if file is not None:
        return found + _of_json(command, Path(file), facts.zero_stage, stages, folder)
    if command.launcher == "accelerate launch" and facts.engines:
        found += [_launched(command, "--zero_stage", str(stage)) for stage in stages]
        found += [_launched(command, "--offload_optimizer_device", "cpu")] if facts.zero_stage else []
    return found


def named_config(words: Sequence[str]) -> str | None:
    """Return the word of a command that names a DeepSpeed JSON; None where none does."""
    for word in words:
        name = word.partition("=")[2] if word.startswith("--") else word
        if name.endswith(".json") and Path(name).is_file():
            try:
                content = read_json(Path(name))
            except (OSError, Unreadable):
                continue
            if any(key in content for key in _OF_DEEPSPEED):
                return name
    return None


def _of_arguments(command: ScriptCommand, facts: ScriptFacts) -> list[ScriptKnob]:
    """Return changes of TrainingArguments on the command line; the mathematics stay the same."""
    found = []
    if facts.micro_batch > 1 and facts.micro_batch % 2 == 0 and _has(command.arguments, (_MICRO,)):
        new = {_MICRO: str(facts.micro_batch // 2), _ACCUMULATION: str(2 * facts.accumulation)}
        found.append(_argued(command, new))
    if not facts.checkpointing:
        found.append(_argued(command, {"--gradient_checkpointing": "True"}))
    return found


def _argued(command: ScriptCommand, values: dict[str, str]) -> ScriptKnob:
    words = command.arguments
    for name, value in values.items():
        words = _with(words, name, value)
    changed = _everywhere(command, lambda given: (*given[: len(given) - len(command.arguments)], *words))
    return ScriptKnob(change=" ".join(f"{k} {v}" for k, v in values.items()), command=changed)


def _launched(command: ScriptCommand, name: str, value: str) -> ScriptKnob:
    """Change an option of the launcher, whose words end with the script and its arguments."""
    count = len(command.launcher_words) - len(command.arguments) - 1
    options, rest = command.launcher_words[:count], command.launcher_words[count:]
    options = _with(options, name, value) if name in options else (name, value, *options)
    return ScriptKnob(change=f"{name} {value}", command=replace(command, launcher_words=(*options, *rest)))


def _of_json(command: ScriptCommand, file: Path, stage: int, stages: range, folder: Path) -> list[ScriptKnob]:
    written = read_json(file)  # as `named_config` has read it
    section = written.get("zero_optimization")
    zero: dict[str, Any] = section if isinstance(section, dict) else {}
    changes = {f"zero_optimization.stage {n}": {"zero_optimization.stage": n} for n in stages}
    offload: dict[str, Any] = {"zero_optimization.offload_optimizer": _ON_HOST}
    if stage and get(zero, "offload_optimizer.device", "none") == "none":
        changes["offload_optimizer to the host"] = offload
    if stage == _MAX_STAGE and get(zero, "offload_param.device", "none") == "none":
        both = {**offload, "zero_optimization.offload_param": _ON_HOST}
        changes["offload_optimizer and offload_param to the host"] = both
    if stage and (get(zero, "reduce_bucket_size", 500_000_000) == "auto" or _large(zero)):
        sizes = {f"zero_optimization.{key}_bucket_size": SMALL_BUCKET for key in ("reduce", "allgather")}
        changes[f"buckets of {SMALL_BUCKET:,} elements"] = sizes
    found = []
    for n, (change, values) in enumerate(changes.items()):
        target = folder / str(n) / file.name
        target.parent.mkdir()
        target.write_text(json.dumps(edited(written, values)))
        changed = _everywhere(command, _replacing(str(file), str(target)))
        found.append(ScriptKnob(change=f"{file.name}: {change}", command=changed))
    return found


def _large(zero: dict[str, Any]) -> bool:
    return get(zero, "reduce_bucket_size", 500_000_000) > SMALL_BUCKET


def _replacing(old: str, new: str) -> Callable[[Words], Words]:
    def replaced(words: Words) -> Words:
        return tuple(new if w == old else f"{w.removesuffix(old)}{new}" if w.endswith(f"={old}") else w for w in words)

    return replaced


def _everywhere(command: ScriptCommand, change: Callable[[Words], Words]) -> ScriptCommand:
    """Change the script's arguments, which the launcher's words repeat."""
    launcher_words = change(command.launcher_words) if command.launcher_words else ()
    return replace(command, arguments=change(command.arguments), launcher_words=launcher_words)


def _has(words: Words, names: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in names for word in words)


def _with(words: Words, name: str, value: str) -> Words:
    """Return words in which an option has this value: the last one of its name, or one more."""
    for n in reversed(range(len(words))):
        if words[n] == name:
            end = n + 2 if n + 1 < len(words) and not words[n + 1].startswith("--") else n + 1
            return (*words[:n], name, value, *words[end:])
        if words[n].startswith(f"{name}="):
            return (*words[:n], f"{name}={value}", *words[n + 1 :])
    return (*words, name, value)
