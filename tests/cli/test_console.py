"""What the command line shows of events: text as it is, whatever is in it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from zerofit.cli import console as module
from zerofit.cli.console import EventConsole, stage_table
from zerofit.doctor.check import FAIL, Check
from zerofit.spec.events import Event, Reporter, shielded, stages_event

HOSTILE = "[/x] [y]"


def events() -> list[Event]:
    finding = Check(name=HOSTILE, host=HOSTILE, status=FAIL, value=HOSTILE, expected=HOSTILE, hint=HOSTILE)
    return [
        Event(kind="status", text=HOSTILE),
        Event(kind="phase", text=HOSTILE),
        Event(kind="ranks", text=HOSTILE),
        Event(kind="note", text=HOSTILE),
        Event(kind="warning", text=f"reason {HOSTILE}", data={"where": f"/runs/{HOSTILE}/a.json"}),
        Event(kind="result", text=HOSTILE),
        stages_event([{"stage": 0, "ranks": [0], "parts": [[HOSTILE]], "parameters": 1}]),
        Event(kind="training", data={"steps": 2, "done": 0}),
        Event(kind="metrics", text=f"step 1: {HOSTILE}", done=1, total=2, unit="steps"),
        Event(kind="evaluated", text=HOSTILE),
        Event(kind="saved", text=HOSTILE),
        Event(kind="task", text=HOSTILE, done=1, total=2, unit=HOSTILE),
        Event(kind="task", text=HOSTILE, done=2, total=2, unit=HOSTILE, ended=True),
        Event(kind="checks", data={"checks": [finding], "hosts": 1}),
    ]


@pytest.mark.parametrize("live", [False, True])
def test_brackets_are_text_in_every_kind_of_event(capsys, monkeypatch, live):
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=live, markup=False, highlight=False, width=200) if live else None
    monkeypatch.setattr(module, "err", lambda: made or Console(stderr=True, markup=False, highlight=False, width=200))
    with EventConsole(log_every=1) as show:
        for event in events():
            show(event)
    shown = screen.getvalue() + capsys.readouterr().err
    assert f"warning: reason {HOSTILE}" in shown
    assert f"/runs/{HOSTILE}/a.json" in shown
    assert shown.count(HOSTILE) >= 10


def test_a_renderer_that_raises_is_told_once_and_ends_nothing(caplog):
    def show(event: Event) -> None:
        raise ValueError(event.text)

    report = Reporter(shielded(show))
    report.note("one")
    report.note("two")
    assert len(caplog.records) == 1
    assert "the run continues" in caplog.text


def test_the_map_of_a_pipeline_has_eighty_columns():
    names = [f"model.language_model.layers.{n}" for n in range(200)]
    rows = [{"stage": 9, "ranks": [512, 575], "parts": [names[:9], names[9:]], "parameters": 70 * 10**9}]
    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(stage_table(screen, rows))
    assert max(map(len, shown.get().splitlines())) <= 80
    assert {"512-575", "70,000,000,000"} < set(shown.get().split())
