"""DeepSpeed's C++ ops on each host: whether each can be built, is built, and building them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerofit.doctor.check import FAIL, OK, WARN, Check
from zerofit.doctor.conversation import Conversation
from zerofit.doctor.remote import ask_all
from zerofit.doctor.unreachable import Unreachable
from zerofit.launch.ops import TRAINING

IMPORT_S, BUILD_S = 180.0, 3000.0
NONE = "NotImplementedBuilder"  # DeepSpeed's place holder for what an accelerator has not
Answer = dict[str, Any] | Unreachable


async def examine_ops(there: dict[str, Conversation], say: Callable[[str], None], *, build: bool) -> list[Check]:
    """Each op of each host; `build`: those that training can need are compiled first, on all hosts at once."""
    answers = await ask_all(there, {"ask": "ops"}, IMPORT_S, say)
    checks = []
    if build:
        questions = {name: {"ask": "build", "ops": _to_build(answer)} for name, answer in answers.items()}
        built = await ask_all(there, questions, BUILD_S, say)
        checks += [check for name, answer in built.items() for check in _failed(name, answer)]
        answers = await ask_all(there, {"ask": "ops"}, IMPORT_S, say)
    return checks + [check for name, answer in answers.items() for check in _ops(name, answer)]


def lost(host: str, name: str, error: Unreachable) -> Check:
    """A check that could not be made."""
    return Check(name=name, host=host, status=FAIL, value=error.message, hint=error.hint)


def _to_build(answer: Answer) -> list[str]:
    if isinstance(answer, Unreachable):
        return []
    return [op["builder"] for op in answer["ops"] if op["builder"] in TRAINING and op["compatible"]]


def _failed(host: str, answer: Answer) -> list[Check]:
    if isinstance(answer, Unreachable):
        return [lost(host, "ops", answer)]
    return [
        Check(name=f"build {op}", host=host, status=FAIL, value=problem["message"], hint=problem["hint"])
        for op, problem in answer["failed"].items()
    ]


def _ops(host: str, answer: Answer) -> list[Check]:
    """Imports that fail, and each op."""
    if isinstance(answer, Unreachable):
        return [lost(host, "ops", answer)]
    hint = "install it anew: the pair of torch and torchvision from one index"
    checks = [
        Check(name=f"import {name}", host=host, status=FAIL, value=error, hint=hint)
        for name, error in answer["imports"].items()
    ]
    return checks + [_op(host, op) for op in answer["ops"] if op["builder"] != NONE]


def _op(host: str, op: dict[str, Any]) -> Check:
    used, can = op["builder"] in TRAINING, op["compatible"]
    return Check(
        name=f"op {op['name']}",
        host=host,
        status=WARN if used and not can else OK,
        value="built" if op["built"] else "can be built" if can else f"cannot be built: {op['reason']}",
        expected="can be built: runs with offload or fused optimizers need it" if used else "",
        hint="zerofit doctor --build-ops" if used and can and not op["built"] else "",
    )
