"""One teaching document: its entry in documents.yaml, its experiments, and the tables and figures on the page.

Each result is stored, so a killed command continues after the last stored result.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.documents.page import Figure, TeachingDocument
from zerofit.app.comparing.laboratory import Done, Evidence, Experiment, conduct, flags
from zerofit.app.comparing.rows import RowStore
from zerofit.app.planning.planner import plan
from zerofit.models.presets import NAMED
from zerofit.spec.cluster import Cluster
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json
from zerofit.spec.foreign_yaml import read_yaml

T = TypeVar("T")


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the entry of each document, by number."""
    documents: dict[Any, Any] = read_yaml(Path(__file__).with_name("documents.yaml"))[0]
    return documents


def result_store(folder: Path) -> RowStore:
    """Use a new folder for the documents' results, or a folder of the same command. Raises UserError for others."""
    return RowStore(folder, "documents", {"job": {"model": "documents"}})


class DocumentRun:
    """A document with the folder of its results."""

    def __init__(self, number: str, store: RowStore, on_event: OnEvent | None = None):
        self.number, self.entry, self.folder = number, entries()[number], store.folder
        self._store, self._on_event = store, on_event

    def file(self, name: str) -> Path:
        """Return the path of a result."""
        return self._store.folder_of(f"{self.number}-{name}")

    def compare(self, name: str, **computed: Any) -> Done:
        """Run an experiment of the entry with `zerofit compare`; `computed`: options that are not in the entry."""
        options = {**self.entry["experiments"][name], **computed}
        model, kind = options.pop("model"), options.pop("kind")
        experiment = Experiment(name=f"{self.number}-{name}", question="", kind=kind, options=options)
        return conduct(experiment, self.file(name), {"model": model}, on_event=self._on_event)

    def keep(self, name: str, measure: Callable[[], T]) -> T:
        """Return plain data that was measured before under this name, or measure it now."""
        file = self.file(f"{name}.json")
        with suppress(FileNotFoundError, Unreadable):  # not measured yet, or truncated by a kill
            stored: Any = read_json(file)
            return stored
        Reporter(self._on_event).status(f"{self.number}-{name} ...")
        measured = measure()
        write_json(file, measured)
        return measured

    def plans(self) -> dict[str, dict[str, Any]]:
        """Return, by name, the best layout that `zerofit plan` finds for each plan of the entry, and its command."""
        return {name: self._plan(name, dict(options)) for name, options in self.entry["plans"].items()}

    def _plan(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        del options["title"]
        words = flags({{"image": "input"}.get(key, key): value for key, value in options.items()})
        model, gpu = options.pop("model"), options.pop("gpu")

        def forecast() -> dict[str, Any]:
            cluster = Cluster(gpu, gpus=options.pop("gpus"), nodes=options.pop("nodes", 1))
            planned = plan(model, cluster, top=1, **options)
            best = (planned.layouts or planned.misfits)[0]
            hours = best.outlook.hours if best.outlook else None
            figures = {"layout": str(best.layout), "fits": bool(planned.layouts), "peak_bytes": best.peak_bytes}
            return {**figures, "step_s": best.step_s, "samples_per_s": best.samples_per_s, "hours": hours}

        return {**self.keep(name, forecast), "command": shlex.join(["zerofit", "plan", *words])}

    def plan_table(
        self, plans: Mapping[str, Mapping[str, Any]], cells: Callable[[Mapping[str, Any]], list[str]]
    ) -> Evidence:
        """Return a row for each plan: title, layout, `cells` and command."""
        titled = {self.entry["plans"][name]["title"]: plan for name, plan in plans.items()}
        rows = [[title, p["layout"], *cells(p), f"`{p['command']}`"] for title, p in titled.items()]
        return self.table("plans", rows=rows, figures=titled)

    def comparison_table(self, name: str, done: Done, **values: str) -> Evidence:
        """Return the table of a comparison with its command, its picture, and why some rows have no figures."""
        columns, rows = done.compared.page_table()
        missing = [f"`{row}`: {reason}" for row, reason in done.compared.missing()]
        content = {"columns": columns, "rows": rows, "figures": done.compared.to_dict(), "command": done.command}
        picture = self.file(name) / "comparison.png"
        return self.table(name, values, notes=missing, picture=picture, **content)

    def table(
        self, name: str, values: Mapping[str, str] | None = None, notes: Sequence[str] = (), **content: Any
    ) -> Evidence:
        """Return a table with the entry's title, text, columns and notes; `values`: for its text."""
        entry = self.entry["tables"][name]
        text = entry.get("text", "").format(models=NAMED, **(values or {}))
        return Evidence(**{**entry, "text": text, "notes": [*entry.get("notes", ()), *notes], **content})

    def page(self, values: Mapping[str, Any], evidence: Sequence[Evidence]) -> TeachingDocument:
        """Return the document with its entry's text and figures; `values` fill in their placeholders."""
        figures = [
            Figure(**{key: text.format(models=NAMED, **values).strip() for key, text in figure.items()})
            for figure in self.entry["figures"]
        ]
        about = {name: self.entry[name] for name in ("title", "network", "experiment")}
        return TeachingDocument(number=self.number, **about, figures=figures, evidence=evidence)
