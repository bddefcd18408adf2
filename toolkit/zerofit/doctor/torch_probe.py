"""Read the facts of a host that need torch: DeepSpeed's ops, and the speed of the devices.

`python -P -m zerofit.doctor.torch_probe` answers questions (see `serve`) and reports its progress:

    {"ask": "ops"}                               for each C++ op, whether it can be built and is built
    {"ask": "build", "ops": ["CPUAdamBuilder"]}  compile them
    {"ask": "measure", "job": `MeasurementJob`, "local": 2, "interface": "eth0"}    the ranks' figures
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.doctor.measured import MeasurementJob, measured, nvme_disks
from zerofit.doctor.serve import Say, end_with_asker, serve
from zerofit.doctor.system import gpus
from zerofit.launch.host import environment
from zerofit.launch.ops import build_ops
from zerofit.spec.errors import RunFailed
from zerofit.spec.local_machine import usable_cores
from zerofit.spec.process import run_and_exit

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder

LIFE_S = 3600  # a CUDA op compiles for minutes
IMPORTS = ("torch", "torchvision", "deepspeed", "transformers")


def _environment() -> dict[str, str]:
    return environment("cuda" if gpus()["gpus"] else "cpu", usable_cores(), 1)


def _ops(say: Say) -> dict[str, object]:
    """Return all ops of DeepSpeed for this accelerator, and the imports that fail."""
    failed = {}
    for name in IMPORTS:
        say(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation can raise any error
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    if {"torch", "deepspeed"} & failed.keys():
        return {"imports": failed, "ops": []}
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    say("checking DeepSpeed's op builders")
    return {"imports": failed, "ops": [_op(name, builder) for name, builder in sorted(ALL_OPS.items())]}


def _op(name: str, builder: OpBuilder) -> dict[str, object]:
    reasons: list[str] = []
    builder.warning = lambda msg: reasons.append(msg)  # otherwise it prints messages
    try:
        compatible = bool(builder.is_compatible(verbose=True))
    except Exception as error:  # some builders raise an error instead of returning False
        compatible = False
        reasons.append(str(error))
    built = (Path(_environment()["TORCH_EXTENSIONS_DIR"]) / name / f"{name}.so").exists()
    known = {"name": name, "builder": type(builder).__name__, "compatible": compatible, "built": built}
    return {**known, "reason": " ".join(reasons)[:300]}


def _build(ops: list[str], say: Say) -> dict[str, object]:
    failed = {}
    for op in ops:
        try:
            build_ops([op], _environment(), say)
        except RunFailed as error:
            failed[op] = error.problem.as_dict()
    return {"failed": failed}


def _measure(question: dict[str, Any], say: Say) -> dict[str, object]:
    job = MeasurementJob(**question["job"])
    interface = question["interface"]
    env = {f"{name}_SOCKET_IFNAME": interface for name in ("GLOO", "NCCL") if interface}
    try:
        found = measured(job, int(question["local"]), say, env)
        return {"error": None, "ranks": found, "nvme": {} if job.collectives_only else nvme_disks(say)}
    except RunFailed as error:
        return {"error": error.problem.message}


def answer(question: dict[str, Any], _: ExitStack, say: Say) -> Mapping[str, object]:
    """Answer one question."""
    kind = question.get("ask")
    if kind == "ops":
        return _ops(say)
    if kind == "build":
        return _build([str(op) for op in question["ops"]], say)
    if kind == "measure":
        return _measure(question, say)
    return {"error": f"unknown question {kind!r}"}


def _serve() -> None:
    with suppress(KeyboardInterrupt):
        serve(answer, LIFE_S)


if __name__ == "__main__":
    end_with_asker()
    run_and_exit(_serve)
