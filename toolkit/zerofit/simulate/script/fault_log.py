"""Record what the detectors in `faults` read, e.g. padding, kept gradients and casts."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.memory.ledger import Storage
from zerofit.simulate.ops.tracker import is_own, user_line
from zerofit.simulate.record import ScriptFault
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value
from zerofit.train.probe import are_experts


class FaultLog:
    """The facts that detectors of faults read.

    Lines of the script are "file:line", or "" if unknown.
    """

    def __init__(self, meter: ScriptTracker):
        self.meter = meter
        self.names: dict[int, str] = {}  # id of a parameter that was trainable when its model was first seen -> name
        self.updated: Counter[int] = Counter()  # id of a parameter -> the gradients that it got
        self.plain_bytes = 0  # of parameters that were not partitioned before DeepSpeed's engine got them
        self.plain_at = self.engine_at = ""  # lines that built the largest of these parameters, and the engine
        self.starts: list[int] = []  # number of the ledger's event at which each micro batch begins
        self.padding: list[float] = []  # share of columns without a token, for each micro batch with a mask
        self.batch_at = ""
        self.kept_gradients: list[int] = []  # bytes at the first micro batch after each step of a plain optimizer
        self.zeroed_at = self.retained_at = self.checkpointed_at = ""
        self.redrawn_at: str | None = None  # where a sharded tensor in host memory gets random values
        self.detached = False  # whether a reentrant checkpoint got no input that requires a gradient
        # weak, so that the script can free its models
        self.wrapped = WeakKeyDictionary[DistributedDataParallel, str]()  # with find_unused_parameters -> line
        self.experts = WeakKeyDictionary[nn.Module, str]()  # modules that choose experts -> line of their class
        self.chosen = WeakSet[nn.Module]()  # modules of `experts` whose choice depends on values
        self.models = WeakSet[nn.Module]()
        self.widths: set[int] = set()  # sizes of vocabularies
        self.faults: tuple[ScriptFault, ...] | None = None  # after the last step
        self._step = -1

    def watch(self) -> None:
        """Wrap the functions that scripts call, for the rest of this process."""
        backward: Callable[..., None] = torch.autograd.backward
        check = torch.utils.checkpoint.check_backward_validity
        bound = inspect.signature(backward).bind
        region = cast("Callable[..., AbstractContextManager[None]]", OffsetBasedRNGTracker._distribute_region)
        wrap: Callable[..., None] = DistributedDataParallel.__init__
        enable = cast("Callable[..., None]", PreTrainedModel.gradient_checkpointing_enable)

        @wraps(backward)
        def run_backward(*args: object, **kwargs: object) -> None:
            if bound(*args, **kwargs).arguments.get("retain_graph"):
                self.retained_at = user_line()
            backward(*args, **kwargs)

        # reentrant checkpoints call it: their outputs need a gradient only if an input does
        @wraps(check)
        def check_inputs(inputs: Iterable[object]) -> None:
            inputs = list(inputs)
            self.detached |= not any(t.requires_grad for t in inputs if isinstance(t, Tensor))
            check(inputs)

        @wraps(wrap)
        def init(model: DistributedDataParallel, *args: object, **kwargs: object) -> None:
            wrap(model, *args, **kwargs)
            if model.find_unused_parameters:
                self.wrapped[model] = user_line()

        @wraps(enable)
        def enabled(model: PreTrainedModel, *args: object, **kwargs: object) -> None:
            self.checkpointed_at = user_line()
            enable(model, *args, **kwargs)

        @contextmanager
        def draw(*args: object, **kwargs: object) -> Iterator[None]:
            with region(*args, **kwargs):
                before = torch.default_generator.get_state()
                yield
                after = torch.default_generator.get_state()
            if bytes(before.numpy()) != bytes(after.numpy()):
                self.redrawn_at = user_line()
                torch.set_rng_state(after)  # torch has set the state to `before`, so that trunc_normal_ never ends

        torch.autograd.backward = run_backward
        torch.utils.checkpoint.check_backward_validity = check_inputs
        replace_in(OffsetBasedRNGTracker, "_distribute_region", draw)
        replace_in(DistributedDataParallel, "__init__", init)
        replace_in(PreTrainedModel, "gradient_checkpointing_enable", enabled)
        for owner in (torch.optim.Optimizer, nn.Module):
            replace_in(owner, "zero_grad", self._zeroing(owner.zero_grad))

    def _zeroing(self, method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)  # libraries read signatures
        def zero_grad(*args: object, **kwargs: object) -> None:
            self.zeroed_at = user_line()
            method(*args, **kwargs)

        return zero_grad

    def learn_model(self, model: nn.Module) -> None:
        """Record a model's parameters, vocabularies and experts.

        Must be called before the model is given to an engine, or before its first forward.
        """
        largest = 0
        self.models.add(model)
        self.engine_at = self.engine_at or user_line()
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                continue
            if parameter.requires_grad:
                self.names[id(parameter)] = name
                # `grad` alone would miss the gradients that ZeRO reduces and frees during backward
                parameter.register_post_accumulate_grad_hook(lambda p: self.updated.update((id(p),)))
            if not hasattr(parameter, "ds_id"):  # zero.Init sets it
                self.plain_bytes += local_bytes(parameter)
                storage = self.meter.storage_of(parameter)
                if storage is not None and local_bytes(parameter) > largest:
                    largest, self.plain_at = local_bytes(parameter), storage.user_line
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                self.widths.add(module.num_embeddings)
            if any(are_experts(name, child) for name, child in module.named_children()):
                self._watch_experts(module)

    def _watch_experts(self, module: nn.Module) -> None:
        try:
            file, line = inspect.getsourcefile(type(module)) or "", inspect.getsourcelines(type(module))[1]
        except (OSError, TypeError):  # its source is gone
            file, line = "", 0
        self.experts[module] = f"{os.path.relpath(file)}:{line}" if file and is_own(file) else ""
        before: list[int] = []

        # a note that appears while the module runs reports an assumed value, such as the router's choice
        def enter(*_: object) -> None:
            before.append(self.meter.notes.total())

        def leave(module: nn.Module, *_: object) -> None:
            if self.meter.notes.total() > before.pop():
                self.chosen.add(module)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def note_batch(self, args: object, kwargs: object) -> None:
        """Record that a micro batch begins. Called when the model gets the batch."""
        self.starts.append(len(self.meter.ledger.events))
        self.batch_at = self.batch_at or user_line()
        batch = args[0] if isinstance(args, tuple) and args and isinstance(args[0], Mapping) else kwargs
        mask = known_value(batch.get("attention_mask")) if isinstance(batch, Mapping) else None
        # a mask in floats is added to the scores: there, 0 marks a token
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            self.padding.append(1 - float((mask.numpy() != 0).any(0).mean()))  # NumPy, since torch's ops are counted
        # at the first micro batch of a step, it has no gradients yet: those that live are of the step before
        step = self.meter.ledger.marks[-1].step
        if step > self._step >= 0:
            parameters = {id(p): p for model in self.models for p in model.parameters()}
            self.kept_gradients.append(sum(local_bytes(p.grad) for p in parameters.values() if p.grad is not None))
        self._step = step


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


class Lives:
    """The lifetime of each storage, as indices of the ledger's events."""

    def __init__(self, meter: ScriptTracker):
        self.storages, self.end = meter.ledger.storages, len(meter.ledger.events)
        self.born: dict[int, int] = {}
        self.died: dict[int, int] = {}
        sizes = Counter[int]()
        for number, (index, change) in enumerate(meter.ledger.events):
            sizes[index] += change
            self.born.setdefault(index, number)
            if sizes[index]:  # allocated, or allocated again: FSDP frees and resizes the same storage
                self.died.pop(index, None)
            else:
                self.died[index] = number

    def between(self, begin: int, end: int, at: int) -> list[Storage]:
        """Return the storages that are alive at event `at` and were allocated in [`begin`, `end`)."""
        return [
            self.storages[index]
            for index, born in self.born.items()
            if begin <= born < end and self.died.get(index, self.end + 1) >= at
        ]
