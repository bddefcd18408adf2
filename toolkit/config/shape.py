"""Types and ranges of the DeepSpeed JSON's values that zerofit itself reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerofit.config.ds_json import get
from zerofit.spec.errors import Problems

Test = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


OBJECT: tuple[Test, str] = (lambda v: isinstance(v, Mapping), "an object {...}")
COUNT: tuple[Test, str] = (_positive_int, "a whole number from 1 on")
FLAG: tuple[Test, str] = (lambda v: isinstance(v, bool), "true or false")
NOT_NEGATIVE: tuple[Test, str] = (lambda v: _number(v) and v >= 0, "a number from 0 on")
POSITIVE: tuple[Test, str] = (lambda v: _number(v) and v > 0, "a number above 0")
NAME: tuple[Test, str] = (lambda v: isinstance(v, str) and bool(v), "a name")
DEVICE: tuple[Test, str] = (lambda v: v in ("none", "cpu", "nvme", None), '"none", "cpu" or "nvme"')

# outer objects before what stands in them
SHAPES: dict[str, tuple[Test, str]] = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": NOT_NEGATIVE,
    "sequence_parallel_size": COUNT,
    "bf16": OBJECT,
    "bf16.enabled": FLAG,
    "fp16": OBJECT,
    "fp16.enabled": FLAG,
    "optimizer": OBJECT,
    "optimizer.type": NAME,
    "optimizer.params": OBJECT,
    "optimizer.params.lr": POSITIVE,
    "optimizer.params.weight_decay": NOT_NEGATIVE,
    "optimizer.params.momentum": NOT_NEGATIVE,
    "scheduler": OBJECT,
    "scheduler.type": NAME,
    "scheduler.params": OBJECT,
    "tensor_parallel": OBJECT,
    "tensor_parallel.autotp_size": COUNT,
    "zero_optimization": OBJECT,
    "zero_optimization.stage": (lambda v: v in (0, 1, 2, 3) and not isinstance(v, bool), "0, 1, 2 or 3"),
    "zero_optimization.offload_optimizer": OBJECT,
    "zero_optimization.offload_optimizer.device": DEVICE,
    "zero_optimization.offload_param": OBJECT,
    "zero_optimization.offload_param.device": DEVICE,
}
NEVER_AUTO = {path for path, shape in SHAPES.items() if shape is OBJECT} | {"zero_optimization.stage"}


def check_shapes(config: Mapping[str, Any], ds_place: str, problems: Problems) -> bool:
    """Note every value of the wrong type or range; whether there was none."""
    wrong = []
    for path, (fits, allowed) in SHAPES.items():
        absent = object()
        value = get(config, path, absent)
        if value is absent or (value == "auto" and path not in NEVER_AUTO):
            continue
        if not fits(value):
            wrong.append(path)
            problems.add(
                "bad-value",
                f"{path} is {value!r}; allowed: {allowed}",
                "correct it, or remove it",
                f"{ds_place}: {path}",
            )
    return not wrong
