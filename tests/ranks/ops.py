"""Compiles DeepSpeed's C++ ops that tests need, beside tests that need none.

python -m tests.ranks.ops [BUILDER ...]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from zerofit.launch.host import ops_folder, with_own_programs
from zerofit.launch.ops import build_ops
from zerofit.spec.errors import RunFailed

OPS = ("CPUAdamBuilder", "AsyncIOBuilder", "CPULionBuilder")  # in the order of the tests


def compile_ops(ops: Sequence[str] = OPS) -> None:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ops_folder()))
    path = with_own_programs(os.environ["PATH"])
    for op in ops:
        with suppress(RunFailed):  # the tests that need it name the reason
            build_ops([op], {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "MAX_JOBS": "1"}, lambda _: None)
        time.sleep(1)  # ranks that wait for this op get the lock


if __name__ == "__main__":
    compile_ops(sys.argv[1:] or OPS)
