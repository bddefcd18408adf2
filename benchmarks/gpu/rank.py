"""One real rank: the memory of its phases, the times of its steps, and what its kernels take of them.

`python -m benchmarks.gpu.rank TARGET.json ANSWER.json [CAP_BYTES]`, alone in its process group, begins once a line
comes on its standard input: the bytes of the GPU that other processes have. With CAP_BYTES torch may take no more of
the GPU than that, as on a smaller one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks.meter.meter import AllocatorMeter
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port
from zerofit.launch.ops import build_ops, needed_ops
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.local_machine import gpu_memory

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
TIMED, PROFILED = 8, 2  # steps after those whose memory is measured
MOST_OPS = 150  # of a step, by the time of their kernels
MOST_HOST_OPS = 40  # by their own time on the host
# the class of a kernel by what its name has in it; the first that is found
CLASSES = {
    "attention": ("attention", "fmha", "flash"),
    "convolution": ("conv", "cudnn", "implicit", "wgrad", "dgrad"),
    "product": ("mm", "cublas", "cutlass", "nvjet", "matmul", "gemv", "linear"),
    "normalisation": ("norm", "batch_norm"),
    "optimizer": ("adam", "multi_tensor"),
    "embedding": ("embedding", "index_select", "gather_kernel"),
    "collective": ("nccl", "c10d"),
    "copy": ("memcpy", "memset", "copy_"),
}


class DeviceMeter:
    """torch's own count of the current GPU's memory (`zerofit.simulate.engine.phases.MemoryMeter`)."""

    def __init__(self) -> None:
        self.reserved_bytes = 0  # the most so far

    def live(self) -> int:
        """Bytes alive now, rounded up by the allocator."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Most bytes alive since the last reset."""
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Begin to look for a new peak."""
        self.peak()
        torch.cuda.reset_peak_memory_stats()


class Waiting:
    """A rank in a process of its own, which imports everything and waits until it is asked for its answer."""

    def __init__(self, asked: SimulationTarget, cap_bytes: int | None = None):
        """Start the process."""
        self._folder = tempfile.TemporaryDirectory()
        self._answer, target = (Path(self._folder.name) / name for name in ("answer.json", "target.json"))
        target.write_text(json.dumps(asked.as_dict()))
        machine = this_machine()
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        place = {"MASTER_PORT": str(free_port()), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        env = {**os.environ, **environment(machine.accelerator, machine.cores, 1), **alone, **place}
        build_ops(needed_ops(asked.job.ds_config, machine), env, lambda _: None)
        argv = [sys.executable, "-m", "benchmarks.gpu.rank", str(target), str(self._answer)]
        argv += [str(cap_bytes)] if cap_bytes else []
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def begin(self) -> None:
        """Let it train; other processes have taken of the GPU's memory what they have now."""
        assert self._process.stdin
        used = sum(one.total_bytes - one.free_bytes for one in gpu_memory(1))
        self._process.stdin.write(f"{used}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return what `measure` found. Raises RuntimeError where it fails or takes too long."""
        try:
            _, errors = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RuntimeError(f"no answer in {TIMEOUT_S} s") from None
        with self._folder:
            if self._process.returncode:
                raise RuntimeError(errors[-2000:])
            return json.loads(self._answer.read_text())


def measure(asked: SimulationTarget) -> dict[str, Any]:
    """Train in this process and say what it took.

    "allocated_bytes", "reserved_bytes" and "phases" are torch's figures; "used_bytes" is all that this process takes of
    the device, the driver's part included. Times are seconds: "step_s" of some steps, "kernels" of one step's by class,
    "ops" of torch's ops by the shapes of their inputs, "host" what ops and calls of the driver take of the host.
    """
    from zerofit.simulate.engine.phases import PhaseLog
    from zerofit.simulate.engine.rank import empty_batches, start, train_steps
    from zerofit.train import process_group

    used_before = int(sys.stdin.readline())
    process_group.start(timedelta(seconds=TIMEOUT_S))
    on_gpu = torch.cuda.is_available()
    meter = DeviceMeter() if on_gpu else AllocatorMeter()
    log = PhaseLog(meter)
    driver = start(asked.job, 0, asked.inputs, log)
    batches = empty_batches(asked.job, asked.inputs)
    train_steps(driver, batches, asked.steps, log)
    memory: dict[str, Any] = {"phases": [asdict(phase) for phase in log.done]}
    memory["allocated_bytes"] = max(p["peak_bytes"] for p in memory["phases"]) - memory["phases"][0]["start_bytes"]
    if isinstance(meter, DeviceMeter):
        free, total = torch.cuda.mem_get_info()
        memory |= {"reserved_bytes": meter.reserved_bytes, "used_bytes": total - free - used_before}
        memory["total_bytes"] = total
    step_s = [_timed(lambda: driver.train_step(batches)) for _ in range(TIMED)]
    return {**memory, "step_s": step_s, **_profiled(lambda: driver.train_step(batches))}


def _timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """Return the seconds of one step's kernels by class, and by the op and shapes that they were launched for."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as profiled:
        for _ in range(PROFILED):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found: defaultdict[str, float] = defaultdict(float)
    for one in profiled.key_averages():
        if on_gpu and one.device_type == DeviceType.CPU:
            continue  # an op, whose kernels are rows of their own
        name = one.key.lower()
        kind = next((k for k, words in CLASSES.items() if any(w in name for w in words)), "elementwise")
        found[kind] += _seconds(one, on_gpu)
    host = [one for one in profiled.key_averages() if one.device_type == DeviceType.CPU]
    host = sorted(host, key=lambda one: -one.self_cpu_time_total)[:MOST_HOST_OPS]
    ops = [one for one in profiled.key_averages(group_by_input_shape=True) if one.device_type == DeviceType.CPU]
    ops = sorted(ops, key=lambda one: -_seconds(one, on_gpu))[:MOST_OPS]
    return {
        "kernels": {kind: round(seconds, 6) for kind, seconds in sorted(found.items())},
        "ops": [[one.key, one.input_shapes, one.count / PROFILED, round(_seconds(one, on_gpu), 7)] for one in ops],
        "host": [[one.key, one.count / PROFILED, round(_seconds(one, on_gpu=False), 7)] for one in host],
    }


def _seconds(one: FunctionEventAvg, on_gpu: bool) -> float:
    return (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e6 / PROFILED


if __name__ == "__main__":
    wanted = SimulationTarget.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 3:
        torch.cuda.set_per_process_memory_fraction(int(sys.argv[3]) / torch.cuda.mem_get_info()[1])
    Path(sys.argv[2]).write_text(json.dumps(measure(wanted)))
    os._exit(0)  # not by way of DeepSpeed's exit handlers
