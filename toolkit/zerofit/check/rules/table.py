"""All rules about values, in the order in which they are reported for one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zerofit.check.finding import Finding
from zerofit.check.rules.batch import batch
from zerofit.check.rules.compile import COMPILE
from zerofit.check.rules.experts import EXPERTS
from zerofit.check.rules.features import FEATURES, never_read
from zerofit.check.rules.gradients import GRADIENTS
from zerofit.check.rules.model import sizes
from zerofit.check.rules.offload import OFFLOAD, nvme
from zerofit.check.rules.optimizer import OPTIMIZER_RULES, optimizer
from zerofit.check.rules.parallel import PARALLEL
from zerofit.check.rules.precision import PRECISION
from zerofit.check.rules.rule import Rule
from zerofit.check.rules.scheduler import SCHEDULER_RULES, scheduler, scheduler_values
from zerofit.check.rules.zero import ZERO_RULES, other_stages
from zerofit.check.subject import CheckSubject

RULES: tuple[Rule, ...] = (
    *PRECISION,
    *GRADIENTS,
    *ZERO_RULES,
    *OFFLOAD,
    *OPTIMIZER_RULES,
    *SCHEDULER_RULES,
    *PARALLEL,
    *EXPERTS,
    *COMPILE,
    *FEATURES,
)
FUNCTIONS: tuple[Callable[[CheckSubject], Iterator[Finding]], ...] = (
    batch,
    other_stages,
    nvme,
    optimizer,
    scheduler,
    scheduler_values,
    never_read,
    sizes,
)
