"""What a rank has for itself and DeepSpeed does not save: random states and batch norm's running statistics."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from zerofit.train.loop import EngineTrainer
from zerofit.train.shard_index import persistent_buffers


def capture(driver: EngineTrainer) -> dict[str, Any]:
    """All of it as tensors and plain values, copied."""
    numpy_state = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(driver.device) if driver.device.type == "cuda" else None,
        "python": list(random.getstate()[1]),
        "python_gauss": random.getstate()[2],
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "numpy_rest": list(numpy_state[2:]),
        "generators": {name: generator.get_state() for name, generator in _generators(driver).items()},
        "buffers": {name: buffer.detach().clone() for name, buffer in persistent_buffers(driver.module)},
    }


def give_back(driver: EngineTrainer, state: dict[str, Any]) -> None:
    """Put what `capture` gave back in place."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), driver.device)
    random.setstate((3, tuple(state["python"]), state["python_gauss"]))
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["numpy_rest"]))
    for name, generator in _generators(driver).items():
        generator.set_state(state["generators"][name])
    with torch.no_grad():
        for name, buffer in persistent_buffers(driver.module):
            buffer.copy_(state["buffers"][name])


def _generators(driver: EngineTrainer) -> dict[str, torch.Generator]:
    return driver.generators() if hasattr(driver, "generators") else {}
