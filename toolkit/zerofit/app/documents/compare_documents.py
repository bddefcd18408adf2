"""All documents, one after the other, and one page about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.app.comparing.processes import one_server
from zerofit.app.documents import batch_sizes, parallel_training, several_devices, shared_models
from zerofit.app.documents.document import DocumentRun, result_store
from zerofit.report.experiment_pages import TeachingDocument, write_documents
from zerofit.spec.errors import Problems, nearest
from zerofit.spec.events import OnEvent

DOCUMENTS: dict[str, Callable[[DocumentRun], TeachingDocument]] = {
    "000": parallel_training.repeat,
    "001": batch_sizes.repeat,
    "002": several_devices.repeat,
    "003": shared_models.repeat,
}
PAGE = Path("runs/documents.md")


@dataclass(frozen=True, kw_only=True)
class DocumentComparison:
    """The documents in their order, and the page about them."""

    documents: Sequence[TeachingDocument]
    written: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zerofit compare documents --json`."""
        documents = [document.to_dict() for document in self.documents]
        return {"kind": "documents", "documents": documents, "written": list(self.written)}


@one_server()
def compare_documents(
    numbers: Sequence[str] = (), *, output: Path | None = None, on_event: OnEvent | None = None
) -> DocumentComparison:
    """Repeat the experiments of all documents, or of the documents `numbers`; write a page that compares their figures.

    After a kill, the same call continues and keeps earlier measurements.

    Args:
        numbers: the documents to repeat; all if empty.
        output: the page; the measurements are in a folder of the same name next to it.
        on_event: gets progress.

    Raises UserError for unknown numbers, and if the folder contains other things.
    """
    problems = Problems()
    for number in numbers:
        if number not in DOCUMENTS:
            problems.add("document", f"unknown document {number!r}", nearest(number, DOCUMENTS), "DOCUMENT")
    problems.raise_if_any()
    page = (output or PAGE).with_suffix(".md")
    store, chosen = (
        result_store(page.with_suffix("")),
        [number for number in DOCUMENTS if number in numbers or not numbers],
    )
    documents = [DOCUMENTS[number](DocumentRun(number, store, on_event)) for number in chosen]
    write_documents(page, documents)
    return DocumentComparison(documents=documents, written=[str(page)])
