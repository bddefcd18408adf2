"""Find the first op of a step that has finite inputs and a result that is not finite."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportPrivateImportUsage] - torch.fx uses it, too
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofit.train.trainer import Batch

# A mask of -inf or an unused infinity is not a fault. So the origin of each result that is not finite is stored: the op
# that made it from finite inputs. The first origin in the history of the loss (or of the first gradient that is not
# finite) is the answer. Tensors are identified by their storage, since views and in-place ops share it.
FORWARD, BACKWARD = "forward", "backward"
INPUTS, LABELS, WEIGHTS = "inputs", "labels", "weights"  # what a tensor is computed from
_FILLED_LATER = ("empty", "resize_")  # results of these ops have arbitrary numbers
_PACKAGES = ("/torch/", "/deepspeed/", "/zerofit/models/build.py", "/zerofit/train/leaks.py", __file__)
_STEP = ("/zerofit/train/engines.py", "/zerofit/train/pipeline.py", "/zerofit/train/gan.py")  # they call the model
_LAST = 2**63  # sequence numbers of autograd's own nodes are larger


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Shape and range of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    low: float  # of the finite elements
    high: float
    bad: int  # elements that are not finite
    zeros: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        """Return the facts of a floating-point or integer tensor."""
        finite = tensor.detach()[torch.isfinite(tensor)].double()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        return cls(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            low=low,
            high=high,
            bad=tensor.numel() - finite.numel(),
            zeros=int((finite == 0).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where bad numbers began: an op with finite inputs, or a tensor that no op has made."""

    phase: str  # FORWARD or BACKWARD
    output: TensorFacts
    depends: tuple[str, ...]  # of INPUTS, LABELS and WEIGHTS
    micro: int  # number of the micro batch in the step
    op: str = ""
    module: str = ""  # its name in the model; in backward the module whose forward it differentiates
    line: str = ""  # file:line of the forward, outside of torch and DeepSpeed
    inputs: tuple[TensorFacts, ...] = ()
    rows: tuple[int, ...] = ()  # samples of the micro batch with such results; () if no dimension has samples
    wide: float | None = None  # largest result in float32, if the result is finite in float32 but not in 16 bits
    tensor: str = ""  # the tensor of the batch or model that was not finite before any op


class FirstNotFinite(TorchDispatchMode):
    """Watches all ops of a step, in forward and backward, for results that are not finite."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.micro = 0  # number of the current micro batch
        self.samples = 0  # samples in it
        self.first_nan: Origin | None = None
        self.gradient: tuple[str, Origin | None] | None = None  # the first gradient that is not finite
        self._model, self._modules = model, list[str]()
        self._origins: dict[int, Origin] = {}  # by storage
        self._depends: dict[int, frozenset[str]] = {}
        self._ops: dict[int, tuple[str, str]] = {}  # module and line of a forward op, by autograd's number
        self._names = {id(p): name for name, p in model.named_parameters()}

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return the origin of a tensor that is not finite; None if this step has none."""
        return self._origins.get(_key(tensor))

    def batches(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the micro batches, and mark their tensors as inputs or labels."""
        for number, batch in enumerate(batches):
            self.micro, self.samples = number, len(batch["labels"])
            for name, tensor in batch.items():
                if isinstance(tensor, Tensor):
                    self._depends[_key(tensor)] = frozenset([LABELS if name == "labels" else INPUTS])
                    self._check_input(name, tensor)
            yield batch

    @contextmanager
    def watching(self) -> Iterator[FirstNotFinite]:
        """Watch ops, modules and gradients of parameters inside this context."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(partial(self._see_gradient, name)).remove)
            stack.enter_context(self)
            yield self

    def _enter(self, name: str, module: nn.Module, *_: object) -> None:
        self._modules.append(name or type(module).__name__)

    def _leave(self, *_: object) -> None:
        self._modules.pop()

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        if self.gradient is None and not _finite(gradient):
            self.gradient = name, self.origin_of(gradient)

    def _check_input(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not _finite(tensor):
            self._origins[_key(tensor)] = Origin(
                phase=FORWARD,
                output=TensorFacts.of(tensor),
                depends=tuple(self._depends[_key(tensor)]),
                micro=self.micro,
                rows=_rows(tensor, self.samples),
                tensor=name,
            )

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # a view shares its input's storage; a collective's result has no single op as its origin
        if func.namespace == "c10d" or func.is_view:
            return result
        node = torch._C._current_autograd_node()
        if node is None and torch.is_grad_enabled():
            # backward's node has the same number, so its module and line are those of the forward op
            number = _get_sequence_nr() - 1
            self._ops[number] = self._place()
        outputs = [t for t in tree_leaves(result) if is_dense(t)]
        if any(func._schema.name.partition("::")[2].find(name) >= 0 for name in _FILLED_LATER):
            for output in outputs:
                self._origins.pop(_key(output), None)
            return result
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        depends = frozenset[str]().union(*map(self._dependence, inputs))
        for output in outputs:
            self._depends[_key(output)] = depends
            if not output.is_floating_point():
                continue
            if _finite(output):
                # the op may have written only a part of the storage
                if output.numel() * output.element_size() == output.untyped_storage().nbytes():
                    self._origins.pop(_key(output), None)
                continue
            earlier = self._earlier_origin(inputs, outputs)
            origin = earlier or self._new_origin(func, args, kwargs, inputs, output, depends, node)
            self._origins[_key(output)] = origin
            if self.first_nan is None and output.isnan().any():
                self.first_nan = origin
        return result

    def _place(self) -> tuple[str, str]:
        """Return the running module and the line of its code."""
        return self._modules[-1] if self._modules else "", model_line()

    def _dependence(self, tensor: Tensor) -> frozenset[str]:
        """Return which of weights, inputs and labels a tensor depends on."""
        # a tensor that no op has made is a weight
        return self._depends.get(_key(tensor), frozenset([WEIGHTS] if tensor.is_floating_point() else []))

    def _earlier_origin(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Origin | None:
        """Return the origin of an op's first input that is not finite; None if all are finite."""
        # An in-place op has already overwritten its input, so only the recorded origin tells what the input was.
        written = {_key(output) for output in outputs}
        for tensor in inputs:
            if not tensor.is_floating_point():
                continue
            origin = self._origins.get(_key(tensor))
            if origin is not None and (_key(tensor) in written or not _finite(tensor)):
                return origin
            if origin is None and _key(tensor) not in written and not _finite(tensor):
                return self._origin_outside(tensor)
        return None

    def _origin_outside(self, tensor: Tensor) -> Origin:
        """Return the origin of a weight, or of a tensor that ranks reduced."""
        is_result = _key(tensor) in self._depends
        name = "a tensor that ranks have reduced" if is_result else self._names.get(id(tensor), "a weight")
        module, line = self._place()
        return Origin(
            phase=FORWARD if torch._C._current_autograd_node() is None else BACKWARD,
            module=module,
            line=line,
            output=TensorFacts.of(tensor),
            depends=tuple(sorted(self._dependence(tensor))),
            micro=self.micro,
            tensor=name,
        )

    def _new_origin(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        inputs: Sequence[Tensor],
        output: Tensor,
        depends: frozenset[str],
        node: Node | None,
    ) -> Origin:
        module, line = self._place()
        if node is not None and node._sequence_nr() < _LAST:
            module, line = self._ops.get(node._sequence_nr(), (module, line))
        in_place = func._schema.is_mutable  # then the inputs no longer have their values
        facts = [TensorFacts.of(t) for t in inputs if is_dense(t) and t.numel() and not t.is_complex()]
        return Origin(
            op=func._schema.name.removeprefix("aten::"),
            phase=FORWARD if node is None else BACKWARD,
            module=module,
            line=line,
            inputs=() if in_place else tuple(facts),
            output=TensorFacts.of(output),
            depends=tuple(sorted(depends)),
            micro=self.micro,
            rows=_rows(output, self.samples),
            wide=None if in_place else _largest_in_fp32(func, args, kwargs, output),
        )


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_dense(value: object) -> bool:
    """Return whether a value is a tensor that is not sparse."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def _finite(tensor: Tensor) -> bool:
    return not tensor.numel() or bool(torch.isfinite(tensor.detach()).all())


def _rows(tensor: Tensor, samples: int) -> tuple[int, ...]:
    """Return the samples with inf or nan; () if the first dimension does not count samples."""
    if not tensor.dim() or not samples or tensor.shape[0] % samples:
        return ()
    bad = torch.isfinite(tensor.detach()).logical_not().reshape(samples, -1).any(1)
    return tuple(int(row) for row in bad.nonzero().flatten())


def _largest_in_fp32(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor
) -> float | None:
    """Return the largest result of a 16-bit op in float32; None if it is not finite either.

    For a conversion from float32, return the largest absolute input. Return None for other ops, and for ops that
    cannot run in float32.
    """
    if output.dtype not in (torch.float16, torch.bfloat16):
        return None
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    if inputs and all(t.dtype == torch.float32 for t in inputs):  # a conversion
        return max(float(t.abs().max()) for t in inputs)
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
    try:
        results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    except (RuntimeError, TypeError):  # an op that needs the narrow type
        return None
    return float(results[0].abs().max()) if results and all(map(_finite, results)) else None


def model_line() -> str:
    """Return file:line of the model or loss that runs, outside of libraries; "" if none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_STEP):
            return ""
        if not any(package in file for package in _PACKAGES) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
