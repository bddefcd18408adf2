"""A loop that answers questions from standard input, one line of JSON each."""

from __future__ import annotations

import _thread
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

MARK = "zerofit-answers "  # before each answer, since a remote shell may print other lines
GRACE_S = 5.0  # seconds to remove its files
Say = Callable[[str], None]


def serve(answer: Callable[[dict[str, Any], ExitStack, Say], Mapping[str, object]], life_s: int) -> None:
    """Answer questions until standard input closes, for `life_s` seconds at most.

    The stack closes at the end. Each answer has this host's clock at the time of reading and of answering the question
    (Unix time, s).
    """
    # After a broken connection, standard input may stay open. The alarm then ends this process.
    signal.alarm(life_s)
    _write(greeting=True)
    with ExitStack() as stack:
        for line in sys.stdin:
            received = time.time()
            found = answer(json.loads(line), stack, lambda words: _write(progress=words))
            _write(**found, clock=[received, time.time()])


def _write(**message: object) -> None:
    print(MARK + json.dumps(message), flush=True)


def end_with_asker() -> None:
    """Interrupt this process, like Ctrl-C, when the asking command ends, even during a question."""
    # The shell of a script starts background processes with SIGINT ignored. `interrupt_main` would then do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), select.POLLRDHUP)  # poll always reports POLLHUP, too

    def wait() -> None:
        hung_up.poll()
        _thread.interrupt_main()
        time.sleep(GRACE_S)
        # The main thread sees the interrupt only when it returns to Python, and a hanging driver never returns.
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
