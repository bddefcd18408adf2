"""Errors for users: what is wrong, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

T = TypeVar("T")
DOES_NOT_FIT = "does-not-fit"  # kind of a problem from a memory forecast
LONGEST_REASON = 1000  # characters; some libraries' errors list every tensor of a model


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem, as `--json` prints it.

    >>> Problem(kind="ranks", message="3 ranks on 2 GPUs", hint="use --ranks 2").as_dict()["kind"]
    'ranks'
    """

    kind: str  # stable slug: "unknown-key", "batch-size", "bad-image", ...
    message: str  # what is wrong and what is allowed
    hint: str = ""  # what to do
    where: str = ""  # "run.yaml:3:1", "--micro-batch", "ds.json: zero_optimization.stage"

    def as_dict(self) -> dict[str, str]:
        """Return the four keys of the command line's error object."""
        return asdict(self)


class UserError(Exception):
    """Bad input (exit code 2), with all problems that were found.

    >>> import zerofit as zf
    >>> try:
    ...     zf.Cluster("h1000", gpus=0)
    ... except UserError as error:
    ...     [problem.kind for problem in error.problems]
    ['bad-value', 'unknown-gpu']
    """

    exit_code = 2

    def __init__(self, *problems: Problem):
        assert problems, "a UserError without a problem"
        self.problems = problems
        super().__init__("; ".join(p.message + (f" ({p.hint})" if p.hint else "") for p in problems))


class ModelError(ValueError):
    """A model that cannot be built as requested: a stable slug, the error, and what to do."""

    exit_code = 2

    def __init__(self, kind: str, message: str, hint: str = ""):
        super().__init__(message + (f" ({hint})" if hint else ""))
        self.kind, self.message, self.hint = kind, message, hint


@contextmanager
def models_say(where: str) -> Iterator[None]:
    """Turn a ModelError of models/ into a UserError that names `where`, the flag or file."""
    try:
        yield
    except ModelError as error:
        raise UserError(Problem(kind=error.kind, message=error.message, hint=error.hint, where=where)) from None


class RunFailed(Exception):
    """A run that started and failed: out of memory, NaN, a rank died (exit code 3).

    >>> str(RunFailed(Problem(kind="out-of-memory", message="rank 0: out of memory", hint="lower --micro-batch")))
    'rank 0: out of memory'
    """

    exit_code = 3

    def __init__(self, problem: Problem):
        self.problem = problem
        super().__init__(problem.message)


class Stopped(Exception):
    """A run that stopped on request after it saved a checkpoint (exit code 75).

    >>> Stopped(Problem(kind="stopped", message="stopped on request after step 7 of 9")).problem.kind
    'stopped'
    """

    exit_code = 75

    def __init__(self, problem: Problem):
        self.problem = problem
        super().__init__(problem.message)


class DoesNotFit(Exception):
    """A run or a model does not fit the memory that it may use (exit code 1).

    >>> str(DoesNotFit(Problem(kind="does-not-fit", message="cpu needs 2 GiB and may use 1 GiB")))
    'cpu needs 2 GiB and may use 1 GiB'
    """

    exit_code = 1

    def __init__(self, *problems: Problem):
        assert problems, "a DoesNotFit without a problem"
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


class Problems:
    """Collects problems, to raise them together."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def add(self, kind: str, message: str, hint: str = "", where: str = "") -> None:
        """Add one problem."""
        self._found.append(Problem(kind=kind, message=message, hint=hint, where=where))

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add the problems of another check."""
        self._found.extend(problems)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None if it raises a UserError, whose problems are added."""
        try:
            return work()
        except UserError as error:
            self.extend(error.problems)
            return None

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def raise_if_any(self) -> None:
        """If problems were added, raise a UserError with all of them."""
        if self._found:
            raise UserError(*self._found)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error on one line, or its class if it has no message.

    >>> reason_of(ValueError("Validation error for field 'a':\\n  TypeError: expected int, got str"))
    "Validation error for field 'a': TypeError: expected int, got str"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = "; ".join(lines).replace(":; ", ": ")
    if not text or isinstance(error, KeyError):  # its message is only the key
        text = f"{type(error).__name__} {text}".rstrip()
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint with up to three close names, or all names if there are few."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names) if len(names) <= 30 else ""
