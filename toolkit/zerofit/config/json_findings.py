"""The checker before a run: its errors stop it, except about what the run settles by itself."""

from __future__ import annotations

from zerofit.check.check import check
from zerofit.check.document import Document
from zerofit.check.finding import Finding
from zerofit.check.subject import TargetHardware
from zerofit.spec.errors import Problems
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import Run

# what a run fills, mends or checks against its own values (config.batch, config.resolve, config.refuse, train.driver)
SETTLED = frozenset(
    {
        "batch-missing",
        "batch-identity",
        "batch-tensor-parallel",
        "optimizer-untested",
        "muon-reduce-scatter",
        "fp16-device",
        "bf16-device",
        "bf16-without-zero",
        "sequence-parallel-alone",
        "scheduler-without-optimizer",
        "trailing-comma",
        "activations-host",
    }
)
# warnings about another machine that are errors on the one that trains
FATAL = frozenset({"nvme-path"})


def where(finding: Finding, document: Document, place: str) -> str:
    """Where a finding stands, for people: file, line and column if there is a file, and the key."""
    line = "" if document.generated else f":{finding.line}:{finding.column}"
    return f"{place}{line}: {finding.path}"


def examine(document: Document, run: Run, machine: Machine, place: str, problems: Problems) -> list[Finding] | None:
    """Warnings about the JSON, or None where it has errors, which are noted in `problems`."""
    precisions = ("fp32", *(name for name in ("bf16", "fp16") if getattr(machine, name)))
    setting = TargetHardware(pipeline=run.pipeline, accelerator=machine.accelerator, precisions=precisions)
    found = [f for f in check(document, setting) if f.code not in SETTLED]
    fatal = FATAL if machine.here else frozenset()
    errors = [f for f in found if f.severity == "error" or f.code in fatal]
    for finding in errors:
        problems.add(finding.code, f"{finding.message}. {finding.why}", finding.fix, where(finding, document, place))
    return None if errors else found
