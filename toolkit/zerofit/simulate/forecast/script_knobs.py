"""Find changes to a script's flags or its DeepSpeed JSON that would reduce memory. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerofit.simulate.forecast.knobs import BUCKETS, PARAMETERS, SMALL_BUCKET, STATE, edited, less_on_device
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import ScriptCommand
from zerofit.spec.foreign import Unreadable, read_json

_MICRO, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_ARGUMENTS = tuple(f"--{name}" for name in (_MICRO, _ACCUMULATION, "output_dir", "deepspeed", "max_steps"))
_SHARDED, _OFFLOADED = ("zero2", "zero3"), ("zero3_offload",)  # bundled JSONs
_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16")
_FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}  # of TrainingArguments
_MAX_STAGE = 3
_SHOWN = {
    STATE: "offload_optimizer to the host",
    PARAMETERS: "offload_optimizer and offload_param to the host",
    BUCKETS: f"buckets of {SMALL_BUCKET:,} elements",
}

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScriptKnob:
    """One change to a command."""

    change: str  # as in the command, the JSON or TrainingArguments
    command: ScriptCommand
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of TrainingArguments, instead of the script's values
    config: str | None = None  # the bundled DeepSpeed JSON for TrainingArguments


def script_knobs(command: ScriptCommand, facts: ScriptFacts, ranks: int, folder: Path) -> list[ScriptKnob]:
    """Return the changes that need no edit of the script, roughly in the order of lost speed, least first.

    Edited JSONs are written into `folder`.
    """
    found = _of_trainer(command, facts, ranks) if facts.trainer else []
    stages = range(facts.zero_stage + 1, _MAX_STAGE + 1) if facts.engines and ranks > 1 else range(0)
    file = named_config([*command.arguments, *command.launcher_words])
    if file is not None:
        return found + _of_json(command, Path(file), facts.zero_stage, stages, folder)
    if command.launcher == "accelerate launch" and facts.engines:
        found += [_launched(command, "--zero_stage", str(stage)) for stage in stages]
        found += [_launched(command, "--offload_optimizer_device", "cpu")] if facts.zero_stage else []
    return found


def named_config(words: Sequence[str]) -> str | None:
    """Return the word of a command that names a DeepSpeed JSON; None if there is none."""
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


def _of_trainer(command: ScriptCommand, facts: ScriptFacts, ranks: int) -> list[ScriptKnob]:
    """Return changes to a Trainer's arguments, cheapest in speed first; they add DeepSpeed if the script has none."""
    changes: list[dict[str, Any]] = []
    if facts.micro_batch > 1 and facts.micro_batch % 2 == 0:
        changes.append({_MICRO: facts.micro_batch // 2, _ACCUMULATION: 2 * facts.accumulation})
    checkpointing = {} if facts.checkpointing else {"gradient_checkpointing": True}
    changes += [checkpointing] if checkpointing else []
    if not facts.engines and not facts.sharding.startswith("FSDP"):
        sharded, offloaded = _SHARDED if ranks > 1 else (), _OFFLOADED
        changes += [{"deepspeed": name} for name in sharded]
        changes += [_FSDP2] if sharded else []
        changes += [{**checkpointing, "deepspeed": name} for name in sharded[-1:] if checkpointing]
        changes += [{"deepspeed": name} for name in offloaded]
        changes += [{**checkpointing, "deepspeed": name} for name in offloaded[-1:] if checkpointing]
    typed = any(word.partition("=")[0] in _ARGUMENTS for word in command.arguments)
    found = []
    for change in changes:
        shown = {name: f"{value}.json" if name == "deepspeed" else value for name, value in change.items()}
        words = [_typed(*pair) if typed else "{}={!r}".format(*pair) for pair in shown.items()]
        text = " ".join(words) if typed else f"TrainingArguments({', '.join(words)})"
        arguments = {name: value for name, value in change.items() if name != "deepspeed"}
        found.append(ScriptKnob(change=text, command=command, arguments=arguments, config=change.get("deepspeed")))
    return found


def _typed(name: str, value: object) -> str:
    """Return an argument as HfArgumentParser reads it; FSDP's switch there is the name of its sharding."""
    if name == "fsdp":
        return "--fsdp full_shard"
    return f"--{name} " + (shlex.quote(json.dumps(value)) if isinstance(value, dict) else str(value))


def _launched(command: ScriptCommand, name: str, value: str) -> ScriptKnob:
    """Change a launcher option; its words end with the script and the script's arguments."""
    count = len(command.launcher_words) - len(command.arguments) - 1
    options, rest = command.launcher_words[:count], command.launcher_words[count:]
    options = _with(options, name, value) if name in options else (name, value, *options)
    return ScriptKnob(change=f"{name} {value}", command=replace(command, launcher_words=(*options, *rest)))


def _of_json(command: ScriptCommand, file: Path, stage: int, stages: range, folder: Path) -> list[ScriptKnob]:
    written = read_json(file)  # already read once by `named_config`
    section = written.get("zero_optimization")
    zero: dict[str, Any] = section if isinstance(section, dict) else {}
    changes: dict[str, dict[str, object]] = {
        f"zero_optimization.stage {n}": {"zero_optimization.stage": n} for n in stages
    }
    changes |= {_SHOWN[name]: values for name, values in less_on_device(zero, stage).items()}
    found = []
    for n, (change, values) in enumerate(changes.items()):
        target = folder / str(n) / file.name
        target.parent.mkdir()
        target.write_text(json.dumps(edited(written, values)))
        changed = _everywhere(command, _replacing(str(file), str(target)))
        found.append(ScriptKnob(change=f"{file.name}: {change}", command=changed))
    return found


def _replacing(old: str, new: str) -> Callable[[Words], Words]:
    def replaced(words: Words) -> Words:
        return tuple(new if w == old else f"{w.removesuffix(old)}{new}" if w.endswith(f"={old}") else w for w in words)

    return replaced


def _everywhere(command: ScriptCommand, change: Callable[[Words], Words]) -> ScriptCommand:
    """Change the script's arguments, also where the launcher's words repeat them."""
    launcher_words = change(command.launcher_words) if command.launcher_words else ()
    return replace(command, arguments=change(command.arguments), launcher_words=launcher_words)


def _has(words: Words, names: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in names for word in words)


def _with(words: Words, name: str, value: str) -> Words:
    """Return words with an option set to this value: its last occurrence is replaced, or it is appended."""
    for n in reversed(range(len(words))):
        if words[n] == name:
            end = n + 2 if n + 1 < len(words) and not words[n + 1].startswith("--") else n + 1
            return (*words[:n], name, value, *words[end:])
        if words[n].startswith(f"{name}="):
            return (*words[:n], f"{name}={value}", *words[n + 1 :])
    return (*words, name, value)
