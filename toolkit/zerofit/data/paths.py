"""Where data is kept on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.spec.cache import cache_root
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.run import Run


def data_root(run: Run) -> Path:
    """The folder that holds (or gets) torchvision's data sets: --data-root, else data/ in zerofit's cache."""
    return run.data_root.expanduser() if run.data_root else cache_root() / "data"


@contextmanager
def cache_errors(name: str) -> Iterator[None]:
    """Turn a full disk, or a file that may not be read or written, into a UserError "cache" about the data `name`."""
    try:
        yield
    except OSError as error:
        message = f"{name}: {error.strerror or error}: {error.filename or cache_root()}"
        hint = f"check permissions and free space; ZEROFIT_CACHE=FOLDER replaces {cache_root()}"
        raise UserError(Problem(kind="cache", message=message, hint=hint)) from error
