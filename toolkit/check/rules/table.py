"""All rules about values, in the order in which they are reported for one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zerofit.check.finding import Finding
from zerofit.check.rules.batch import batch
from zerofit.check.rules.features import FEATURES, never_read
from zerofit.check.rules.model import sizes
from zerofit.check.rules.optimizer import OPTIMIZER_RULES, optimizer
from zerofit.check.rules.parallel import PARALLEL
from zerofit.check.rules.precision import PRECISION
from zerofit.check.rules.rule import Rule
from zerofit.check.rules.scheduler import SCHEDULER_RULES, scheduler
from zerofit.check.rules.zero import ZERO_RULES, nvme, other_stages
from zerofit.check.subject import Subject

RULES: tuple[Rule, ...] = (*PRECISION, *ZERO_RULES, *OPTIMIZER_RULES, *SCHEDULER_RULES, *PARALLEL, *FEATURES)
FUNCTIONS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    batch,
    other_stages,
    nvme,
    optimizer,
    scheduler,
    never_read,
    sizes,
)
