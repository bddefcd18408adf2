"""GPT-NeoX's files: its own arguments, and the keys that it passes to DeepSpeed.

The names are from megatron/neox_arguments at commit ea7aefd8; - and _ in names are equivalent. GPT-NeoX builds
optimizers and schedulers itself, except compressed optimizers. It also passes on `fp32_allreduce`, which DeepSpeed
does not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

from zerofit.check.aliases import Aliases
from zerofit.check.catalog import read_data
from zerofit.check.finding import Finding, near, plainly

OWN_MADE = ("optimizer", "scheduler")
COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
# a file with two keys from one of these groups is for GPT-NeoX; - and _ are equivalent
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "train_iters")
OWN = ("pipe_parallel_size", "model_parallel_size", "pos_emb", "no_weight_tying", "data_path", "train_data_paths")
MOSTLY = 0.8  # share of GPT-NeoX's keys in one of its files: it merges several, and one may have only paths
DEGREES = ("pipe_parallel_size", "model_parallel_size")
PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16"}


@cache
def _names() -> Mapping[str, list[str]]:
    return read_data("neox.json")


def is_for_neox(config: object, *, yaml: bool) -> bool:
    """Return whether a file is for GPT-NeoX."""
    keys = {str(key).replace("-", "_") for key in config} if isinstance(config, Mapping) else set()
    # typical arguments or, in YAML, almost only keys that are arguments
    if any(sum(key in keys for key in typical) >= 2 for typical in (SIZES, OWN)):
        return True
    own = keys.intersection(_names()["own"])
    return yaml and bool(own) and len(own) + len(keys.intersection(_names()["handed_on"])) >= MOSTLY * len(keys)


def handed_on(config: Mapping[str, object]) -> Aliases:
    """Return the keys that GPT-NeoX passes to DeepSpeed, and their names in GPT-NeoX's file."""
    names = {key.replace("-", "_"): key for key in config}
    passed = {name: config[key] for name, key in names.items() if name in _names()["handed_on"]}
    optimizer = passed.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if str(kind).lower() not in COMPRESSED:
        passed = {name: value for name, value in passed.items() if name not in OWN_MADE}
    # `precision` switches the section of its type on
    precision = PRECISIONS.get(str(config.get("precision")))
    if precision is not None:
        section = passed.get(precision)
        passed[precision] = {**(section if isinstance(section, Mapping) else {}), "enabled": True}
    extra = config.get(names.get("deepspeed_extra_args", ""))
    written = {name: key for name, key in names.items() if name in passed and name != key}
    if isinstance(extra, Mapping):
        passed |= extra
        written |= {name: f"{names['deepspeed_extra_args']}.{name}" for name in extra}
    return Aliases(config=passed, written=written)


def unknown_arguments(config: Mapping[str, object]) -> Iterator[Finding]:
    """Yield findings about keys that are not arguments of GPT-NeoX."""
    known = [name for names in (_names()["own"], _names()["handed_on"]) for name in names]
    for key in config:
        name = key.replace("-", "_")
        if name in known:
            continue
        better = near(name, known)
        meant = better is not None and plainly(name, better)
        yield Finding(
            code="neox-argument",
            severity="warning",  # other versions may have these arguments
            path=key,
            message=f"GPT-NeoX has no argument {key!r}",
            why='GPT-NeoX stops: "got an unexpected keyword argument"',
            fix=f"did you mean {better}?" if meant else "remove it; keys for DeepSpeed belong in deepspeed_extra_args",
        )


def model_parallel(config: Mapping[str, object]) -> int:
    """Return the number of ranks per copy of the model."""
    degrees = (value for key, value in config.items() if key.replace("-", "_") in DEGREES)
    return math.prod(n for n in degrees if isinstance(n, int) and n > 1)
