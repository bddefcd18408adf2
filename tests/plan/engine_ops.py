"""Kernels that DeepSpeed's engine itself runs in a step, counted on fake tensors: `python engine_ops.py TARGET ...`.

Each TARGET is a pickled SimulationTarget of two steps, counted in a process of its own; TARGET.json becomes
{phase: [kernels, bytes read and written]} of the second. An op is the engine's where its caller is: a hook of backward
or the step, not a module's forward and not autograd.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import traceback
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from zerofit.simulate.costs.kernels import call_of
from zerofit.simulate.costs.layers import is_kernel
from zerofit.simulate.engine.rank import simulate_rank
from zerofit.simulate.ops.tracker import AllocationTracker
from zerofit.simulate.record import SimulationTarget

WATCH = AllocationTracker.__torch_dispatch__


def is_engines(frame: FrameType | None) -> bool:
    """Return whether DeepSpeed is the nearest of those that run ops."""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/nn/modules/module.py") and function == "_call_impl":
            return False
        if file.endswith("torch/autograd/graph.py"):
            return False
        if f"{os.sep}deepspeed{os.sep}" in file:
            return not file.endswith("zero/linear.py")  # whose products are the model's
        frame = frame.f_back
    return False


def count(target: SimulationTarget) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def watched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = WATCH(self, func, types, args, kwargs)
        counts = func.namespace == "aten" and self._step == 1 and is_kernel(func)
        if counts and is_engines(sys._getframe().f_back):
            one = found[self._phase]
            one[0] += 1
            one[1] += call_of(func, args, kwargs or {}, out).moved_bytes
        return out

    AllocationTracker.__torch_dispatch__ = watched
    simulate_rank(target)
    return dict(found)


if __name__ == "__main__":
    for name in ("transformers.integrations.deepspeed", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    for path in sys.argv[1:]:
        if os.fork() == 0:
            try:
                Path(f"{path}.json").write_text(json.dumps(count(pickle.loads(Path(path).read_bytes()))))
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # not by way of DeepSpeed's exit handlers
        os.wait()
