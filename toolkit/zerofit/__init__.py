"""zerofit: train CNNs and Transformers that do not fit on one GPU, with DeepSpeed.

Names are loaded on first use, so `import zerofit` is fast and does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit import hf
    from zerofit.app.checking import check
    from zerofit.app.checkpoints import Checkpoint
    from zerofit.app.comparing.comparisons import compare_scaling, compare_sizes, compare_strategies
    from zerofit.app.comparing.rows import Comparison
    from zerofit.app.data_view import DataView, look_at_data
    from zerofit.app.explaining import explain
    from zerofit.app.inference import ChatResult, Evaluation, Generation, chat, evaluate, generate
    from zerofit.app.planning.plan import Plan
    from zerofit.app.planning.planner import plan
    from zerofit.app.replaying import replay
    from zerofit.app.simulation.runs import simulate
    from zerofit.app.simulation.scripts import simulate_script
    from zerofit.app.training.result import TrainingResult
    from zerofit.app.training.session import Session
    from zerofit.app.training.train import TrainingRun, train
    from zerofit.app.tuning.tune import tune
    from zerofit.explain.not_finite import Replay
    from zerofit.explain.result import Explanation
    from zerofit.simulate.forecast.result import Simulation
    from zerofit.spec.cluster import Cluster
    from zerofit.spec.errors import DoesNotFit, Problem, RunFailed, Stopped, UserError
    from zerofit.spec.events import Event
    from zerofit.spec.run import Run
    from zerofit.train.callbacks import Callback
    from zerofit.tune.search import TuneResult

__all__ = [
    "Callback",
    "ChatResult",
    "Checkpoint",
    "Cluster",
    "Comparison",
    "DataView",
    "DoesNotFit",
    "Evaluation",
    "Event",
    "Explanation",
    "Generation",
    "Plan",
    "Problem",
    "Replay",
    "Run",
    "RunFailed",
    "Session",
    "Simulation",
    "Stopped",
    "TrainingResult",
    "TrainingRun",
    "TuneResult",
    "UserError",
    "chat",
    "check",
    "compare_scaling",
    "compare_sizes",
    "compare_strategies",
    "evaluate",
    "explain",
    "generate",
    "hf",
    "look_at_data",
    "plan",
    "replay",
    "simulate",
    "simulate_script",
    "train",
    "tune",
]
_MODULES = {
    "zerofit.app.checking": ("check",),
    "zerofit.app.checkpoints": ("Checkpoint",),
    "zerofit.app.comparing.comparisons": ("compare_scaling", "compare_sizes", "compare_strategies"),
    "zerofit.app.comparing.rows": ("Comparison",),
    "zerofit.app.data_view": ("DataView", "look_at_data"),
    "zerofit.app.explaining": ("explain",),
    "zerofit.app.inference": ("ChatResult", "Evaluation", "Generation", "chat", "evaluate", "generate"),
    "zerofit.app.planning.plan": ("Plan",),
    "zerofit.app.planning.planner": ("plan",),
    "zerofit.app.replaying": ("replay",),
    "zerofit.app.simulation.scripts": ("simulate_script",),
    "zerofit.app.training.session": ("Session",),
    "zerofit.app.simulation.runs": ("simulate",),
    "zerofit.app.training.result": ("TrainingResult",),
    "zerofit.app.training.train": ("TrainingRun", "train"),
    "zerofit.app.tuning.tune": ("tune",),
    "zerofit.explain.not_finite": ("Replay",),
    "zerofit.explain.result": ("Explanation",),
    "zerofit.hf": ("hf",),
    "zerofit.simulate.forecast.result": ("Simulation",),
    "zerofit.spec.cluster": ("Cluster",),
    "zerofit.spec.errors": ("DoesNotFit", "Problem", "RunFailed", "Stopped", "UserError"),
    "zerofit.spec.events": ("Event",),
    "zerofit.spec.run": ("Run",),
    "zerofit.train.callbacks": ("Callback",),
    "zerofit.tune.search": ("TuneResult",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")
    try:
        module = import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        # an optional package may be missing: name the extra that installs it
        from zerofit.spec.extras import missing_extra

        if missing := missing_extra(error):
            error.add_note(missing.hint)
        raise
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The class of this module. Its functions stay when packages of the same name are imported."""

    # the import of the package zerofit.plan sets the attribute `plan`, which must stay the function
    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
