"""Measure the host's time for each parameter in DeepSpeed's engine, without kernels."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch documents it under this name, without exporting it
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from zerofit.doctor.measure_kernels import Stopwatch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

UNITS, WIDTH, ROWS = 32, 256, 64
STEPS = 20  # steps of each engine; equal on all ranks, since ranks wait for each other


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
        without.append(_timed(watch, lambda: plain(x).sum(), lambda loss: loss.backward()))
        for name, engine in engines.items():
            taken[name].append(_timed(watch, lambda engine=engine: engine(x).sum(), partial(_step, engine)))
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
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: DeepSpeedEngine, loss: Tensor) -> None:
    engine.backward(loss)
    engine.step()


def _timed(watch: Stopwatch, forward: Callable[[], Tensor], ending: Callable[[Tensor], object]) -> tuple[float, float]:
    """Return the seconds of a forward, and of the rest of the step."""
    loss: list[Tensor] = []
    first_s = watch.timed(lambda: loss.append(forward()), 1)
    return first_s, watch.timed(lambda: ending(loss[0]), 1)
