"""Messages from guards to the command, validated before use."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

# Anybody on the network can connect to the command's port. So types are strict (true is not a rank, "5" is not a
# number), numbers have limits, and unknown keys close the connection.
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
T = TypeVar("T")


class InvalidMessage(ValueError):
    """Raised for a message that no guard sends."""


class _Exact(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Hello(_Exact):
    """The first message of a connection: the key of the start, and the guard's rank."""

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
    """A rank's heartbeat with its guard's facts about the process."""

    silent_s: Seconds = 0.0
    state: str = ""
    cpu_s: Seconds = 0.0


class RankProblem(_Exact):
    """A `spec.errors.Problem`."""

    kind: str
    message: str
    hint: str = ""
    where: str = ""


class RankFailure(_Exact):
    """A rank's own report of its failure (`zerofit.worker`)."""

    rank: Count
    host: str | None = None
    time_s: Seconds = 0.0
    problems: list[RankProblem]


class Beating(_Exact):
    """Heartbeat message, sent once a second."""

    beat: Beat


class Ended(_Exact):
    """The end of the rank's process."""

    ended: Annotated[int, Field(ge=-255, le=255)]  # exit code; negative: the signal
    last: RankBeat = RankBeat()
    failure: RankFailure | None = None


class Stacks(_Exact):
    """The answer to a request for stack traces: the method that wrote them, or what failed."""

    stacks: str


Message = Beating | Ended | Stacks
_HELLO, _MESSAGE = TypeAdapter[Hello](Hello), TypeAdapter[Message](Message)


def read_hello(value: object) -> Hello:
    """Return the first message of a connection. Raises InvalidMessage."""
    return _read(_HELLO, value)


def read_message(value: object) -> Message:
    """Return a later message. Raises InvalidMessage."""
    return _read(_MESSAGE, value)


def _read(adapter: TypeAdapter[T], value: object) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise InvalidMessage(f"{error.error_count()} faults") from None
