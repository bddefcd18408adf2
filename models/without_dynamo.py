"""Import torch without its compiler, which it imports needlessly and which takes a second."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

NAME = "torch._dynamo"
# flags that fake tensors read (torch/_subclasses/fake_tensor.py), with torch's values
FLAGS = {"fake_tensor_cache_enabled": True, "fake_tensor_cache_crosscheck_enabled": False, "_custom_ops_profile": None}


# `import torch._dynamo` takes about a second, in every process of a run. Most of torch only wants decorators from it.
# The stand-ins have these; any other attribute imports the real module and removes the stand-ins.
class _StandIn(ModuleType):
    """A stand-in for a compiler's module. A missing attribute imports the real module."""

    def __getattr__(self, name: str) -> object:
        is_package = name == "__path__" and self.__name__ == NAME  # read to import another module of the package
        if name.startswith("__") and not is_package:  # inspect reads __file__ of all modules
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _disable(fn: Callable[..., object] | None = None, *_: object, **__: object) -> Callable[..., object]:
    """Return the function unchanged, or a decorator that does so, since nothing is compiled."""
    return fn or _disable


def _assume_constant_result(fn: Callable[..., object]) -> Callable[..., object]:
    """Mark the function as the real decorator does (transformers/integrations/deepgemm.py)."""
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


def _graph_break() -> None:
    """Do nothing, since no graph is compiled."""


def _is_compile_supported(device_type: str) -> bool:
    """Call the real function, which torchvision hardly ever calls (ops/roi_align.py)."""
    _remove_stand_ins()
    return importlib.import_module(f"{NAME}.utils").is_compile_supported(device_type)


def _clear_lru_cache() -> None:
    """Do nothing, since there are no caches (called by torch/distributed/distributed_c10d.py)."""


def _get_optimize_ddp_mode() -> str:
    """Return torch's default, which DistributedDataParallel reads."""
    return "ddp_optimizer"


def _transform_get_item_to_index() -> object:
    """Return the real mode, which transformers needs for masks with vmap (masking_utils.py)."""
    _remove_stand_ins()
    return importlib.import_module(f"{NAME}._trace_wrapped_higher_order_op").TransformGetItemToIndex()


STAND_INS: dict[str, dict[str, object]] = {
    NAME: {
        "allow_in_graph": _disable,
        "assume_constant_result": _assume_constant_result,
        "disable": _disable,
        "graph_break": _graph_break,
    },
    f"{NAME}._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": _transform_get_item_to_index},
    f"{NAME}.config": FLAGS,
    f"{NAME}.trace_rules": {"clear_lru_cache": _clear_lru_cache},
    f"{NAME}.utils": {
        "is_compile_supported": _is_compile_supported,
        "get_optimize_ddp_mode": _get_optimize_ddp_mode,
    },
}


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Inside this context, torch and torchvision do not import the compiler.

    Both import the compiler in optimizers, fake tensors, dispatch modes and process groups. Compiling still works and
    imports the real module. If the real module is already imported, nothing changes.
    """
    outermost = NAME not in sys.modules
    if outermost:
        for name, content in STAND_INS.items():
            sys.modules[name] = _StandIn(name)
            vars(sys.modules[name]).update(content)
        for part in ("config", "trace_rules", "utils"):
            vars(sys.modules[NAME])[part] = sys.modules[f"{NAME}.{part}"]
    try:
        yield
    finally:
        if outermost:
            _remove_stand_ins()


def _remove_stand_ins() -> None:
    for name in STAND_INS:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
