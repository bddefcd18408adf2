"""End a script's simulation if a phase does not end.

The error names the script's running line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zerofit.simulate.engine.phases import PhaseLog, phase_name
from zerofit.simulate.ops.tracker import own_line
from zerofit.simulate.script.tracker import ScriptTracker
from zerofit.spec.errors import Problem

LIMIT_S = 600.0  # a phase of the largest models that were simulated takes a minute
POLL_S = 1.0
_BUSY = 0.5  # share of a core, below which the host counts as waiting


def watch_progress(meter: ScriptTracker, log: PhaseLog, give_up: Callable[[Problem], object]) -> None:
    """Call `give_up` from a thread once a phase has lasted LIMIT_S seconds.

    Time for work on the script's own data, such as tokenizing, does not count, because this work will end.
    """

    def watch() -> None:
        phase, ops, cpu, spent = (log.name, log.step), meter.ops_on_fakes, time.process_time(), 0.0
        while spent < LIMIT_S:
            time.sleep(POLL_S)
            before = phase, ops, cpu
            phase, ops, cpu = (log.name, log.step), meter.ops_on_fakes, time.process_time()
            works_on_data = ops == before[1] and cpu - before[2] > _BUSY * POLL_S
            spent = 0.0 if phase != before[0] else spent if works_on_data else spent + POLL_S
        message = f"{phase_name(*phase)} did not end within {LIMIT_S / 60:.0f} minutes"
        hint = "the script may loop until a value changes, or wait for another process: remove or limit such code"
        give_up(Problem(kind="not-simulated", message=message, hint=hint, where=own_line()))

    threading.Thread(target=watch, daemon=True).start()
