"""DeepSpeed's C++ ops, compiled before the ranks start and only where the run needs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from zerofit.launch.build import end_session
from zerofit.launch.stale_op_locks import clear
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.local_machine import LIBAIO_HINT, libaio
from zerofit.spec.model_facts import Machine

POLL_S = 0.5
OFFLOADS = ("offload_optimizer", "offload_param")
TRAINING = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "QuantizerBuilder")  # see `needed_ops`


def needed_ops(config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Names of the op builders that the engine will ask for under this DeepSpeed JSON."""
    zero = config.get("zero_optimization", {})
    devices = [zero.get(part, {}).get("device", "none") for part in OFFLOADS]
    kind = config.get("optimizer", {}).get("type", "").lower()
    params = config.get("optimizer", {}).get("params", {})
    ops = []
    if kind in ("adam", "adamw") and not params.get("torch_adam"):
        on_host = devices[0] != "none" and config.get("zero_force_ds_cpu_optimizer", True)
        ops.append("CPUAdamBuilder" if on_host else "FusedAdamBuilder")
    if "nvme" in devices:
        ops.append("AsyncIOBuilder")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.append("QuantizerBuilder")
    if config.get("compile", {}).get("deepcompile"):
        ops.append("DeepCompileBuilder")
    return ops


def libaio_problems(config: Mapping[str, Any], found: Mapping[str, bool] | None = None) -> list[Problem]:
    """Return what a machine lacks for the NVMe offload of this DeepSpeed JSON; `found` there, by default here."""
    zero = config.get("zero_optimization")
    blocks = {part: zero.get(part) for part in OFFLOADS} if isinstance(zero, Mapping) else {}
    nvme = [part for part, one in blocks.items() if isinstance(one, Mapping) and one.get("device") == "nvme"]
    if not nvme or _prebuilt("async_io"):
        return []
    missing = [part for part, there in (libaio() if found is None else found).items() if not there]
    if not missing:
        return []
    message = f"NVMe offload needs libaio, whose {' and '.join(missing)} the compiler does not find"
    hint = f"{LIBAIO_HINT}, or offload to the CPU"
    if missing == ["compiler"]:
        message, hint = "NVMe offload compiles one of DeepSpeed's C++ ops, but there is no C++ compiler", "install g++"
    return [Problem(kind="libaio", message=message, hint=hint, where=f"zero_optimization.{nvme[0]}.device")]


def _prebuilt(op: str) -> bool:
    """Return whether DeepSpeed was installed with this op compiled (DS_BUILD_OPS=1)."""
    spec = importlib.util.find_spec("deepspeed")
    return bool(spec and spec.origin and list(Path(spec.origin).parent.glob(f"ops/*/{op}_op*.so")))


def build_ops(ops: list[str], env: Mapping[str, str], show: Callable[[str], None]) -> None:
    """Compile (or find compiled) each op, saying every half second how long it has taken. Raises RunFailed.

    One process builds at a time, and a build ends with the process that asked for it. torch's lock files that a killed
    build has left in the folder are removed; those of a build that lives are waited for.
    """
    if not ops:
        return
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    show("waiting for another process that compiles DeepSpeed's ops")
    with FileLock(folder / ".zerofit.lock"):
        clear(folder, show)
        for op in ops:
            _build(op, env, show)


def _build(op: str, env: Mapping[str, str], show: Callable[[str], None]) -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "zerofit.launch.build", str(os.getpid()), op],
        env={**env, "MAX_JOBS": env.get("MAX_JOBS", str(os.cpu_count() or 1))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while True:
            show(f"compiling DeepSpeed's {op.removesuffix('Builder')} op ({time.monotonic() - start:.0f} s)")
            try:
                output, _ = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        end_session(process.pid)  # ninja and the compilers it has started
        process.wait()
    if process.returncode:
        raise RunFailed(_failure(op, output))


def _failure(op: str, output: str) -> Problem:
    hint = LIBAIO_HINT if op == "AsyncIOBuilder" else "it needs a C++ compiler, ninja and the Python headers"
    tail = " | ".join(output.strip().splitlines()[-3:])
    return Problem(kind="op-build", message=f"DeepSpeed's {op} does not build here: {tail}", hint=hint, where=op)
