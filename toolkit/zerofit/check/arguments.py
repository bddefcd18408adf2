"""Values that the Trainer, Accelerate and axolotl set for keys of the DeepSpeed JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerofit.check.argument_files import ArgumentFile
from zerofit.check.finding import Finding, near
from zerofit.check.reader import HUGGING_FACE
from zerofit.check.subject import MICRO, STEPS, TOTAL, GivenArgument, RequestedValue
from zerofit.features.zero import ZERO
from zerofit.spec.local_machine import is_older
from zerofit.spec.model_facts import ModelFacts, persistence_elements, prefetch_elements

PARAMS, SCHEDULE = "optimizer.params", "scheduler.params"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"

# keys that the Trainer fills or compares, and its arguments (transformers 5.23 integrations/deepspeed.py:118-230)
TRAINER = {
    MICRO: "per_device_train_batch_size",
    STEPS: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    f"{PARAMS}.lr": "learning_rate",
    f"{PARAMS}.eps": "adam_epsilon",
    f"{PARAMS}.weight_decay": "weight_decay",
    f"{SCHEDULE}.warmup_max_lr": "learning_rate",
}
DEFAULTS: dict[str, object] = {  # of TrainingArguments
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "fp16": False,
    "bf16": False,
    "fp16_full_eval": False,
    "bf16_full_eval": False,
    "auto_find_batch_size": False,
}
# axolotl passes its keys to the Trainer, and the keys below under another name. It leaves other arguments at the
# Trainer's defaults (core/builders/base.py, _set_base_training_args). LEFT_OPEN depends on the data or the device: no
# default is known.
AXOLOTL = {
    "per_device_train_batch_size": "micro_batch_size",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
LEFT_OPEN = ("per_device_train_batch_size", "learning_rate", "warmup_steps", "fp16", "bf16")
# arguments that a section of the JSON overrides, and the types in it with the same meaning
OVERRULED: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optim": (
        "optimizer.type",
        dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "adam")),
    ),
    "lr_scheduler_type": (
        "scheduler.type",
        {"linear": ("warmupdecaylr",), "cosine": ("warmupcosinelr",), "constant_with_warmup": ("warmuplr",)},
    ),
}
# Accelerate refuses these together with a JSON (1.15 utils/dataclasses.py:1334, plugin_to_config_mapping, and :1546)
PLUGIN = {
    "gradient_accumulation_steps": STEPS,
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{ZERO}.stage",
    "offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    "offload_param_device": f"{ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": GATHER,
}
# further keys of deepspeed_config (accelerate 1.15 commands/launch.py:409); launch.py:1267 ignores all others
LAUNCHED = (
    *("deepspeed_config_file", "zero3_init_flag", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"),
)
REFUSED = (
    'Accelerate stops, whatever the value is: "When using `deepspeed_config_file`, the following accelerate config '
    'variables will be ignored"'
)
WITHOUT = "Accelerate trains without DeepSpeed and ignores the JSON, unless the script passes it itself"
# values that replace "auto" in Accelerate if no argument is given (accelerator.py:2208)
FILLED_BY_DEFAULT: dict[str, object] = {
    f"{ZERO}.stage": 2,
    f"{ZERO}.offload_optimizer.device": "none",
    f"{ZERO}.offload_param.device": "none",
    GATHER: False,
    f"{SCHEDULE}.warmup_min_lr": 0,
}
# Both libraries use these sizes (transformers integrations/deepspeed.py:232, accelerate accelerator.py:2323).
BY_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": prefetch_elements,
    "stage3_param_persistence_threshold": persistence_elements,
}


def default_values(reader: str, facts: ModelFacts | None) -> Iterator[RequestedValue]:
    """Yield the values that Accelerate fills in for "auto" if no argument is given."""
    # The Trainer uses Accelerate.
    if reader not in HUGGING_FACE:
        return
    # The Trainer fills in its max_grad_norm instead, see TRAINER. Accelerate's own value is from accelerator.py:2224.
    clipping = {"gradient_clipping": 1.0} if reader == "accelerate" else {}
    for path, value in (FILLED_BY_DEFAULT | clipping).items():
        yield RequestedValue(path=path, value=value, source="Accelerate's default", compared=False)
    if facts is not None:
        width = facts.hidden_size
        for name, size in BY_WIDTH.items():
            source = f"from the model's hidden size {width}"
            yield RequestedValue(path=f"{ZERO}.{name}", value=size(width), source=source, compared=False)


def given_by(arguments: ArgumentFile) -> dict[str, GivenArgument]:
    """Return the arguments of known value in an argument file, by their names in it."""
    return {
        name: GivenArgument(value=given.value, source=f"{name} {given.value}", place=arguments.place(name))
        for name, given in arguments.values.items()
        if given.value is not None
    }


def requested_by(arguments: ArgumentFile, ranks: int | None) -> Iterator[RequestedValue]:
    """Yield the values that an argument file sets for keys of the JSON."""
    if arguments.kind == "accelerate":
        yield from _of_accelerate(arguments)
        return
    # With auto_find_batch_size, the Trainer changes the micro batch when the memory is full.
    automatic = _argument(arguments, "auto_find_batch_size")
    compared = not (automatic and automatic.value)
    for path, name in TRAINER.items():
        if argument := _argument(arguments, name):
            yield _requested(path, argument.value, [argument], compared=compared or path != MICRO)
    yield from _composed(arguments, ranks, compared)
    for name, (path, equivalents) in OVERRULED.items():
        written = _written(arguments, name)
        if isinstance(word := arguments.get(written), str):
            yield RequestedValue(
                path=path,
                value=equivalents.get(word, (word,)),
                source=f"{written} {word}",
                place=arguments.place(written),
                severity="warning",
                overruled="the Trainer uses the value of the JSON and ignores the argument",
            )


def _written(arguments: ArgumentFile, name: str) -> str:
    return AXOLOTL.get(name, name) if arguments.kind == "axolotl" else name


def _argument(arguments: ArgumentFile, name: str) -> GivenArgument | None:
    """Return an argument of the Trainer: as given, else its default; None if it is not known."""
    written = _written(arguments, name)
    axolotl = arguments.kind == "axolotl"
    if written in arguments.values:
        value = arguments.get(written)
        return given_by(arguments)[written] if isinstance(value, int | float) else None
    # axolotl computes the steps from its batch_size (utils/config, normalize_config)
    if axolotl and name == "gradient_accumulation_steps" and "batch_size" in arguments.values:
        total, micro = arguments.get("batch_size"), arguments.get("micro_batch_size")
        if not (isinstance(total, int) and isinstance(micro, int) and micro > 0):
            return None
        source = f"batch_size {total} in micro batches of {micro}"
        return GivenArgument(value=total // micro, source=source, place=arguments.place("batch_size"))
    if name not in DEFAULTS or arguments.open or (axolotl and name in LEFT_OPEN):
        return None
    return GivenArgument(value=DEFAULTS[name], source=f"{written} {DEFAULTS[name]}, its default")


def _requested(
    path: str, value: object, parts: list[GivenArgument], *, compared: bool = True, source: str = ""
) -> RequestedValue:
    place = next((part.place for part in parts if part.place), "")
    return RequestedValue(path=path, value=value, source=source or parts[0].source, place=place, compared=compared)


def _composed(arguments: ArgumentFile, ranks: int | None, compared: bool) -> Iterator[RequestedValue]:
    """Yield the values that depend on several arguments."""
    micro, steps, beta1, beta2 = (
        _argument(arguments, name) for name in (TRAINER[MICRO], TRAINER[STEPS], "adam_beta1", "adam_beta2")
    )
    if micro and steps and ranks:
        product = micro.value * steps.value * ranks
        source = f"per device {micro.value} x {steps.value} steps x {ranks} ranks = {product}"
        yield _requested(TOTAL, product, [micro, steps], compared=compared, source=source)
    if beta1 and beta2:
        yield _requested(
            f"{PARAMS}.betas", [beta1.value, beta2.value], [beta1, beta2], source=f"{beta1.source}, {beta2.source}"
        )
    # transformers sets fp16.enabled if one of fp16 and fp16_full_eval is true (trainer_config_process). So it is
    # certainly false only if both are known.
    for name in ("fp16", "bf16"):
        own, evaluation = (_argument(arguments, word) for word in (name, f"{name}_full_eval"))
        on = next((arg for arg in (own, evaluation) if arg and arg.value), None)
        if on:
            yield _requested(f"{name}.enabled", True, [on])
        elif own and evaluation:
            yield _requested(f"{name}.enabled", False, [own])
    yield from _schedule(arguments)


def _schedule(arguments: ArgumentFile) -> Iterator[RequestedValue]:
    """Yield the total and warm-up steps of the schedule if they do not depend on the data."""
    max_steps = arguments.get("max_steps")
    total = max_steps if isinstance(max_steps, int) and max_steps > 0 else 0
    if total:
        place = arguments.place("max_steps")
        yield RequestedValue(path=f"{SCHEDULE}.total_num_steps", value=total, source=f"max_steps {total}", place=place)
    # In transformers 5, a number of warmup_steps below 1 is a share of all steps. Older versions have the argument
    # warmup_ratio for this, which counts only without warmup_steps.
    older = "warmup_ratio" in arguments.values and not arguments.get("warmup_steps")
    warmup = _argument(arguments, "warmup_ratio" if older else "warmup_steps")
    if warmup and (warmup.value >= 1 or warmup.value == 0 or total):
        steps = int(warmup.value) if warmup.value >= 1 else math.ceil(total * warmup.value)
        # DeepSpeed stops with 0 steps, and transformers passes 1 instead since 5.18.
        least = 0 if is_older("transformers", (5, 18)) else 1
        yield _requested(f"{SCHEDULE}.warmup_num_steps", max(least, steps), [warmup])


def _of_accelerate(arguments: ArgumentFile) -> Iterator[RequestedValue]:
    """Yield the values of Accelerate's file that Accelerate refuses together with a JSON."""
    kind = arguments.get("distributed_type")
    if kind not in (None, "DEEPSPEED"):
        source, place = f"distributed_type {kind}", arguments.place("distributed_type")
        yield RequestedValue(path="", value=kind, source=source, place=place, severity="warning", refused=WITHOUT)
        return
    for name, path in PLUGIN.items():
        key = f"deepspeed_config.{name}"
        if key in arguments.values:
            value = arguments.get(key)
            yield RequestedValue(
                path=path, value=value, source=f"{name} {value}", place=arguments.place(key), refused=REFUSED
            )
    precision = mixed_precision(arguments)
    if precision:
        for name in ("fp16", "bf16"):
            value = precision == name
            if value or precision == "no":
                source, place = f"mixed_precision {precision}", arguments.place("mixed_precision")
                yield RequestedValue(path=f"{name}.enabled", value=value, source=source, place=place, refused=REFUSED)


def unknown_settings(arguments: ArgumentFile) -> Iterator[Finding]:
    """Yield findings about keys of `deepspeed_config` that Accelerate ignores."""
    known = [*PLUGIN, *LAUNCHED]
    for path, given in arguments.values.items() if arguments.kind == "accelerate" else ():
        section, _, key = path.partition(".")
        if section == "deepspeed_config" and key and key not in known:
            better = near(key, known)
            yield Finding(
                code="unknown-key",
                path="",
                effect="ignored",
                message=f"unknown key {key!r} in deepspeed_config ({arguments.place(path)})",
                why="Accelerate silently ignores it and uses its default",
                fix=f"did you mean {better}?" if better else "remove it",
                line=given.line,
                column=1,
            )


def mixed_precision(arguments: ArgumentFile) -> str | None:
    """Return Accelerate's precision, or None if it is not given."""
    word = arguments.get("mixed_precision")
    # YAML reads an unquoted `no` as false.
    return "no" if word is False else word if isinstance(word, str) else None


def plugin_config(arguments: ArgumentFile) -> tuple[dict[str, object], Mapping[str, int]]:
    """Return the JSON that Accelerate makes from its own keys, and the line of each key."""
    # as in utils/dataclasses.py:1365
    given = {name: arguments.get(f"deepspeed_config.{name}") for name in PLUGIN}
    zero: dict[str, Any] = {"stage": 2 if given["zero_stage"] is None else given["zero_stage"]}
    for what in ("optimizer", "param"):
        device = given[f"offload_{what}_device"] or "none"
        zero[f"offload_{what}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{what}"]["nvme_path"] = given[f"offload_{what}_nvme_path"]
    zero[GATHER.rpartition(".")[2]] = bool(given["zero3_save_16bit_model"])
    config: dict[str, object] = {TOTAL: "auto", MICRO: "auto", STEPS: given["gradient_accumulation_steps"] or "auto"}
    config |= {ZERO: zero, "gradient_clipping": given["gradient_clipping"] or "auto"}
    precision = mixed_precision(arguments)
    config |= {name: {"enabled": precision == name} for name in ("fp16", "bf16")}
    lines = {
        path: arguments.values[f"deepspeed_config.{name}"].line
        for name, path in PLUGIN.items()
        if f"deepspeed_config.{name}" in arguments.values
    }
    if "mixed_precision" in arguments.values:
        lines |= {f"{name}.enabled": arguments.values["mixed_precision"].line for name in ("fp16", "bf16")}
    return config, lines
