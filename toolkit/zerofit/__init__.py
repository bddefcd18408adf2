"""zerofit: train CNNs and Transformers that no longer fit, through the DeepSpeed engine.

The names below are loaded when they are first used, so that `import zerofit` takes no time and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.spec.errors import Problem as Problem
    from zerofit.spec.errors import RunFailed as RunFailed
    from zerofit.spec.errors import Stopped as Stopped
    from zerofit.spec.errors import UserError as UserError
    from zerofit.spec.events import Event as Event
    from zerofit.spec.run import Run as Run

_PLACES = {
    "Event": "zerofit.spec.events",
    "Problem": "zerofit.spec.errors",
    "Run": "zerofit.spec.run",
    "RunFailed": "zerofit.spec.errors",
    "Stopped": "zerofit.spec.errors",
    "UserError": "zerofit.spec.errors",
}
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]  # the literal list is _PLACES


def __getattr__(name: str) -> object:
    """Load a public name from where it is defined."""
    if name not in _PLACES:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
