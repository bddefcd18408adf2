"""zerofit: train CNNs and Transformers that no longer fit, through the DeepSpeed engine.

Names are loaded on first use, so `import zerofit` is fast and does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit import hf as hf
    from zerofit.app.checking import check as check
    from zerofit.app.checkpoints import Checkpoint as Checkpoint
    from zerofit.app.comparing.comparisons import compare_scaling as compare_scaling
    from zerofit.app.comparing.comparisons import compare_sizes as compare_sizes
    from zerofit.app.comparing.comparisons import compare_strategies as compare_strategies
    from zerofit.app.comparing.rows import Comparison as Comparison
    from zerofit.app.data_view import DataView as DataView
    from zerofit.app.data_view import look_at_data as look_at_data
    from zerofit.app.explaining import explain as explain
    from zerofit.app.inference import ChatResult as ChatResult
    from zerofit.app.inference import Evaluation as Evaluation
    from zerofit.app.inference import Generation as Generation
    from zerofit.app.inference import chat as chat
    from zerofit.app.inference import evaluate as evaluate
    from zerofit.app.inference import generate as generate
    from zerofit.app.planning.plan import Plan as Plan
    from zerofit.app.planning.planner import plan as plan
    from zerofit.app.replaying import replay as replay
    from zerofit.app.simulation.runs import simulate as simulate
    from zerofit.app.simulation.scripts import simulate_script as simulate_script
    from zerofit.app.training.result import TrainingResult as TrainingResult
    from zerofit.app.training.session import Session as Session
    from zerofit.app.training.train import TrainingRun as TrainingRun
    from zerofit.app.training.train import train as train
    from zerofit.app.tuning.tune import tune as tune
    from zerofit.explain.not_finite import Replay as Replay
    from zerofit.explain.result import Explanation as Explanation
    from zerofit.simulate.forecast.result import Simulation as Simulation
    from zerofit.spec.cluster import Cluster as Cluster
    from zerofit.spec.errors import DoesNotFit as DoesNotFit
    from zerofit.spec.errors import Problem as Problem
    from zerofit.spec.errors import RunFailed as RunFailed
    from zerofit.spec.errors import Stopped as Stopped
    from zerofit.spec.errors import UserError as UserError
    from zerofit.spec.events import Event as Event
    from zerofit.spec.run import Run as Run
    from zerofit.train.callbacks import Callback as Callback
    from zerofit.tune.search import TuneResult as TuneResult

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
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _PLACES:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")
    try:
        module = import_module(_PLACES[name])
    except ModuleNotFoundError as error:
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
    """The class of this module. An import of a package such as `zerofit.plan` does not replace the function `plan`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
