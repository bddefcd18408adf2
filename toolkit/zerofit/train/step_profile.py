"""Trace chosen steps of one rank with torch.profiler, and mark the running layer and phase.

`report.traces` reads the marks. An event belongs to the last mark before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, OptimizerStep
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from zerofit.models.sections import ModelSection, watched
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK, Numbers
from zerofit.train.trainer import EngineTrainer

# A mark is an empty record_function. Kernels run later than they are issued, so a reader of the trace finds a kernel's
# layer by the moment of its launch on the host (`report.traces`).
_INSTRUCTIONS = {ForwardPass: "forward", BackwardPass: "backward", OptimizerStep: "step"}


class StepProfile:
    """Traces one rank's chosen steps. Consecutive steps share one file.

    The file is written after the last of these steps, or when the run ends.
    """

    def __init__(
        self, trainer: EngineTrainer, steps: Numbers, file: Callable[[int], Path], sections: Sequence[ModelSection]
    ):
        """Profile `steps` (from 1). `file` returns a trace's path from the number of its first step.

        `sections`: marked sections of the model or of this rank's pipeline stage, named as in forecasts.
        """
        self._trainer, self._steps, self._file = trainer, steps, file
        self._sections = list(sections)
        self._running: tuple[profile, Path] | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile what runs inside this context, if step `number` (from 1) was chosen."""
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
        """Write the current trace, if there is one."""
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
        names = [section.name for section in self._sections] or [""]

        def begin(section: int, tensors: object) -> None:
            if torch._C._current_graph_task_id() != -1:  # a forward that checkpointing recomputes in backward
                return
            _mark("forward", names[section])
            # Backward runs the sections in reverse order. When the gradient of a section's input exists, the backward
            # of the section before it begins.
            tensor = next((t for t in tree_leaves(tensors) if isinstance(t, Tensor) and t.requires_grad), None)
            if tensor is not None:
                before = names[section - 1] if section else ""
                tensor.register_hook(lambda grad: _mark("backward", before))

        modules = {"forward": names[0], "backward": names[-1], "step": ""}
        with _marked_phases(self._trainer.engine, modules), watched(self._sections, begin):
            yield


@contextmanager
def _marked_phases(engine: Any, modules: Mapping[str, str]) -> Iterator[None]:
    """Mark each phase and its first module when the phase starts, inside this context."""
    if hasattr(engine, "_INSTRUCTION_MAP"):  # of a pipeline, whose instructions start phases
        instructions = engine._INSTRUCTION_MAP
        own = {kind: _marking(phase, modules[phase], instructions[kind]) for kind, phase in _INSTRUCTIONS.items()}
        engine._INSTRUCTION_MAP = instructions | own
        names = ["_INSTRUCTION_MAP"]
    else:
        for phase, module in modules.items():
            setattr(engine, phase, _marking(phase, module, getattr(engine, phase)))
        names = list(modules)
    try:
        yield
    finally:
        for name in names:  # uncovers the attribute of the class
            delattr(engine, name)


def _marking(phase: str, module: str, method: Callable[..., object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
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
