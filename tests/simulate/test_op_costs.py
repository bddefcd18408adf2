"""Memory that kernels take while they run, against what torch's CPU allocator is asked for."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from zerofit.simulate.op_costs import scratch_on

FLOAT, HALF, WHOLE = (torch.ones(100, 100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64))
COLUMN, TRUTH = HALF[:, :1], FLOAT > 0


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("add.Tensor", (FLOAT, HALF)),
        ("add_.Tensor", (FLOAT.clone(), HALF)),
        ("mul_.Tensor", (HALF.clone(), FLOAT)),
        ("mul.Tensor", (FLOAT, COLUMN)),
        ("addcmul", (FLOAT, HALF, FLOAT)),
        ("lt.Tensor", (HALF, FLOAT)),
        ("where.self", (TRUTH, FLOAT, HALF)),
        ("add.Tensor", (WHOLE, TRUTH)),
        ("div.Tensor", (WHOLE, WHOLE)),
        ("sqrt", (WHOLE,)),
        ("add.Tensor", (HALF, HALF)),
        ("copy_", (FLOAT.clone(), HALF)),
    ],
)
def test_operands_of_another_type_are_copied_on_a_cpu(op, args):
    overload = getattr(getattr(torch.ops.aten, op.partition(".")[0]), op.partition(".")[2] or "default")
    taken, out = scratch_of(overload, args)
    name = overload._overloadpacket._qualified_op_name
    assert scratch_on("cpu")(name, args, {}, out) == taken
    assert scratch_on("cuda")(name, args, {}, out) == 0


def scratch_of(op: Any, args: Any) -> tuple[int, Any]:
    """What an op takes and gives back while it runs, and its output."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = op(*args)
    assert profiled.profiler is not None
    changes = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(changes), default=0) - sum(changes), out
