"""Find a script's code that tries again with a smaller batch when it runs out of memory."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import threading
from functools import cache
from types import FrameType

_CAUGHT = re.compile(r"OutOfMemory|out of memory|should_reduce_batch_size")  # the last one is Accelerate's


def recovers_at() -> str:
    """Return the "file:line" of a running `try` that handles out-of-memory errors; "" if none."""
    # Autograd may have called from its own thread. Only `frame` refers to frames: a second name would keep this
    # function's own frame alive, and with it the tensors of its callers, until Python collects garbage.
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        file = frame.f_code.co_filename
        for lines in _guarded_lines(file):
            if frame.f_lineno in lines:
                return f"{os.path.relpath(file)}:{lines.start}"
        frame = frame.f_back
    return ""


@cache
def _guarded_lines(file: str) -> tuple[range, ...]:
    text = "".join(linecache.getlines(file))
    if not _CAUGHT.search(text):
        return ()
    return tuple(
        range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Try) and _CAUGHT.search("".join(map(ast.unparse, node.handlers)))
    )
