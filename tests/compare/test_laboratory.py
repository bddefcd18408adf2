"""`zerofit compare all`: which experiments, their commands, and the page; two small ones are really done."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import zerofit as zf
from zerofit.app.comparing import laboratory
from zerofit.app.comparing.laboratory import command, compare_all, experiments
from zerofit.app.comparing.rows import Comparison, Row, ScalingRow, SizeRow, SizeSummary, StrategyRow
from zerofit.cli.compare import compare
from zerofit.compare.job import CompareJob

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "laboratory"
JOB = CompareJob(strategy="", model="lenet", data="digits", ranks=4, global_batch=64, lr=0.02)


def all_experiments(**job):
    found = experiments(CompareJob(**{**vars(JOB), **job}), 1438, epochs=10, seeds=3, target=0.9)
    return {one.name: one for one in found}


def committed(folder: Path) -> Comparison[Row]:
    """Read a comparison back from its results.json."""
    found = json.loads((folder / "results.json").read_text())
    kinds: dict[str, type[Row]] = {"strategies": StrategyRow, "scaling": ScalingRow, "batch-size": SizeRow}
    rows = [kinds[found["kind"]](**row) for row in found["rows"]]
    sizes = [SizeSummary(**one) for one in found["summary"]] if "summary" in found else None
    return Comparison(kind=found["kind"], about=found["about"], rows=rows, summary=sizes)


def test_the_committed_page_has_the_tables_of_the_committed_results():
    page = (COMMITTED / "README.md").read_text()
    folders = [COMMITTED / folder for folder in re.findall(r"\[figures\]\((.+)/results.json\)", page)]
    assert len(folders) == 10
    for folder in folders:
        names, rows = committed(folder).page_table()
        table = [" | ".join(names), *(" | ".join(row) for row in rows)]
        assert [line for line in table if f"| {line} |\n" not in page] == [], folder
        assert "tokens/s" not in names and "efficiency" not in names  # empty, and a detail


def test_every_question_is_asked_once():
    found = all_experiments()
    assert list(found) == [
        *("strategies-1", "strategies-2", "strategies-4", "scaling"),
        *("batch-size-none", "batch-size-linear", "batch-size-sqrt", "batch-size-finish", "ranks", "unequal"),
    ]
    assert found["batch-size-none"].options["sizes"] == [1, 4, 16, 64, 256, 1024, 1438]  # to the full set
    assert found["ranks"].options["sizes"] == [64, 128, 256]
    assert list(all_experiments(ranks=3, global_batch=66))[:3] == ["strategies-1", "strategies-2", "strategies-3"]
    assert "unequal" not in all_experiments(ranks=1)


def test_rules_agree_at_the_batch_that_was_asked_for():
    grow = {"none": 1.0, "linear": 64.0, "sqrt": 8.0}  # from size 1 to 64
    for rule, times in grow.items():
        assert all_experiments()[f"batch-size-{rule}"].options["lr"] * times == pytest.approx(0.02)


def test_commands_are_read_as_they_were_meant():
    for one in all_experiments().values():
        words = shlex.split(command(one, {"model": "lenet", "data": "digits", "model_args": {"a": 1}}))
        assert words[:3] == ["zerofit", "compare", one.kind]
        read = compare.commands[one.kind].make_context(one.kind, words[3:]).params
        assert (read["model"], read["data"]) == ("lenet", "digits")
        for name, value in one.options.items():
            found = read[name]
            close = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert (list(found) if isinstance(value, list) else found) == close, (one, name)


def test_a_page_of_real_results_and_a_second_call_that_keeps_them(tmp_path, monkeypatch):
    few = ["strategies-1", "batch-size-finish"]
    monkeypatch.setattr(laboratory, "experiments", lambda *args, **kw: list(chosen(few)))
    run = zf.Run(model="mlp", data="digits", ranks=2, global_batch=16, steps=4, epochs=2, output=tmp_path / "lab")
    told: list[str] = []
    found = compare_all(run, seeds=1, on_event=lambda event: told.append(event.text))
    assert [done.experiment.name for done in found.experiments] == few
    page = Path(found.written[0]).read_text()
    for done in found.experiments:
        assert all(row.status == "ok" for row in done.compared.rows), done.compared.rows
        assert f"## {done.experiment.question}\n" in page
        assert done.command in page
        assert (tmp_path / "lab" / f"rows/{done.experiment.name}/comparison.png").stat().st_size > 10_000
        assert f"](rows/{done.experiment.name}/comparison.png)" in page
    assert "| 256 | 0 of 1 |" in page
    told.clear()
    again = compare_all(run, seeds=1, on_event=lambda event: told.append(event.text))
    assert again.to_dict() == found.to_dict()
    assert sum(text.endswith(": known") for text in told) == 2


def chosen(names):
    """The experiments of these names, made small: one strategy, one size."""
    made = all_experiments()
    small = {"strategies-1": {"strategies": ["single"], "steps": 4}, "batch-size-finish": {"sizes": [256], "seeds": 1}}
    small["batch-size-finish"] |= {"epochs": 2, "finish": (16, 1), "target": 0.999}
    for name in names:
        one = made[name]
        yield laboratory.Experiment(
            name=name, question=one.question, kind=one.kind, options={**one.options, **small[name]}
        )
