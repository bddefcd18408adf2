"""Torch without its compiler: importing that takes a second of every start, and torch asks for it where it need not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
# what fake tensors ask before they have anything to compile (torch/_subclasses/fake_tensor.py), as torch sets it
FLAGS = {"fake_tensor_cache_enabled": True, "fake_tensor_cache_crosscheck_enabled": False, "_custom_ops_profile": None}


class _StandIn(ModuleType):
    """A torch._dynamo that leaves functions as they are; asked for anything else, it makes way for the real one."""

    def disable(self, fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function: where nothing is compiled there is nothing to keep from being compiled."""
        return fn

    def graph_break(self) -> None:
        """Break no graph, since none is being made."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect looks for a file in all modules
            raise AttributeError(name)
        _leave()
        return getattr(importlib.import_module(NAME), name)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep torch from importing its compiler for optimizers, fake tensors and dispatch modes that are used within.

    Whoever compiles gets the real one; where it has been imported already, nothing changes.
    """
    if NAME not in sys.modules:
        stand_in, config = _StandIn(NAME), ModuleType(f"{NAME}.config")
        vars(config).update(FLAGS)
        vars(stand_in)["config"] = config
        sys.modules.update({NAME: stand_in, config.__name__: config})
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    if isinstance(sys.modules.get(NAME), _StandIn):
        del sys.modules[NAME], sys.modules[f"{NAME}.config"]
