"""Repeat the experiments of the teaching documents 000 to 003, and compare the figures on one page.

python -m benchmarks.documents [NUMBER]... [--output PAGE]

The measurements go to a folder of the same name next to the page. Repeat the command to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.documents import batch_sizes, parallel_training, several_devices, shared_models
from benchmarks.documents.document import DocumentRun, result_store
from benchmarks.documents.page import TeachingDocument, write_documents
from zerofit.app.comparing.processes import one_server
from zerofit.spec.events import Event

DOCUMENTS: dict[str, Callable[[DocumentRun], TeachingDocument]] = {
    "000": parallel_training.repeat,
    "001": batch_sizes.repeat,
    "002": several_devices.repeat,
    "003": shared_models.repeat,
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the documents' numbers and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="documents [all]")
    parser.add_argument("--output", type=Path, default=Path("runs/documents.md"), help="the page [%(default)s]")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.numbers) - DOCUMENTS.keys():
        parser.error(f"unknown document {', '.join(sorted(unknown))}: choose from {', '.join(DOCUMENTS)}")
    return arguments


def show(event: Event) -> None:
    """Print progress."""
    print(event.text, flush=True)


@one_server()
def main(words: list[str] | None = None) -> None:
    """Repeat the chosen documents, and write the page."""
    arguments = parse(words)
    page = arguments.output.with_suffix(".md")
    store = result_store(page.with_suffix(""))
    chosen = [number for number in DOCUMENTS if number in arguments.numbers or not arguments.numbers]
    write_documents(page, [DOCUMENTS[number](DocumentRun(number, store, show)) for number in chosen])
    print(f"written: {page}")


if __name__ == "__main__":
    main()
