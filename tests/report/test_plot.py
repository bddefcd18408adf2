"""`zerofit plot` draws run folders."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from tests.cli.asking import answer
from zerofit.report import plot


def a_run(path, tokens: float | None = 100.0):
    (path / "logs").mkdir(parents=True)
    steps = [
        {"step": n, "loss": 3 / n, "samples_per_s": 9.0, "tokens_per_s": tokens, "memory_bytes": 2**30}
        for n in range(1, 9)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (path / "logs" / "events.jsonl").write_text(json.dumps({"event": "eval", "step": 8, "loss": 0.5}) + "\n")
    return path


def test_two_runs_in_one_picture(tmp_path):
    runs = [str(a_run(tmp_path / name)) for name in ("a", "b")]
    out = tmp_path / "both.png"
    assert answer("plot", *runs, "--out", out)["runs"] == dict.fromkeys(runs, 8)
    with Image.open(out) as image:
        assert image.width > 600
        assert len(image.convert("RGB").getcolors(2**24)) > 10


def test_runs_with_equal_folder_names_have_different_labels(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.chdir(a_run(tmp_path / "one" / "run"))
    plot.draw([Path("."), a_run(tmp_path / "two" / "run")], tmp_path / "out.png")
    plot.draw([Path(".")], tmp_path / "out.png")
    labels = [[line.get_label() for line in figure.axes[1].get_lines()] for figure in figures]
    assert labels == [["one/run", "two/run"], ["run"]]


def test_repeated_evaluations_count_once(tmp_path):
    """A run was killed after step 8, and resumed from step 4."""
    run = a_run(tmp_path / "a")
    evals = [{"event": "eval", "step": step, "loss": step / 8} for step in (4, 6, 8)]
    starts = [{"event": "training", "steps": 8, "done": done} for done in (0, 4)]
    again = {"event": "eval", "step": 6, "loss": 0.5}
    events = [starts[0], evals[0], {"event": "training", "steps": 8}, *evals[1:], starts[1], again]
    (run / "logs" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert plot.evaluations(run) == [evals[0], again]


def test_loads_of_experts_have_axes_of_their_own(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, *_, **__: figures.append(figure))
    for name, loads in (("spread", {"expert_load_most": 1.5, "expert_load_least": 0.5}), ("plain", {})):
        run = a_run(tmp_path / name)
        steps = [{**json.loads(line), **loads} for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        plot.draw([run], tmp_path / "out.png")
    spread, plain = figures
    assert (len(spread.axes), len(plain.axes)) == (4, 3)
    (stretch,) = spread.axes[-1].collections
    heights = stretch.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 1.5)


def test_the_forecast_is_a_dashed_line_beside_the_measured_memory(tmp_path, monkeypatch):
    runs = [a_run(tmp_path / "cpu"), a_run(tmp_path / "gpu"), a_run(tmp_path / "unknown")]
    more = [{"forecast_bytes": 3 << 29}, {"forecast_bytes": 5 << 29, "reserved_bytes": 2 << 30}, {}]
    for run, fields in zip(runs, more, strict=True):
        steps = [{**json.loads(line), **fields} for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    drawn = []
    monkeypatch.setattr(plot, "save", lambda figure, *rest, **options: drawn.append(figure))
    plot.draw(runs, tmp_path / "runs.png")
    lines = drawn[0].axes[2].get_lines()
    shown = {line.get_label(): (line.get_linestyle(), set(line.get_ydata())) for line in lines}
    assert shown == {
        "cpu": ("-", {1.0}),
        "cpu (forecast)": ("--", {1.5}),
        "gpu": ("-", {2.0}),
        "gpu (forecast)": ("--", {2.5}),
        "unknown": ("-", {1.0}),
    }
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()


def test_every_folder_without_metrics_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    places = [str(tmp_path / name) for name in ("empty", "none")]
    assert [e["where"] for e in answer("plot", *places, code=2)["errors"]] == places


def test_half_a_line_and_records_that_lack_values_are_passed_over(tmp_path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, *_, **__: figures.append(figure))
    run = tmp_path / "killed"
    (run / "logs").mkdir(parents=True)
    records = [{"step": 1}, {"step": 2, "loss": 0.5, "samples_per_s": 3.0, "memory_bytes": 2**30}, {"loss": 9.0}]
    records += [{"step": 3, "loss": None, "samples_per_s": "fast", "memory_bytes": 2**31, "expert_load_most": 2.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in records) + '{"step": 4, "lo')
    events = [{"event": "eval", "step": 2, "loss": 0.25}, {"event": "eval", "loss": 1.0}, {"time_s": 1.0}]
    (run / "logs" / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"event": "ev')
    assert answer("plot", run, "--out", tmp_path / "out.png")["runs"] == {str(run): 3}
    loss, rate, memory, _ = figures[0].axes
    drawn = [
        [tuple(map(float, point)) for point in line.get_xydata()]
        for axes in (loss, rate, memory)
        for line in axes.lines
    ]
    assert drawn == [[(2.0, 0.5)], [(2.0, 0.25)], [(2.0, 3.0)], [(2.0, 1.0), (3.0, 2.0)]]
    assert rate.get_ylabel() == "samples / s"
