"""Build the page sections about errors, replays, and findings in DeepSpeed JSONs."""

from __future__ import annotations

from collections.abc import Iterator

from zerofit.report.answers import CheckAnswer, ExplanationAnswer, ReplayAnswer
from zerofit.report.forecasts import cost, kind_blocks
from zerofit.report.page import Answer, Code, Section, Tone, named, table_of
from zerofit.spec.files import number_in
from zerofit.spec.units import shown_bytes

UNKNOWN = "unknown"
FIGURES = {  # figures of an error, and their labels
    "asked_bytes": "requested",
    "total_bytes": "total",
    "allocated_bytes": "in tensors",
    "unallocated_bytes": "unused by torch",
    "reserved_bytes": "reserved by torch",
    "process_bytes": "this process",
    "free_bytes": "free",
}


def explanation_answer(name: str, found: ExplanationAnswer) -> Answer:
    """Return the cause of an out-of-memory error (or another failure), with the evidence."""
    facts = [("because", reason) for reason in found.evidence]
    facts += [("your line", " ".join(filter(None, (found.at, found.code))))]
    facts += [("requested by" if found.place else "raised in", found.asked_by)]
    facts += [
        ("phase", found.phase),
        ("steps before", str(found.steps or "")),
        ("reported by ranks", ", ".join(found.ranks)),
    ]
    sizes = {label: number_in(found.figures, key) for key, label in FIGURES.items()}
    facts += [(label, shown_bytes(size)) for label, size in sizes.items() if size is not None]
    verdict = "Cannot know" if found.cause == UNKNOWN else found.cause.replace("-", " ").capitalize()
    return Answer(
        name=name,
        verdict=verdict,
        tone="warn" if found.cause == UNKNOWN else "bad",
        summary=found.summary,
        facts=facts,
    )


def explanation_sections(found: ExplanationAnswer) -> Iterator[Section]:
    """Yield sections: what to run next, memory, lines of code, changes, the error message."""
    yield Section(title="Run next", blocks=[Code(text=found.run_next)] if found.run_next else [])
    kinds = {"in use": found.alive} if found.alive else {}
    if found.forecast and found.forecast.kinds:
        kinds["forecast"] = found.forecast.kinds
    parts = table_of({"run and forecast": part} for part in (found.forecast.parts if found.forecast else ()))
    yield Section(title="Memory in use", blocks=[*kind_blocks(kinds), *parts])
    lines = (
        {"line": r.place, "function": r.function, "kind": r.kind, "bytes": shown_bytes(r.bytes)} for r in found.lines
    )
    yield Section(title="Lines that use the most memory", blocks=table_of(lines, words=("function", "kind")))
    # An empty text in every row removes the column. "not simulated" in every row would say nothing.
    simulated = any(row.fits is not None for row in found.changes)
    changes = (
        {
            "change": row.change,
            "reserved": shown_bytes(row.reserved_bytes) if row.reserved_bytes is not None else "",
            "step time": cost(row.slowdown),
            "verdict": {True: "fits", False: "does not fit alone", None: "not simulated"}[row.fits]
            if simulated
            else "",
        }
        for row in found.changes
    )
    listed: list[Tone] = ["" if row.fits is None else "good" if row.fits else "bad" for row in found.changes]
    yield Section(
        title="Changes that make room" if found.place else "Changes that help", blocks=table_of(changes, tones=listed)
    )
    yield Section(title="The error", blocks=[Code(text=found.message)] if found.message else [])


def replay_answer(name: str, found: ReplayAnswer) -> Answer:
    """Return the cause of a loss that is not finite, and where the replay first found it."""
    known = found.cause != UNKNOWN
    facts = [("step", str(found.step or "")), ("rank", "" if found.rank is None else str(found.rank))]
    facts += [(label, getattr(found, label)) for label in ("phase", "module", "op", "tensor", "line")]
    facts += [*(("input", text) for text in found.inputs), *(("because", text) for text in found.evidence)]
    facts += [("to do", found.advice), ("started at", f"step {found.start_step}, in {found.precision}")]
    return Answer(
        name=name,
        verdict=found.cause.replace("-", " ").capitalize() if known else "Nothing found",
        tone="bad" if known else "warn",
        summary=found.summary,
        facts=facts,
    )


def check_answer(name: str, found: CheckAnswer) -> Answer:
    """Return how many errors and warnings a DeepSpeed JSON has."""
    errors = sum(problem.severity == "error" for problem in found.problems)
    warnings = len(found.problems) - errors
    counts = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    facts = [("read by", found.reader), ("note", found.note)]
    tone: Tone = "bad" if errors else "warn" if warnings else "good"
    verdict = ", ".join(counts).capitalize() or "No findings"
    label = found.file if name == found.file else named(name, found.file)
    return Answer(name=name and label, verdict=verdict, tone=tone, facts=facts)


def check_sections(found: CheckAnswer) -> list[Section]:
    """Return the findings as a table, errors first."""
    listed = sorted(found.problems, key=lambda problem: problem.severity != "error")
    tones: list[Tone] = ["bad" if problem.severity == "error" else "warn" for problem in listed]
    rows = (
        {
            "key": problem.path or "(the file)",
            "line": str(problem.line or ""),
            "what is wrong": problem.message,
            "effect": problem.why,
            "fix": problem.fix,
        }
        for problem in listed
    )
    blocks = table_of(rows, words=("what is wrong", "effect", "fix"), tones=tones)
    return [Section(title="Findings", blocks=blocks)]
