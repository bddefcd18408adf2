"""What ends a script's simulation: enough steps were seen, or something in it cannot be simulated."""

from __future__ import annotations

from zerofit.simulate.script.target import LATER_STAGE
from zerofit.simulate.tracker import own_line
from zerofit.spec.errors import Problem


class ScriptStop(BaseException):
    """Enough optimizer steps were seen. Not an Exception: scripts that catch those let it pass."""


class NotSimulated(BaseException):
    """Something that no simulation can do. Not an Exception, for the same reason."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def not_simulated(what: str, hint: str) -> NotSimulated:
    """Return the refusal of something that the running line of the script asks for."""
    message = f"{what} cannot be simulated"
    return NotSimulated(Problem(kind="not-simulated", message=message, hint=hint, where=own_line()))


def later_stage(number: int) -> NotSimulated:
    """Return the refusal of a pipeline stage whose input is not known: the one before must be simulated first."""
    message = f"stage {number} of a pipeline receives what the stage before sends"
    return NotSimulated(Problem(kind=LATER_STAGE, message=message, where=own_line()))
