"""Detect memory that grows with every step, and name the lines whose tensors are not freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofit.spec.process import resident_memory
from zerofit.spec.units import shown_bytes
from zerofit.train.first_not_finite import is_dense, model_line

# Without a leak, memory is the same after each step. If it grew in each of GROWING steps, the next step is watched:
# tensors that this step allocates, and that are still alive LIFETIME steps later, are the leak. Gradients and batches
# are freed earlier, and optimizer states are older.
GROWING, LIFETIME = 10, 2  # steps
LEAST_BYTES = 1 << 20  # growth over GROWING steps; recorded losses need less
MOST_LINES, LEAST_SHARE = 2, 0.05  # lines in the warning, and the least share of the leak for a line


class LeakWatch:
    """Watches one rank's memory at the end of each step. It warns once."""

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self._device, self._warn = device, warn
        self._sizes: list[int] = []  # memory after each of the last steps, as long as it grew
        self._watched: _Allocations | None = None  # of the watched step
        self._since = 0  # steps since the watched step
        self._done = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the optimizer step that runs inside this context."""
        if self._done or self._watched is not None or not self._growing():
            yield
        else:
            self._watched, self._since = _Allocations(), 0
            with self._watched:
                yield
        self._look()

    def _growing(self) -> bool:
        sizes = self._sizes
        return len(sizes) > GROWING and sizes[-1] - sizes[-1 - GROWING] >= LEAST_BYTES

    def _look(self) -> None:
        """Record the memory after a step. Warn if tensors of a watched step live for too long."""
        if self._done:
            return
        size = self._size()
        if self._sizes and size <= self._sizes[-1]:  # a leak grows in every step
            self._sizes, self._watched = [], None
        self._sizes = [*self._sizes, size][-1 - GROWING :]
        if self._watched is None:
            return
        self._since += 1
        if self._since <= LIFETIME:
            return
        lines, self._watched = self._watched.alive(), None
        if sum(lines.values()) >= LEAST_BYTES // GROWING:
            largest = [(line, n) for line, n in lines.most_common(MOST_LINES) if n > LEAST_SHARE * sum(lines.values())]
            texts = [f"{line or 'an unknown line'} ({shown_bytes(n)} per step)" for line, n in largest]
            grown = shown_bytes((self._sizes[-1] - self._sizes[0]) // (len(self._sizes) - 1))
            self._warn(f"memory grows by {grown} in every step; tensors made here are not freed: {', '.join(texts)}")
            self._done = True
        else:
            self._sizes = []  # not torch's tensors: look again after GROWING steps

    def _size(self) -> int:
        """Return the bytes of tensors on a GPU; on a CPU the process's memory without mapped files."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return resident_memory().without_files


class _Allocations(TorchDispatchMode):
    """Records the storages that ops allocate, with the model's line."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # views and in-place ops return an input's storage, which is not new
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_dense(t)}
        for tensor in tree_leaves(result):
            if is_dense(tensor) and (key := tensor.untyped_storage()._cdata) not in inputs:
                self._storages[key] = StorageWeakRef(tensor.untyped_storage()), model_line()
        return result

    def alive(self) -> Counter[str]:
        """Return the bytes of storages that still live, by the line that made them."""
        lines = Counter[str]()
        for reference, line in self._storages.values():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                lines[line] += storage.nbytes() if storage is not None else 0
        return lines
