"""zerofit: train CNNs and Transformers that no longer fit, through the DeepSpeed engine.

The names below are loaded when they are first used, so that `import zerofit` takes no time and imports no torch.
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
    from zerofit.app.comparing.result import Comparison as Comparison
    from zerofit.app.inference import Evaluation as Evaluation
    from zerofit.app.inference import Generation as Generation
    from zerofit.app.inference import evaluate as evaluate
    from zerofit.app.inference import generate as generate
    from zerofit.app.planning.answers import Plan as Plan
    from zerofit.app.planning.planner import plan as plan
    from zerofit.app.session import Session as Session
    from zerofit.app.simulation import simulate as simulate
    from zerofit.app.training import TrainingRun as TrainingRun
    from zerofit.app.training import train as train
    from zerofit.app.training_result import TrainingResult as TrainingResult
    from zerofit.app.tuning.tune import tune as tune
    from zerofit.infer.limits import DoesNotFit as DoesNotFit
    from zerofit.simulate.result import Simulation as Simulation
    from zerofit.spec.cluster import Cluster as Cluster
    from zerofit.spec.errors import Problem as Problem
    from zerofit.spec.errors import RunFailed as RunFailed
    from zerofit.spec.errors import Stopped as Stopped
    from zerofit.spec.errors import UserError as UserError
    from zerofit.spec.events import Event as Event
    from zerofit.spec.run import Run as Run
    from zerofit.train.callbacks import Callback as Callback
    from zerofit.tune.result import TuneResult as TuneResult

__all__ = [
    "Callback",
    "Checkpoint",
    "Cluster",
    "Comparison",
    "DoesNotFit",
    "Evaluation",
    "Event",
    "Generation",
    "Plan",
    "Problem",
    "Run",
    "RunFailed",
    "Session",
    "Simulation",
    "Stopped",
    "TrainingResult",
    "TrainingRun",
    "TuneResult",
    "UserError",
    "check",
    "compare_scaling",
    "compare_sizes",
    "compare_strategies",
    "evaluate",
    "generate",
    "hf",
    "plan",
    "simulate",
    "train",
    "tune",
]
_PLACES = {
    "Callback": "zerofit.train.callbacks",
    "Checkpoint": "zerofit.app.checkpoints",
    "Cluster": "zerofit.spec.cluster",
    "Comparison": "zerofit.app.comparing.result",
    "DoesNotFit": "zerofit.infer.limits",
    "Evaluation": "zerofit.app.inference",
    "Event": "zerofit.spec.events",
    "Generation": "zerofit.app.inference",
    "Plan": "zerofit.app.planning.answers",
    "Problem": "zerofit.spec.errors",
    "Run": "zerofit.spec.run",
    "RunFailed": "zerofit.spec.errors",
    "Simulation": "zerofit.simulate.result",
    "Session": "zerofit.app.session",
    "Stopped": "zerofit.spec.errors",
    "TrainingResult": "zerofit.app.training_result",
    "TrainingRun": "zerofit.app.training",
    "TuneResult": "zerofit.tune.result",
    "UserError": "zerofit.spec.errors",
    "check": "zerofit.app.checking",
    "compare_scaling": "zerofit.app.comparing.comparisons",
    "compare_sizes": "zerofit.app.comparing.comparisons",
    "compare_strategies": "zerofit.app.comparing.comparisons",
    "evaluate": "zerofit.app.inference",
    "generate": "zerofit.app.inference",
    "hf": "zerofit.hf",
    "plan": "zerofit.app.planning.planner",
    "simulate": "zerofit.app.simulation",
    "train": "zerofit.app.training",
    "tune": "zerofit.app.tuning.tune",
}


def __getattr__(name: str) -> object:
    """Load a public name from where it is defined."""
    if name not in _PLACES:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")
    module = import_module(_PLACES[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """This module, whose functions keep their names where a package of the same name is imported (`zerofit.plan`)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
