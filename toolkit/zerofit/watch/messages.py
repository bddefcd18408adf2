"""The messages of guards to the command: what each may contain, checked before anything is done with it.

Types are exact (true is no rank, "5" no number), numbers have limits, and no further keys are allowed.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class InvalidMessage(ValueError):
    """A message that no guard sends."""


class _Exact(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Hello(_Exact):
    """The first message of a connection: the key of the start, and whose guard this is."""

    hello: str
    rank: Count
    host: str = ""
    pid: Count = 0
    guard_pid: Count = 0


class RankBeat(_Exact):
    """A heartbeat of a rank (`zerofit.train.heartbeat`)."""

    step: Count = 0
    phase: str = ""
    training: bool = False
    warm: bool = False
    collective: str | None = None
    at: str = ""
    resending: bool = False
    still_s: Seconds | None = None  # None: before the rank's first heartbeat
    longest_still_s: Seconds = 0.0


class Beat(RankBeat):
    """The same with the guard's look at its rank's process."""

    silent_s: Seconds = 0.0
    state: str = ""
    cpu_s: Seconds = 0.0


class RankProblem(_Exact):
    """One of `spec.errors.Problem`."""

    kind: str
    message: str
    hint: str = ""
    where: str = ""


class RankFailure(_Exact):
    """A rank's own report of why it ended (`zerofit.worker`)."""

    rank: Count
    host: str | None = None
    time_s: Seconds = 0.0
    problems: list[RankProblem]


class Beating(_Exact):
    """Once a second."""

    beat: Beat


class Ended(_Exact):
    """The end of the rank's process."""

    ended: Annotated[int, Field(ge=-255, le=255)]  # exit code; negative: the signal
    last: RankBeat = RankBeat()
    failure: RankFailure | None = None


class Stacks(_Exact):
    """The stack traces that were asked for are written: how, or why they are not."""

    stacks: str


Message = Beating | Ended | Stacks
_HELLO, _MESSAGE = TypeAdapter[Hello](Hello), TypeAdapter[Message](Message)


def read_hello(value: Any) -> Hello:
    """Return the first message of a connection. Raises InvalidMessage."""
    return _read(_HELLO, value)


def read_message(value: Any) -> Message:
    """Return a later message. Raises InvalidMessage."""
    return _read(_MESSAGE, value)


def _read(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise InvalidMessage(f"{error.error_count()} faults") from None
