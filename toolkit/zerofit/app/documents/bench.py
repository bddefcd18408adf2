"""Run the documents' experiments; each result is stored, so a killed command continues after the last one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zerofit.app.comparing.laboratory import Done, Experiment, conduct
from zerofit.app.comparing.rows import RowStore
from zerofit.report.documents import Evidence
from zerofit.spec.events import OnEvent, Reporter
from zerofit.spec.files import write_json
from zerofit.spec.foreign import Unreadable, read_json

T = TypeVar("T")


class Bench:
    """The folder of all results and the progress of the command."""

    def __init__(self, folder: Path, on_event: OnEvent | None = None):
        """Use a new folder, or one of the same command. Raises UserError for any other."""
        self.report, self._on_event = Reporter(on_event), on_event
        self.folder = folder
        self._store = RowStore(folder, "documents", {"job": {"model": "documents"}})

    def compare(self, name: str, model: str, kind: str, question: str = "", **options: Any) -> Done:
        """Do one of `zerofit compare`'s experiments; `options` are fields of the run and options of the comparison."""
        experiment = Experiment(name=name, question=question, kind=kind, options=options)
        return conduct(experiment, self._store.folder_of(name), {"model": model}, on_event=self._on_event)

    def keep(self, name: str, measure: Callable[[], T]) -> T:
        """Return plain data that was measured before under this name, or measure it now."""
        file = self._store.folder_of(f"{name}.json")
        try:
            found: Any = read_json(file) if file.exists() else None
        except Unreadable:  # cut by a kill
            found = None
        if found is None:
            self.report.status(f"{name} ...")
            found = measure()
            write_json(file, found)
        return found

    def evidence(self, done: Done, title: str, **more: Any) -> Evidence:
        """Return the table of a comparison with its command, its picture, and why some rows have no figures."""
        columns, rows = done.compared.page_table()
        missing = [f"`{name}`: {reason}" for name, reason in done.compared.missing()]
        picture = self._store.folder_of(done.experiment.name) / "comparison.png"
        usual = {"columns": columns, "rows": rows, "command": done.command, "picture": picture}
        usual["figures"] = done.compared.to_dict()
        return Evidence(title=title, notes=[*more.pop("notes", ()), *missing], **usual | more)
