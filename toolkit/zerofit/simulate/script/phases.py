"""Divide a rank's run into phases, by the calls of engines and optimizers."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofit.simulate.engine.phases import PhaseLog, announce_phases
from zerofit.simulate.script.errors import ScriptStop
from zerofit.simulate.script.evaluation import EVALUATION
from zerofit.simulate.script.generation import GENERATION

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

LOGPROBS = "log-probs"  # of the actor and of the reference, in reinforcement learning
WAITED = 10  # stop when the leading engine has made this many times the wanted steps, even if others have not


@dataclass
class _Capture:
    """What a replay of a CUDA graph does."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)  # those that step
    micro_batches: int = 0


# A script does not use zerofit's loop, so phases follow from its calls:
#
#   with an engine      DeepSpeedEngine.__init__ -> init   forward -> forward   backward -> backward   step -> step
#   without an engine   Module.__call__ of the outermost trained module -> forward
#                       autograd.backward of a loss -> backward   hooks of torch's optimizers -> step
#   a torch pipeline    PipelineStage.forward_one_chunk -> forward   backward_one_chunk and its weights' -> backward
#   CUDA graphs         steps on a side stream warm up, and steps inside a capture count at each replay
#
# Calls that are made inside another of these calls belong to it: `_busy` and `_inside` count the depth.
class ScriptPhases:
    """Begins phases, and stops the script after the optimizer steps of all engines that train.

    Without an engine, a phase begins when a model's forward, a loss's backward or an optimizer's step begins.
    """

    def __init__(
        self,
        log: PhaseLog,
        steps: int,
        on_model: Callable[[nn.Module], None],
        on_batch: Callable[[object, object], None],
        on_end: Callable[[list[DeepSpeedEngine]], None],
        score: Callable[..., object],
    ):
        self.log, self.wanted = log, steps
        self._on_model, self._on_batch, self._on_end = on_model, on_batch, on_end
        self._score = score  # runs a model that does not train
        # weak, in order: what the script has released is free memory, e.g. the model of an earlier trial or fold
        self._engines = WeakKeyDictionary[DeepSpeedEngine, None]()
        self._optimizers = WeakKeyDictionary[torch.optim.Optimizer, None]()
        self._models = WeakKeyDictionary[nn.Module, None]()
        # What trained last, for the facts of a script that ends by itself. Released when the script builds a module, or
        # first trains another one, e.g. a copy.
        self._held: tuple[object, ...] = ()
        self.steps = Counter[object]()  # by weak reference to an engine or optimizer, also of a released one
        self._transformed: list[nn.Module] = []  # modules that ran inside torch.func and are not in `models` yet
        self.micro_batches = 0
        self._busy = 0  # depth of running engine calls: calls inside them belong to them
        self._known = WeakSet[nn.Module]()  # the modules of `models`
        self._inside = False  # whether a forward or backward without an engine is running: nested calls belong to it
        # the optimizer that steps: it may contain another one (ZeroRedundancyOptimizer)
        self._stepping: torch.optim.Optimizer | None = None
        self._is_forward = False  # whether a micro batch without an engine has begun and its backward has not
        self._first: nn.Module | None = None  # the module that began the micro batch
        self._ran: set[int] = set()  # ids of the modules that it contains, and of others that ran after it
        self._leading: object = None  # the first of this rank's pipeline stages (torch)
        self._updated: torch.optim.Optimizer | None = None  # an optimizer that stepped inside the running backward
        self._captured: dict[int, _Capture] = {}  # by the id of a CUDA graph
        self._capture: _Capture | None = None  # of the graph that is being captured
        self._warm_ups = 0  # optimizer steps on side streams before any capture

    def cut(self) -> None:
        """Wrap the engines, optimizers and models that scripts train, for the rest of this process."""
        replaced: list[tuple[Any, str, Callable[..., object]]] = [
            (DeepSpeedEngine, "__init__", self._init),
            (DeepSpeedEngine, "forward", self._forward),
            (DeepSpeedEngine, "backward", self._backward),
            (DeepSpeedEngine, "step", self._step),
            (PipelineEngine, "__init__", self._init_pipeline),
            (PipelineEngine, "train_batch", self._train_batch),
            (PipelineStage, "forward_one_chunk", self._chunk),
            (PipelineStage, "backward_one_chunk", self._plain_backward),  # without autograd.backward in zero-bubble
            (PipelineStage, "backward_weight_one_chunk", self._plain_backward),
            (torch.autograd, "backward", self._plain_backward),
            (nn.Module, "__init__", self._build),
        ]
        if torch.cuda.is_available():  # the class is that of `gpu.graphs`; torch's own one needs a driver
            replaced += [
                (torch.cuda.CUDAGraph, "capture_begin", self._begin_capture),
                (torch.cuda.CUDAGraph, "capture_end", self._end_capture),
                (torch.cuda.CUDAGraph, "replay", self._replay),
            ]
        for owner, name, run in replaced:
            setattr(owner, name, _wrapped(getattr(owner, name), run))
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        nn.Module.__call__ = self._plain_forward(nn.Module.__call__)
        self.log.begin("build")

    @property
    def engines(self) -> list[DeepSpeedEngine]:
        """The script's engines."""
        return list(self._engines)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped without an engine."""
        return list(self._optimizers)

    @property
    def models(self) -> list[nn.Module]:
        """The models that were trained without an engine."""
        return list(self._models)

    def _build(self, method: Callable[..., None], /, *args: object, **kwargs: object) -> None:
        self._held = ()
        method(*args, **kwargs)

    def _init(self, method: Callable[..., None], engine: DeepSpeedEngine, /, *args: object, **kwargs: object) -> None:
        # before the engine partitions, casts or moves the model's parameters
        self._on_model(inspect.signature(method).bind(engine, *args, **kwargs).arguments["model"])
        self.log.begin("init")
        self._within(method, engine, *args, **kwargs)
        self._engines[engine] = None
        if has_optimizer(engine):
            # Lightning Fabric 2.6 makes the steps of DeepSpeed's optimizer itself, without `engine.step`
            optimizer: Any = engine.optimizer
            optimizer.step = MethodType(self._direct_step(engine, optimizer.step), optimizer)

    def _direct_step(self, engine: object, method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def step(_: object, *args: object, **kwargs: object) -> object:
            if self._busy:
                return method(*args, **kwargs)
            self.log.begin("step")
            return self._engine_step(engine, method, *args, **kwargs)

        return step

    def _init_pipeline(
        self, method: Callable[..., None], engine: PipelineEngine, /, *args: object, **kwargs: object
    ) -> None:
        method(engine, *args, **kwargs)
        announce_phases(engine, self.log.begin)

    def _train_batch(self, method: Callable[..., object], engine: object, /, *args: object, **kwargs: object) -> object:
        self.log.step = max(self.log.step, self.steps[ref(engine)])
        return self._engine_step(engine, method, engine, *args, **kwargs)

    def _forward(
        self, method: Callable[..., object], engine: DeepSpeedEngine, /, *args: object, **kwargs: object
    ) -> object:
        trains = engine.training and has_optimizer(engine) and torch.is_grad_enabled()
        # a pipeline's train_batch calls this for each micro batch (runtime/pipe/engine.py, _exec_forward_pass)
        if trains or not self._busy:
            self.log.step = max(self.log.step, self.steps[ref(engine)]) if trains else self.log.step
            phase = "forward" if engine.training else "evaluation"
            self.log.begin(LOGPROBS if self._scores() else phase)
        self.micro_batches += trains
        if trains:
            self._on_batch(args, kwargs)
        return self._within(method, engine, *args, **kwargs)

    def _scores(self) -> bool:
        """Return whether a forward computes log-probs: without gradients, and after a generation."""
        if torch.is_grad_enabled() or self.log.name in (GENERATION, EVALUATION):
            return False
        return any(phase.name == GENERATION for phase in self.log.done)

    def _backward(self, method: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        self.log.begin("backward")
        return self._within(method, *args, **kwargs)

    def _step(
        self, method: Callable[..., object], engine: DeepSpeedEngine, /, *args: object, **kwargs: object
    ) -> object:
        self.log.begin("step")
        if engine.is_gradient_accumulation_boundary():
            return self._engine_step(engine, method, engine, *args, **kwargs)
        out = self._within(method, engine, *args, **kwargs)
        self.log.begin("forward")  # loading the next batch belongs to it
        return out

    def _engine_step(self, engine: object, method: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        out = self._within(method, *args, **kwargs)
        self._stepped(engine, list(filter(has_optimizer, self.engines)))
        return out

    def _within(
        self, method: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        self._busy += 1
        try:
            return method(*args, **kwargs)
        finally:
            self._busy -= 1

    def _stepped(self, stepped: object, training: Sequence[object]) -> None:
        """Count an optimizer step of `stepped`. `training`: all engines or optimizers that train.

        Raises ScriptStop when all of them have made `wanted` steps, or when one has made WAITED * `wanted` steps.
        """
        self.steps[ref(stepped)] += 1
        self._hold()
        counts = [self.steps[ref(engine_or_optimizer)] for engine_or_optimizer in training]
        if min(counts) >= self.wanted or max(counts) >= WAITED * self.wanted:
            self._within(self._on_end, self.engines)  # so the models that it runs begin no phases
            self._hold()
            self.log.end()
            raise ScriptStop
        self.log.step = max(counts)
        self.log.begin("forward")

    def _hold(self) -> None:
        self._held = (*self.engines, *self.optimizers, *self.models)

    # --- without an engine ---

    def _plain_forward(self, method: Callable[..., object]) -> Callable[..., object]:
        phases = self

        # torch's profiler reads the module from the variable `self` of this frame (python_tracer.cpp)
        @functools.wraps(method)
        def call(self: nn.Module, *args: object, **kwargs: object) -> object:
            if phases._inside or phases._busy:
                return method(self, *args, **kwargs)
            if phases._scores():
                phases.log.begin(LOGPROBS)
            if phases.engines or not phases._trains(self):  # a reference or reward model, or an evaluation
                return phases._score(method, self, args, kwargs)
            phases._begin_forward(self, args, kwargs)
            return phases._alone(method, self, *args, **kwargs)

        return call

    def _chunk(
        self, method: Callable[..., object], stage: _PipelineStageBase, /, *args: object, **kwargs: object
    ) -> object:
        self._leading = self._leading or stage
        # 1F1B runs the next micro batch's forward before this one's backward. So the leading stage always begins a
        # micro batch, and the rank's other stages belong to it.
        self._is_forward = stage is not self._leading
        self._first = stage.submod if self._is_forward else None
        self.log.begin("forward")
        return method(stage, *args, **kwargs)

    def _trains(self, module: nn.Module) -> bool:
        # in evaluation mode, too: `from_pretrained` returns a model in it, and scripts train it so
        return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())

    def _begin_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
            self._transformed.append(module)  # its parameters are replaced until torch.func returns
        else:
            self._learn(module)
        again = self._first is not None and module is not self._first and id(module) in self._ran
        if not self._is_forward and not again:
            # otherwise another call before the loss, or after a backward: of a loss that is computed in chunks
            self._is_forward, self._first = True, module
            self._ran = {id(child) for child in module.modules()}
            self.micro_batches += 1
            self.log.step = max(self.log.step, 0)
            self.log.begin("forward")
            self._on_batch(args, kwargs)
        self._ran.add(id(module))

    def _learn(self, module: nn.Module) -> None:
        if module not in self._known:
            self._held = ()
            self._known.update(module.modules())
            self._models[module] = None
            self._on_model(module)

    def _plain_backward(self, method: Callable[..., None], /, *args: object, **kwargs: object) -> None:
        if self._busy or self._inside or self._first is None:
            method(*args, **kwargs)
            return
        if self._is_forward:
            self._is_forward = False
            self.log.begin("backward")
        self._alone(method, *args, **kwargs)  # modules that run in it are recomputed
        updated, self._updated = self._updated, None
        if updated is not None:
            self._stepped(updated, [updated])

    def _alone(
        self, method: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        self._inside = True
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Begin a step. Return the arguments for `step` if they change, as torch's hook does."""
        if self._busy or self.engines or self._stepping is not None:
            return None
        if self._inside:  # a hook steps while backward frees the gradients; all of backward is one step
            self._updated = self._updated or optimizer
            return None
        self._stepping = optimizer
        closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer
        if not callable(closure):
            self._begin_step()
            return None

        # a closure runs forward and backward: the step begins after it
        def compute_loss() -> object:
            loss = closure()
            self._begin_step()
            return loss

        return args[:1], {**kwargs, "closure": compute_loss}

    def _begin_step(self) -> None:
        self._is_forward, self._first = False, None
        while self._transformed:
            self._learn(self._transformed.pop())
        self.log.begin("step")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._busy or self.engines:
            return
        self._optimizers[optimizer] = None
        if optimizer is self._stepping:
            self._stepping = None
            if self._capture is not None:
                self._capture.optimizers.append(optimizer)
            elif self._warms_up():
                self._warm_ups += 1
                self.micro_batches = 0
                self.log.begin("forward")
            else:
                self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        # an optimizer that has stepped only in warm-ups or in a capture has no count yet, and need not be waited for
        self._stepped(optimizer, [o for o in self.optimizers if o is optimizer or ref(o) in self.steps])

    # --- CUDA graphs ---

    def _warms_up(self) -> bool:
        """Return whether a step is one before a capture, which torch's docs run on a side stream.

        The capture allocates in a pool of its own, so the script must not stop before it.
        """
        if self._captured or self._warm_ups >= WAITED * self.wanted or not torch.cuda.is_available():
            return False
        return torch.cuda.current_stream() != torch.cuda.default_stream()

    def _begin_capture(
        self, method: Callable[..., None], graph: torch.cuda.CUDAGraph, /, *args: object, **kwargs: object
    ) -> None:
        self._capture = self._captured[id(graph)] = _Capture(micro_batches=-self.micro_batches)
        method(graph, *args, **kwargs)

    def _end_capture(self, method: Callable[..., None], graph: torch.cuda.CUDAGraph) -> None:
        if self._capture is not None:
            self._capture.micro_batches += self.micro_batches
            self.micro_batches -= self._capture.micro_batches
            self._capture = None
        method(graph)

    def _replay(self, method: Callable[..., None], graph: torch.cuda.CUDAGraph) -> None:
        method(graph)
        capture = self._captured.get(id(graph), _Capture())
        self.micro_batches += capture.micro_batches
        for optimizer in capture.optimizers:
            self._count(optimizer)


def has_optimizer(engine: DeepSpeedEngine) -> bool:
    """Return whether an engine has an optimizer of the script or its JSON, not a dummy."""
    return bool(engine.optimizer_name())


def _wrapped(method: Callable[..., object], run: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `run(method, ...)` with its arguments."""

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        return run(method, *args, **kwargs)

    return call
