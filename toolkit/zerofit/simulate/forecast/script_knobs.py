"""Find changes to a script's arguments, files or lines that would reduce memory.

Imports no torch.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerofit.simulate.forecast.knobs import SHOWN, edited, less_on_device
from zerofit.simulate.record import ScriptFacts
from zerofit.simulate.script.command import (
    CHECKPOINTS,
    EIGHT_BITS,
    HALVES,
    SHARDED,
    SHARDED_STATES,
    ScriptCommand,
    ScriptTarget,
)
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.foreign_yaml import read_yaml

_MICRO, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_ARGUMENTS = tuple(f"--{name}" for name in (_MICRO, _ACCUMULATION, "output_dir", "deepspeed", "max_steps"))
_SHARDED, _OFFLOADED = ("zero2", "zero3"), ("zero3_offload",)  # bundled JSONs
_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16")
_FSDP2: dict[str, object] = {"fsdp": True, "fsdp_config": {"version": 2}}  # of TrainingArguments
_EIGHT_BITS = {"optim": "adamw_bnb_8bit"}  # of TrainingArguments
_LIGER = {"use_liger_kernel": True}  # of TrainingArguments
# options that choose the kind of training; with one of them, accelerate does not read it from its file
_LAUNCHED_BY = ("--multi_gpu", "--use_deepspeed", "--use_fsdp", "--multi-gpu", "--use-deepspeed", "--use-fsdp")
_MAX_STAGE = 3

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScriptKnob:
    """One change to a training command: to the arguments, the files or the script."""

    change: str  # as in the command, the JSON or TrainingArguments
    command: ScriptCommand
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of TrainingArguments, instead of the script's values
    config: str | None = None  # the bundled DeepSpeed JSON for TrainingArguments
    edits: tuple[str, ...] = ()  # of the script (`zerofit.simulate.script.edits`)
    file: dict[str, object] | None = None  # content of the change's file, if that is not a DeepSpeed JSON

    def shards(self, original: ScriptCommand) -> bool:
        """Return whether the change moves or shrinks states. Two such changes cannot be combined."""
        of_states = {EIGHT_BITS, SHARDED, SHARDED_STATES} & {*self.edits}
        return bool(self.config or self.command != original or of_states or {"fsdp", "optim"} & {*self.arguments})

    def with_(self, other: ScriptKnob, original: ScriptCommand) -> ScriptKnob | None:
        """Return both changes as one; None if they exclude each other, or if `other` adds nothing."""
        if {*self.edits} & {*other.edits} or (self.shards(original) and other.shards(original)):
            return None
        command = self.command if other.command == original else other.command
        arguments, config = {**self.arguments, **other.arguments}, self.config or other.config
        if self.arguments == arguments and self.config == config and not other.edits and command == self.command:
            return None
        change = f"{self.change} and {other.change}"
        if all(knob.command == original and not knob.edits for knob in (self, other)):
            change = _as_arguments(command, {**arguments, **({"deepspeed": config} if config else {})})
        merged = {"arguments": arguments, "config": config, "edits": (*self.edits, *other.edits)}
        return ScriptKnob(change=change, command=command, file=self.file or other.file, **merged)

    def halved(self) -> ScriptKnob | None:
        """Return this change with half its micro batch; None if it sets none or an odd one."""
        micro = self.arguments.get(_MICRO, 1)
        if micro % 2:
            return None
        halves = {_MICRO: micro // 2, _ACCUMULATION: 2 * self.arguments[_ACCUMULATION]}
        text = self.change
        for name, value in halves.items():
            text = re.sub(rf"({name}[ =]){self.arguments[name]}\b", rf"\g<1>{value}", text)
        return replace(self, change=text, arguments={**self.arguments, **halves})


def script_knobs(command: ScriptCommand, facts: ScriptFacts, target: ScriptTarget, folder: Path) -> list[ScriptKnob]:
    """Return changes to arguments, files and lines, roughly from the least to the most slowdown.

    Files are written into `folder`.
    """
    ranks, on_gpu = target.world_size, target.on_gpu
    found = _of_trainer(command, facts, ranks, on_gpu) if facts.trainer else _of_lines(command, facts, ranks, on_gpu)
    if facts.accelerate and not facts.trainer and facts.sharding == "DDP":
        found += _of_accelerate(command, facts, target, folder)
    stages = range(facts.zero_stage + 1, _MAX_STAGE + 1) if facts.engines and ranks > 1 else range(0)
    file = named_config([*command.arguments, *command.launcher_words])
    if file is not None:
        return found + _of_json(command, Path(file), facts.zero_stage, stages, folder)
    if command.launcher == "accelerate launch" and facts.engines:
        found += [_launched(command, "--zero_stage", str(stage)) for stage in stages]
        found += [_launched(command, "--offload_optimizer_device", "cpu")] if facts.zero_stage else []
    return found


def named_config(words: Sequence[str]) -> str | None:
    """Return the argument that is the path of a DeepSpeed JSON; None if there is none."""
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


def _of_trainer(command: ScriptCommand, facts: ScriptFacts, ranks: int, on_gpu: bool) -> list[ScriptKnob]:
    """Return changes to a Trainer's arguments, fastest first.

    If the script uses neither DeepSpeed nor FSDP, changes that add them are included.
    """
    changes: list[dict[str, Any]] = []
    if facts.micro_batch > 1 and facts.micro_batch % 2 == 0:
        changes.append({_MICRO: facts.micro_batch // 2, _ACCUMULATION: 2 * facts.accumulation})
    checkpointing = {} if facts.checkpointing else {"gradient_checkpointing": True}
    changes += [checkpointing] if checkpointing else []
    if facts.takes_liger and on_gpu and all(map(find_spec, ("liger_kernel", "triton"))):
        changes = [_LIGER, *changes, *([{**checkpointing, **_LIGER}] if checkpointing else [])]
    if _takes_eight_bits(facts, on_gpu):
        changes += [_EIGHT_BITS, *([{**checkpointing, **_EIGHT_BITS}] if checkpointing and ranks == 1 else [])]
    if not facts.engines and not facts.sharding.startswith("FSDP"):
        sharded, offloaded = _SHARDED if ranks > 1 else (), _OFFLOADED
        changes += [{"deepspeed": name} for name in sharded]
        changes += [_FSDP2] if sharded else []
        changes += [{**checkpointing, "deepspeed": name} for name in sharded[-1:] if checkpointing]
        changes += [{"deepspeed": name} for name in offloaded]
        changes += [{**checkpointing, "deepspeed": name} for name in offloaded[-1:] if checkpointing]
    found = []
    for change in changes:
        text = _as_arguments(command, change)
        arguments = {name: value for name, value in change.items() if name != "deepspeed"}
        config, file = change.get("deepspeed"), change.get("fsdp_config")
        found.append(ScriptKnob(change=text, command=command, arguments=arguments, config=config, file=file))
    return found


def _as_arguments(command: ScriptCommand, change: Mapping[str, object]) -> str:
    """Return changed arguments of a Trainer in the user's style: as options, or as Python code."""
    typed = any(word.partition("=")[0] in _ARGUMENTS for word in command.arguments)
    shown = {name: f"{value}.json" if name == "deepspeed" else value for name, value in change.items()}
    words = [_typed(*pair) if typed else "{}={!r}".format(*pair) for pair in shown.items()]
    return " ".join(words) if typed else f"TrainingArguments({', '.join(words)})"


def _takes_eight_bits(facts: ScriptFacts, on_gpu: bool) -> bool:
    """Return whether the optimizer can have 8-bit moments: torch's Adam or AdamW on a GPU."""
    plain = facts.optimizer in ("Adam", "AdamW") and not facts.engines and not facts.sharding.startswith("FSDP")
    return on_gpu and plain and find_spec("bitsandbytes") is not None


def _of_lines(command: ScriptCommand, facts: ScriptFacts, ranks: int, on_gpu: bool) -> list[ScriptKnob]:
    blocks = f"for block in model.{facts.blocks}: "
    checkpoints = f"{blocks}block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    shown = {
        HALVES: "half the DataLoader's batch_size, optimizer.step() after every second batch",
        CHECKPOINTS: "model.gradient_checkpointing_enable()" if facts.checkpointing_switch else checkpoints,
        EIGHT_BITS: f"bitsandbytes.optim.{facts.optimizer}8bit(...) instead of torch.optim.{facts.optimizer}(...)",
        SHARDED_STATES: f"ZeroRedundancyOptimizer(parameters, {facts.optimizer}, ...) instead of {facts.optimizer}",
        SHARDED: f"{blocks if facts.blocks else ''}fully_shard(block); fully_shard(model) instead of DDP(model)",
    }
    found: list[tuple[str, ...]] = []
    found += [(HALVES,)] if facts.micro_batch > 1 and facts.micro_batch % 2 == 0 and not facts.engines else []
    recomputes = not facts.checkpointing and facts.pipeline_stages == 1 and (facts.checkpointing_switch or facts.blocks)
    found += [(CHECKPOINTS,)] if recomputes else []
    found += [(EIGHT_BITS,)] if _takes_eight_bits(facts, on_gpu) else []
    if ranks > 1 and facts.sharding == "DDP" and not facts.accelerate:
        found += [(SHARDED_STATES,)] if facts.optimizer in ("Adam", "AdamW") else []
        found += [(SHARDED,), *([(SHARDED, CHECKPOINTS)] if recomputes else [])]
    elif ranks == 1 and recomputes and (EIGHT_BITS,) in found:
        found += [(CHECKPOINTS, EIGHT_BITS)]
    return [ScriptKnob(change=" and ".join(shown[e] for e in edits), command=command, edits=edits) for edits in found]


# A script with an Accelerator and DDP leaves the sharding to Accelerate's file. So each change is a file that shards
# the model, with the user's own settings for everything else.
def _of_accelerate(command: ScriptCommand, facts: ScriptFacts, target: ScriptTarget, folder: Path) -> list[ScriptKnob]:
    """Return files for `accelerate launch --config_file`, for a script with an Accelerator."""
    fsdp: dict[str, object] = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    if facts.block:
        wrapped = {"fsdp_transformer_layer_cls_to_wrap": facts.block}
        fsdp |= {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **wrapped}
    offloaded = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    sections = {
        "zero2.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
        "zero3.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        "fsdp2.yaml": {"distributed_type": "FSDP", "fsdp_config": fsdp},
        "zero3_offload.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, **offloaded}},
    }
    recomputes = facts.checkpointing_switch and not facts.checkpointing
    found = []
    for name, section in sections.items():
        # the cluster's number of ranks replaces the file's, and `section` its way to shard; the rest is the user's
        file = folder / name
        content = {
            **_accelerate_file(command),
            "compute_environment": "LOCAL_MACHINE",
            **section,
            "num_machines": target.nodes,
            "num_processes": target.world_size,
        }
        file.write_text(json.dumps(content))
        options = tuple(word for word in _options(command) if word not in _LAUNCHED_BY)
        launcher_words = (*_with(options, "--config_file", str(file)), command.script, *command.arguments)
        changed = replace(command, launcher="accelerate launch", launcher_words=launcher_words)
        for edits in ((), (CHECKPOINTS,)) if recomputes and name != "zero2.yaml" else ((),):
            words = f"accelerate launch --config_file {name}"
            words += " and model.gradient_checkpointing_enable()" if edits else ""
            found.append(ScriptKnob(change=words, command=changed, edits=edits, file=content))
    return found


def _accelerate_file(command: ScriptCommand) -> dict[str, object]:
    """Return the content of the file that `accelerate launch` reads; {} if there is none."""
    file = Path(command.config_file)
    if not command.config_file:
        return {}
    return read_json(file) if file.suffix == ".json" else read_yaml(file)[0]


def _options(command: ScriptCommand) -> Words:
    """Return the options of `accelerate launch`.

    For a script with another launcher, return the options that it would need.
    """
    if command.launcher != "accelerate launch":
        return ("--module",) if command.is_module else ()
    return command.launcher_words[: -len(command.arguments) - 1]  # without the script and its arguments


def _typed(name: str, value: object) -> str:
    """Return an argument in HfArgumentParser's form."""
    # There, the name of a sharding strategy enables FSDP.
    if name == "fsdp":
        return "--fsdp full_shard"
    return f"--{name} " + (shlex.quote(json.dumps(value)) if isinstance(value, dict) else str(value))


def _launched(command: ScriptCommand, name: str, value: str) -> ScriptKnob:
    options = _options(command)
    rest = command.launcher_words[len(options) :]
    words = (*_with(options, name, value), *rest)
    return ScriptKnob(change=f"{name} {value}", command=replace(command, launcher_words=words))


def _of_json(command: ScriptCommand, file: Path, stage: int, stages: range, folder: Path) -> list[ScriptKnob]:
    written = read_json(file)  # already read once by `named_config`
    section = written.get("zero_optimization")
    zero: dict[str, object] = section if isinstance(section, dict) else {}
    changes: dict[str, dict[str, object]] = {
        f"zero_optimization.stage {n}": {"zero_optimization.stage": n} for n in stages
    }
    changes |= {SHOWN[name]: values for name, values in less_on_device(zero, stage).items()}
    found = []
    for n, (change, values) in enumerate(changes.items()):
        # a folder for each change, so that the file keeps its name
        target = folder / str(n) / file.name
        target.parent.mkdir()
        target.write_text(json.dumps(edited(written, values)))
        # the script, the launcher or both may name the file
        arguments, launcher_words = (
            _replaced(words, str(file), str(target)) for words in (command.arguments, command.launcher_words)
        )
        changed = replace(command, arguments=arguments, launcher_words=launcher_words)
        found.append(ScriptKnob(change=f"{file.name}: {change}", command=changed))
    return found


def _replaced(words: Words, old: str, new: str) -> Words:
    return tuple(new if w == old else f"{w.removesuffix(old)}{new}" if w.endswith(f"={old}") else w for w in words)


def _with(words: Words, name: str, value: str) -> Words:
    """Return `words` with the option `name` set to `value`.

    The last occurrence is replaced. If there is none, the option is appended. Accelerate also accepts `name` with
    hyphens instead of underscores.
    """
    for n in reversed(range(len(words))):
        option, joined, _ = words[n].partition("=")
        if option != name and option != f"--{name[2:].replace('_', '-')}":
            continue
        end = n + 2 if not joined and n + 1 < len(words) and not words[n + 1].startswith("--") else n + 1
        return (*words[:n], name, value, *words[end:])
    return (*words, name, value)
