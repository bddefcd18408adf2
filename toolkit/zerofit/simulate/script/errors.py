"""Define the exceptions that end a script's simulation: it is complete, or something cannot be simulated."""

from __future__ import annotations

from zerofit.simulate.ops.tracker import own_line
from zerofit.simulate.script.target import LATER_STAGE
from zerofit.spec.errors import Problem


class ScriptStop(BaseException):
    """Enough optimizer steps were seen. Not an Exception, so a script does not catch it."""


class NotSimulated(BaseException):
    """Something cannot be simulated. Not an Exception, for the same reason."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def not_simulated(what: str, hint: str) -> NotSimulated:
    """Return the error for something that the running line of the script needs."""
    message = f"{what} cannot be simulated"
    return NotSimulated(Problem(kind="not-simulated", message=message, hint=hint, where=own_line()))


def later_stage(number: int) -> NotSimulated:
    """Return the error for a pipeline stage whose input is unknown until the stage before is simulated."""
    message = f"stage {number} of a pipeline needs the output of the previous stage"
    return NotSimulated(Problem(kind=LATER_STAGE, message=message, where=own_line()))
