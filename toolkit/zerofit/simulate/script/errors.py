"""Define the exceptions that end a script's simulation."""

from __future__ import annotations

from zerofit.simulate.ops.tracker import user_line
from zerofit.simulate.script.command import LATER_STAGE
from zerofit.spec.errors import Problem


class ScriptStop(BaseException):
    """Raised after enough optimizer steps.

    It is not an Exception, so that scripts do not catch it.
    """


class NotSimulated(BaseException):
    """Raised if something cannot be simulated.

    It is not an Exception, so that scripts do not catch it.
    """

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def not_simulated(what: str, hint: str) -> NotSimulated:
    """Return the error that `what` cannot be simulated.

    The error names the script's line that needs `what`.
    """
    message = f"{what} cannot be simulated"
    return NotSimulated(Problem(kind="not-simulated", message=message, hint=hint, where=user_line()))


def script_fault(message: str, hint: str) -> NotSimulated:
    """Return the error of a script that fails on the real machine, at a call not simulated."""
    return NotSimulated(Problem(kind="script", message=message, hint=hint, where=user_line()))


def later_stage(number: int) -> NotSimulated:
    """Return the error for pipeline stage `number`. The previous stage must be simulated first."""
    message = f"stage {number} of a pipeline needs the output of the previous stage"
    return NotSimulated(Problem(kind=LATER_STAGE, message=message, where=user_line()))
