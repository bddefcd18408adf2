"""Memory and step times of real runs, and of their kernels; `forecasts` puts beside them what zerofit says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.meter.configurations import MODELS as SMALL
from benchmarks.meter.configurations import target
from zerofit.simulate.record import SimulationTarget

from .part import Measure
from .rank import Waiting

MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "image_size": 224},
    "vit": {"model": "vit-l-16-hf", "image_size": 224},
    "bert": {"model": "bert-large", "seq_len": 512},
    "gpt2": {"model": "gpt2", "seq_len": 1024},
    "llama-1b": {"model": "llama-3.2-1b", "seq_len": 2048},
    "llama-3b": {"model": "llama-3.2-3b", "seq_len": 4096},  # offloaded, some 60 GB of host memory
    "llama-8b": {"model": "llama-3.1-8b", "seq_len": 4096},
}
NAMES: list[str] = list(
    """
llama-1b zero2 bf16 mb2 x1
resnet50 zero0 bf16 mb64 x1
gpt2 zero0 bf16 mb8 x1
llama-1b zero3 bf16 mb2 x1
llama-1b zero2 bf16 mb2 offload x1
bert zero1 bf16 mb8 ga2 x1
vit zero2 bf16 mb32 ckpt x1
llama-1b zero2 bf16 mb4 ckpt x1
llama-1b zero1 fp16 mb2 x1
resnet50 zero0 fp32 mb64 x1
llama-1b zero3 bf16 mb4 ckpt offload-all x1
vit zero0 bf16 mb32 x1
gpt2 zero0 fp32 mb4 x1
resnet50 zero2 fp16 mb64 offload x1
llama-1b zero1 bf16 mb2 chunk x1
gpt2 zero3 bf16 mb8 ckpt offload-all x1
bert zero2 fp16 mb8 x1
llama-1b zero0 bf16 mb2 x1
llama-3b zero2 bf16 mb1 ckpt offload x1
llama-3b zero3 bf16 mb1 ckpt offload-all x1
""".strip().splitlines()
)
REHEARSED = ["lenet zero0 fp32 mb8 x1", "llama zero2 bf16 mb2 ckpt x1"]


def cases(rehearse: bool) -> list[str]:
    """Configurations as `meter.configurations` names them."""
    return REHEARSED if rehearse else NAMES


@contextmanager
def measuring(cases: list[str], folder: Path, rehearse: bool) -> Iterator[Measure]:
    """Train one case after the other; the process of the next one imports meanwhile what it needs."""
    waiting = dict[str, tuple[SimulationTarget, Waiting]]()

    def ready(case: str) -> tuple[SimulationTarget, Waiting]:
        asked = target(case, SMALL if rehearse else MODELS)
        return asked, Waiting(asked)

    def measure(case: str) -> dict[str, Any]:
        asked, rank = waiting.pop(case, None) or ready(case)
        rank.begin()
        for later in cases[cases.index(case) + 1 :][:1]:
            with suppress(Exception):  # in its own turn it is raised
                waiting[later] = ready(later)
        return {"target": asked.as_dict(), "real": rank.answer()}

    yield measure
