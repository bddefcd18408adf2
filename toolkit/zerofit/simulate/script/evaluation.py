"""Simulate what a script does between steps: evaluation, and gathering weights to save.

Calls of an evaluation that only repeat the allocations of earlier calls do not run.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Subset

from zerofit.simulate.engine.phases import PhaseLog
from zerofit.simulate.fakes.patches import replace_in
from zerofit.simulate.ops.issued import COPY, KERNEL, ON_HOST, IssuedWork
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.simulate.script.values import known_value
from zerofit.spec.units import shown_bytes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer


EVALUATION, SAVING = "evaluation", "saving"
_FEW, _MORE = 2, 4  # batches
_WORTH_SAYING = 1 << 20  # bytes
_ALONE = (KERNEL, ON_HOST, COPY)  # work for which no stream or rank waits
_PLAIN = (str, int, float, torch.dtype, torch.device, type(None))


def evaluate(trainer: Trainer, log: PhaseLog, meter: ScriptTracker) -> None:
    """Evaluate a few batches, if the arguments of a transformers.Trainer request evaluation.

    If each batch keeps tensors on the device, a note reports the bytes that all batches would keep.
    """
    args, dataset = trainer.args, trainer.eval_dataset
    # the Trainer usually evaluates only after more steps than are simulated
    if args.eval_strategy == "no" or not _length(dataset):
        return
    rows = args.per_device_eval_batch_size * args.world_size
    batches = math.ceil(_length(dataset) / rows)
    log.step = -1  # else FLOPs and collectives would count to the last training step (`forecast.assess`)
    log.begin(EVALUATION)
    run = cast("Callable[[object], object]", trainer.evaluate)
    try:
        run(_first(dataset, _FEW * rows))
        few = meter.peak()
        run(_first(dataset, _MORE * rows))
    except Exception as error:  # metrics of meaningless values can raise anything
        meter.note(f"evaluation: stopped by {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return
    # two runs of different length: what both have in common, such as a batch's activations, is not kept
    kept = (meter.peak() - few) // (_MORE - _FEW)
    if kept * batches > _WORTH_SAYING and batches > _MORE:
        grown = f"{shown_bytes(kept)} of each batch on the device, {shown_bytes(kept * batches)} at the end"
        meter.note(
            f"evaluation: {_MORE} of {batches} batches were simulated; the evaluation keeps {grown} "
            "(--eval_accumulation_steps)"
        )


def evaluations(log: PhaseLog) -> None:
    """Limit each evaluation within the simulated steps to a few batches.

    (transformers.Trainer.evaluate)
    """
    from transformers import Trainer

    original = cast("Callable[..., object]", Trainer.evaluate)

    def evaluated(self: Trainer, eval_dataset: object = None, *args: object, **kwargs: object) -> object:
        before = log.name
        if before == EVALUATION:
            return original(self, eval_dataset, *args, **kwargs)
        log.begin(EVALUATION)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = cast("Mapping[str, object]", self.eval_dataset)[dataset]
        if _length(dataset):
            eval_dataset = _first(dataset, _FEW * self.args.per_device_eval_batch_size * self.args.world_size)
        try:
            return original(self, eval_dataset, *args, **kwargs)
        finally:
            log.begin(before)

    replace_in(Trainer, "evaluate", evaluated)


def gather_to_save(engines: Sequence[DeepSpeedEngine], log: PhaseLog) -> None:
    """Gather ZeRO-3's 16-bit weights as for saving, if the JSON requests it.

    The key is stage3_gather_16bit_weights_on_model_save. The weights are gathered layer by layer. Rank 0 keeps all
    of them in host memory.
    """
    for engine in engines:
        gathers = engine.zero_optimization_partition_weights() and engine.zero_gather_16bit_weights_on_model_save()
        if gathers and engine.optimizer is not None:
            log.step = -1  # as in `evaluate`
            log.begin(SAVING)
            engine._zero3_consolidated_16bit_state_dict()


def _length(dataset: object) -> int:
    """Return the rows of a data set, or of the largest in a dict; 0 if the number is unknown."""
    datasets = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    sizes = [len(each) for each in datasets if isinstance(each, Sized)]
    return max(sizes, default=0) if len(sizes) == len(datasets) else 0


def _first(dataset: object, rows: int) -> object:
    """Return the first rows of a data set, or of each one in a dict."""
    if isinstance(dataset, dict):
        return {name: _first(each, rows) for name, each in dataset.items()}
    sized = cast("Dataset", dataset)
    indices = range(min(rows, len(sized)))
    return sized.select(indices) if hasattr(sized, "select") else Subset(dataset, indices)  # pyright: ignore[reportArgumentType]


@dataclass
class _Calls:
    """The calls of a module with inputs of the same shapes in one phase."""

    changes: list[int] = field(default_factory=list)  # in bytes, of the last call's allocations and releases
    outputs: bytes = b""  # pickled, without the tensors' data, if later calls may be left out
    start: int = -1  # the most live bytes at which a call started
    issued: list[IssuedWork] = field(default_factory=list)  # the last call's kernels, in the step whose time is known
    flops: int = 0  # of the last call


class Repeats:
    """Runs calls without gradients in full, until a call repeats the last call's allocations.

    Later calls with the same shapes only allocate their outputs. But if more bytes are live at the start of a call than
    at the start of every earlier call, this call runs in full. So peaks stay exact.
    """

    def __init__(self, meter: ScriptTracker):
        self._meter = meter
        self._phase = 0
        self._calls: WeakKeyDictionary[nn.Module, dict[Hashable, _Calls]] = WeakKeyDictionary()
        self._is_running = False  # calls inside of a running one belong to it

    def __call__(
        self,
        method: Callable[..., object],
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Call the module's method, or return outputs like those of the call before."""
        if torch.is_grad_enabled() or self._is_running:
            return method(module, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        # another object may change from call to call, such as a cache that grows
        if not all(isinstance(leaf, (*_PLAIN, Tensor)) for leaf in leaves):
            return method(module, *args, **kwargs)
        if self._phase != len(self._meter.ledger.marks):  # each phase needs its own peak
            self._phase = len(self._meter.ledger.marks)
            self._calls.clear()
        key = repr(spec), module.training, *(_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        calls = self._calls.setdefault(module, {}).setdefault(key, _Calls())
        if calls.outputs and self._meter.live() <= calls.start:
            name = type(module).__name__
            self._meter.note(f"calls of {name} that repeat the allocations of earlier ones: left out", here=True)
            self._issue(calls)
            return _LayoutReader(io.BytesIO(calls.outputs)).load()
        self._is_running = True
        try:
            return self._run(calls, partial(method, module, *args, **kwargs))
        finally:
            self._is_running = False

    def _run(self, calls: _Calls, call: Callable[[], object]) -> object:
        ledger, before, log = self._meter.ledger, calls.changes, self._meter.streams.issued
        calls.start, begin = max(calls.start, self._meter.live()), len(ledger.events)
        first, flops = self._meter.streams.place, self._meter.flops.total()
        out = call()
        calls.changes = [change for _, change in ledger.events[begin:]]
        calls.flops, items = self._meter.flops.total() - flops, log.items[first:] if log else []
        calls.issued = [work for work in items if isinstance(work, IssuedWork) and work.kind in _ALONE]
        # a call that sends to other ranks or waits for a stream must run
        repeats = calls.changes == before and len(calls.issued) == len(items)
        calls.outputs = _described(out, sum(before)) if repeats else b""
        return out

    def _issue(self, calls: _Calls) -> None:
        """Record the kernels of a call that is left out, if the time of this step is forecast."""
        streams = self._meter.streams
        if streams.issued is not None:
            streams.issued.items += [work._replace(t=streams.now) for work in calls.issued]
            self._meter.count_flops(calls.flops)


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size and stride


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _described(outputs: object, allocated: int) -> bytes:
    """Return outputs without data; b"" if their tensors do not have `allocated` bytes."""
    file = io.BytesIO()
    writer = _LayoutWriter(file)
    try:
        writer.dump(outputs)
    except (pickle.PicklingError, TypeError, AttributeError):  # objects that cannot be pickled
        return b""
    # if a call allocates more than its outputs, it keeps tensors that a call that is left out would not keep
    return file.getvalue() if sum(tensor.nbytes for tensor in writer.tensors.values()) == allocated else b""


class _LayoutWriter(pickle.Pickler):
    """Writes each tensor's id and layout instead of its data.

    Raises PicklingError for tensors of known values.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}  # by id

    def persistent_id(self, obj: object) -> tuple[int, _Layout] | None:
        """Return a tensor's id and layout; None for other objects."""
        if not isinstance(obj, Tensor):
            return None
        # subclasses have more than a layout, and a known value may differ from call to call
        if type(obj) is not FakeTensor or known_value(obj) is not None:
            raise pickle.PicklingError
        self.tensors.setdefault(id(obj), obj)
        return id(obj), _layout(obj)


class _LayoutReader(pickle.Unpickler):
    """Allocates a tensor for each id."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: tuple[int, _Layout]) -> Tensor:
        """Return the tensor of this id."""
        which, (size, stride, dtype, device) = pid
        if which not in self._tensors:
            self._tensors[which] = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return self._tensors[which]
