"""Measure this machine's speed, with as many parallel processes as a run would start.

Run as `python -m zerofit.doctor.measure JOB`, where JOB is a `MeasurementJob` as JSON. Each process writes its figures
to the job's folder.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch documents these under this module, but does not export them
from torch.distributed import FileStore, HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from zerofit.doctor.measure_kernels import Stopwatch, measure_kernels
from zerofit.doctor.measured import LIMIT_S, MeasurementJob, measure_disk

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


STATES = 7  # floats per element in an Adam step: it reads 4 (gradient, parameter, 2 moments) and writes 3
MEET = timedelta(seconds=60)
TOGETHER, CALLS = 32, 40  # number of small collectives that are issued together, and repetitions
CPU_MESSAGES = ((0.0625, 100), (0.5, 100), (4, 60), (32, 10))  # MiB, repetitions
GPU_MESSAGES = ((0.25, 50), (4, 50), (64, 20), (1024, 5))
UNITS, WIDTH, ROWS = 32, 256, 64
STEPS = 20  # steps of each engine; equal on all ranks, since ranks wait for each other


def measure(job: MeasurementJob) -> dict[str, object]:
    """Return all figures of one rank."""
    rank, ranks, budget_s, folder = job.rank, job.ranks, job.seconds, Path(job.folder)
    device = torch.device("cuda", job.device) if torch.cuda.is_available() else torch.device("cpu")
    if job.collectives_only:
        return _collectives(device, ranks)
    found: dict[str, object] = {}
    steps: dict[str, Callable[[], Mapping[str, object]]] = {
        "matrix products": lambda: {"matmul_flops": _matmul(device, budget_s)},
        "memory": lambda: {"memory_bandwidth": _memory(device, budget_s)},
        "kernels by shape": lambda: measure_kernels(device, budget_s) if job.by_shape else {},
        "DeepSpeed's engine": lambda: measure_engine(Stopwatch(device, budget_s)) if job.by_shape else {},
        "Adam in host memory": lambda: {"host_bandwidth": _adam(budget_s)} if job.by_shape else {},
        "host copies": lambda: {"host_copy": _host_copy(device, budget_s)},
        "collectives": lambda: _collectives(device, ranks) if ranks > 1 else {},
        "collectives by size": lambda: _by_size(device, ranks) if ranks > 1 and job.by_shape else {},
        "disk": lambda: measure_disk(folder) if rank == 0 else {},
    }
    for phase, step in steps.items():
        if ranks > 1:
            dist.barrier()  # ranks share memory and cores, so all of them must measure the same thing at a time
        if rank == 0:
            (folder / "phase").write_text(phase)  # for the command, which shows it
        found |= step()
    return found


def _seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median seconds of one call, over about `budget_s`."""
    for _ in range(2):  # the first calls allocate memory and choose kernels
        work()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 1000):
        taken.append(_timed(work, device))
    return statistics.median(taken)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    # A CUDA op returns before its kernel has run. Without both waits, this would be the time of a launch.
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def _matmul(device: torch.device, budget_s: float) -> dict[str, float]:
    """Return the FLOP/s of multiplying square matrices, by precision."""
    size = 8192 if device.type == "cuda" else 1024
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        dtypes["fp16"] = torch.float16
        # GPUs before Ampere have no units for bf16, so such products are emulated and slow.
        if torch.cuda.get_device_capability(device)[0] < 8:
            del dtypes["bf16"]
    found = {}
    for name, dtype in dtypes.items():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[name] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b, device, budget_s)
    return found


def _memory(device: torch.device, budget_s: float) -> float:
    """Return the bytes per second that an in-place addition to a large tensor reads and writes."""
    # far larger than any cache
    x = torch.zeros(2**29 if device.type == "cuda" else 2**27, dtype=torch.float32, device=device)
    return 2 * x.nbytes / _seconds(lambda: x.add_(1.0), device, budget_s)


def _adam(budget_s: float) -> float:
    """Return the bytes per second of host memory that torch's fused AdamW reads and writes."""
    # Like DeepSpeed's AdamW, torch's makes one pass over the tensors. The tensors have 1 GiB together, since servers
    # have caches of hundreds of MiB.
    parameter = torch.nn.Parameter(torch.zeros(2**26))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return 4 * STATES * parameter.numel() / _seconds(optimizer.step, torch.device("cpu"), budget_s)


def _host_copy(device: torch.device, budget_s: float) -> float:
    """Return the bytes/s of copies from pinned host memory, or on a CPU within memory."""
    host = torch.zeros(2**26, dtype=torch.float32)
    # From pageable memory, the driver copies through a small pinned buffer of its own. This is slower than the link.
    if device.type == "cuda":
        host = host.pin_memory()
    copied = torch.empty_like(host, device=device)
    return host.nbytes / _seconds(lambda: copied.copy_(host), device, budget_s)


def _collectives(device: torch.device, ranks: int) -> dict[str, object]:
    large = torch.zeros(2**28 if device.type == "cuda" else 2**23, dtype=torch.float32, device=device)
    small = torch.zeros(16, device=device)
    large_s, small_s = (  # all ranks make the same number of calls
        statistics.median(_timed(lambda x=x: dist.all_reduce(x), device) for _ in range(count))
        for x, count in ((large, 10), (small, 100))
    )
    # bus bandwidth: in a ring, each rank sends (and receives) 2 * (ranks - 1) / ranks of the tensor
    return {"link": 2 * (ranks - 1) / ranks * large.nbytes / large_s, "link_latency_s": small_s}


def _by_size(device: torch.device, ranks: int) -> dict[str, object]:
    """Return the seconds of ZeRO's collectives by message size, and of many small ones together."""
    found, rows, matrix = [], torch.randn(1024, 256), torch.randn(256, 256)

    def seconds(work: Callable[[], object], calls: int) -> float:
        work()
        taken = []
        for _ in range(calls):
            # On a CPU, kernels run before each message, as in a step: about one layer, some milliseconds of a core.
            # After the kernels, ranks start the message at different times. In addition, gloo's threads sleep during
            # the kernels, and need a core before they can send. Without the kernels a message needs a tenth of the
            # time.
            if device.type == "cpu":
                for _ in range(3):
                    F.silu(rows @ matrix)
            taken.append(_timed(work, device))
        return statistics.mean(taken) if device.type == "cpu" else statistics.median(taken)

    for mib, calls in CPU_MESSAGES if device.type == "cpu" else GPU_MESSAGES:
        full = torch.zeros(int(mib * 2**18) // ranks * ranks, device=device)
        shard = torch.empty(len(full) // ranks, device=device)
        works: dict[str, Callable[[], object]] = {
            "all_reduce": lambda full=full: dist.all_reduce(full),
            "all_gather": lambda full=full, shard=shard: dist.all_gather_into_tensor(full, shard),
            "reduce_scatter": lambda full=full, shard=shard: dist.reduce_scatter_tensor(shard, full),
        }
        for op, work in works.items():
            found.append({"op": op, "ranks": ranks, "size_bytes": full.nbytes, "seconds": seconds(work, calls)})
    pairs = [(torch.zeros(ranks * 256, device=device), torch.zeros(256, device=device)) for _ in range(TOGETHER)]

    def together() -> None:
        for handle in filter(None, [dist.all_gather_into_tensor(*pair, async_op=True) for pair in pairs]):
            handle.wait()

    return {"collectives": found, "call_s": seconds(together, CALLS) / TOGETHER}


def main(job: MeasurementJob) -> None:
    """Measure as one rank and write the figures to the job's folder."""
    torch.set_num_threads(job.threads)
    cuda, folder = torch.cuda.is_available(), Path(job.folder)
    if job.ranks > 1:
        if cuda:
            torch.cuda.set_device(job.device)
        # Ranks of several hosts share no folder for torch's store, so they meet at a port of the first rank.
        if job.store:
            store = TCPStore(*job.store, job.ranks, is_master=job.rank == 0, timeout=MEET)
        else:
            store = FileStore(str(folder / "store"), job.ranks)
        backend = "nccl" if cuda else "gloo"
        # on a busy machine, a rank may finish long before the others
        waits = timedelta(seconds=LIMIT_S) if job.by_shape else MEET
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks, timeout=waits)
    found = measure(job)
    name = torch.cuda.get_device_name(job.device) if cuda else ""
    (folder / f"rank-{job.rank}.json").write_text(json.dumps({**found, "device_name": name}))
    if job.ranks > 1:
        dist.destroy_process_group()


class _Unit(nn.Module):
    """A matrix multiplication, then a norm with one small parameter."""

    matrix: Tensor  # fills the host's caches, as a model does

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.matrix)


def measure_engine(watch: Stopwatch) -> dict[str, float]:
    """Return the host's seconds per parameter: `hook_s`, and on a CPU `gradient_s`.

    - `hook_s`: ZeRO-3 fetches and releases the parameter.
    - `gradient_s`: the engine's hook, bucket and norm of a gradient, and the gathering of the new parameter.
    """
    alone = not dist.is_initialized()
    if alone:
        # Without a process group, deepspeed.init_distributed needs RANK and MASTER_PORT in the environment, or MPI.
        # A HashStore stays within this process, so no port is used.
        backend = "nccl" if watch.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", str(watch.device.index or 0))
    x = torch.randn(ROWS, WIDTH, device=watch.device, requires_grad=True)
    # `hook_s` is the time of a forward under stage 3, less that of a forward without an engine. Every parameter stays
    # gathered, so no collective is measured. On a CPU, a collective would add the host's time to send the data. On a
    # GPU, the host would wait for each small collective. In a model, collectives overlap with kernels
    # (benchmarks/gpu/README.md).
    # `gradient_s` is the time of a full step under stage 1, less that of a full step without an engine. On a GPU it
    # would consist of kernel launches, which are measured elsewhere.
    plain, engines = _model(watch.device), {"hook_s": _engine(watch.device, 3)}
    if watch.device.type == "cpu":
        engines["gradient_s"] = _engine(watch.device, 1)
    without, taken = [], {name: [] for name in engines}
    for _ in range(STEPS):  # alternate the engines, so other load on the machine affects all of them alike
        without.append(_timed_pass(watch, lambda: plain(x).sum(), lambda loss: loss.backward()))
        for name, engine in engines.items():
            taken[name].append(_timed_pass(watch, lambda engine=engine: engine(x).sum(), partial(_step, engine)))
    found = {}
    for name, engine in engines.items():
        parts = slice(1 if name == "hook_s" else 2)  # a forward, or a full step
        longer = [sum(under[parts]) - sum(bare[parts]) for under, bare in zip(taken[name], without, strict=True)]
        found[name] = max(0.0, statistics.median(longer)) / UNITS
        engine.destroy()
    if alone:
        dist.destroy_process_group()
    return found


def _model(device: torch.device) -> nn.Module:
    return nn.Sequential(*(_Unit() for _ in range(UNITS))).to(device)


def _engine(device: torch.device, stage: int) -> DeepSpeedEngine:
    import deepspeed  # the import takes seconds, and other measurements do not need it

    model = _model(device)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        # The norms' parameters are smaller than the threshold, so ZeRO-3 does not release them after a forward.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 2 * WIDTH},
        # DeepSpeed refuses torch's SGD under ZeRO otherwise (DeepSpeedEngine._do_optimizer_sanity_check).
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: DeepSpeedEngine, loss: Tensor) -> None:
    engine.backward(loss)
    engine.step()


def _timed_pass(
    watch: Stopwatch, forward: Callable[[], Tensor], ending: Callable[[Tensor], object]
) -> tuple[float, float]:
    """Return the seconds of a forward, and of the rest of the step."""
    loss: list[Tensor] = []
    first_s = watch.timed(lambda: loss.append(forward()), 1)
    return first_s, watch.timed(lambda: ending(loss[0]), 1)


if __name__ == "__main__":
    main(MeasurementJob(**json.loads(sys.argv[1])))
