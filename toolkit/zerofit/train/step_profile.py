"""torch.profiler's real trace of chosen steps of one rank, with marks that say which layer and phase runs.

`report.traces` reads the marks: what stands between two of them belongs to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from zerofit.models.sections import numbered, sections_of, watched
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK, Numbers
from zerofit.train.trainer import EngineTrainer


class StepProfile:
    """The traces of one rank's chosen steps: a file for steps in a row, written once the last of them is done.

    A run that ends before writes what there is.
    """

    def __init__(self, trainer: EngineTrainer, steps: Numbers, file: Callable[[int], Path], in_sections: bool):
        """Profile `steps` (1-based); `file` names the trace by its first step.

        `in_sections`: the engine's module is the model itself, as built.
        """
        self._trainer, self._steps, self._file = trainer, steps, file
        self._in_sections = in_sections
        self._running: tuple[profile, Path] | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Make a step (1-based), which is profiled if it was chosen."""
        if number not in self._steps:
            self.close()
            yield
            return
        if self._running is None:
            self._begin(number)
        with record_function(f"{STEP_MARK}{number}"), self._marked():
            yield
        if number == self._steps.last:
            self.close()

    def close(self) -> None:
        """Write the trace, if there is one under way."""
        if self._running is not None:
            running, file = self._running
            running.stop()
            running.export_chrome_trace(str(file))
            self._running = None

    def _begin(self, number: int) -> None:
        activities, file = [ProfilerActivity.CPU], self._file(number)
        if self._trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._running = profile(activities=activities, record_shapes=True, profile_memory=True), file
        self._running[0].start()

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Mark phases, and the sections of the model where it is one."""
        engine = self._trainer.engine
        sections = sections_of(engine.module) if self._in_sections else []
        names = numbered([one.name for one in sections]) or [""]

        def begin(section: int, tensors: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # checkpointing runs forwards again, in backward
                return
            _mark("forward", names[section])
            tensor = next((t for t in tree_leaves(tensors) if isinstance(t, Tensor) and t.requires_grad), None)
            if tensor is not None:
                tensor.register_hook(lambda grad: _mark("backward", names[section - 1]))

        phases = {"forward": names[0], "backward": names[-1], "step": ""}
        for phase, module in phases.items():
            setattr(engine, phase, _marking(phase, module, getattr(engine, phase)))
        try:
            with watched(sections, begin):
                yield
        finally:
            for phase in phases:
                delattr(engine, phase)


def _marking(phase: str, module: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        _mark(phase, module)
        try:
            return method(*args, **kwargs)
        finally:
            if phase == "step":
                _mark("", "")

    return run


def _mark(phase: str, module: str) -> None:
    with record_function(f"{SECTION_MARK}{phase}|{module}"):
        pass
