"""The measurements for a GPU, as far as they can be tried without one: `python -m benchmarks.gpu.run --rehearse`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import forecasts  # noqa: E402
from benchmarks.gpu import run as benchmark  # noqa: E402
from benchmarks.gpu.merge import TABLES, merge  # noqa: E402
from benchmarks.gpu.part import PARTS, find, is_done, remaining  # noqa: E402


def run(out: Path, *more: str) -> str:
    argv = [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(out), "--rehearse", *more]
    done = subprocess.run(argv, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    log = (out / "run.log").read_text() if (out / "run.log").exists() else done.stderr
    assert done.returncode == 0, f"{done.stdout}\n{log[-3000:]}"
    return done.stdout


def test_a_second_call_goes_on_with_what_is_missing(tmp_path, monkeypatch, capsys):
    """The first one failed in a case. What starts no ranks runs in this process."""
    assert not is_done("training", tmp_path, rehearse=True)
    path, (lenet, llama) = tmp_path / "training.json", find("training").cases(rehearse=True)
    path.write_text(json.dumps({"cases": {lenet: {"error": "killed"}, llama: {"seconds": 1.0}}}))
    assert f"1 of 1: {lenet}: done" in run(tmp_path, "--only", "training", "--minutes", "8")
    monkeypatch.setattr(sys, "argv", ["forecasts", str(tmp_path)])
    forecasts.main()
    answer = json.loads(path.read_text())["cases"][lenet]
    assert abs(answer["errors"]["allocated_bytes"]) < 1e-4
    assert len(answer["real"]["step_s"]) == 8
    assert sum(answer["real"]["kernels"].values()) > 0
    assert is_done("training", tmp_path, rehearse=True)
    monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path), "--rehearse", "--only", "training"])
    assert benchmark.main() == 0 and capsys.readouterr().out.endswith("training: done\n")


def test_what_has_failed_comes_last():
    assert remaining(["failed", "new", "done"], {"failed": {"error": "killed"}, "done": {}}) == ["new", "failed"]


def test_every_part_has_cases_a_limit_and_a_table():
    assert set(TABLES) == set(PARTS)
    for name, limit_s in PARTS.items():
        assert 0 < limit_s < 9 * 60
        for rehearse in (True, False):
            cases = find(name).cases(rehearse)
            assert cases and len(cases) == len(set(cases))
    assert len(find("training").cases(False)) == 20


def test_results_of_several_calls_are_merged():
    surroundings = {"hardware": {"device": "H200"}, "date": "2026-11-23"}
    one = surroundings | {"cases": {"a": {"loss_difference": 0.0}, "b": {"error": "killed"}}}
    two = surroundings | {
        "date": "2026-11-24",
        "cases": {"a": {"error": "time"}, "b": {"seconds": 1}, "c": {"error": "x"}},
    }
    merged = merge([{}, one, two])
    assert merged["date"] == "2026-11-24"
    assert merged["cases"] == {"a": {"loss_difference": 0.0}, "b": {"seconds": 1}, "c": {"error": "x"}}
    with pytest.raises(ValueError, match="H200 and of L4"):
        merge([one, {**one, "hardware": {"device": "L4"}}])


def test_the_table_of_trainings_has_the_forecasts_errors():
    real = {"allocated_bytes": 2**30, "step_s": [1.0, 3.0, 2.0]}
    cases = {
        "x": {"real": real, "errors": {"allocated_bytes": 0.01, "step_s": -0.1}},
        "y": {"error": "a\nout of memory"},
    }
    lines = TABLES["training"](cases)
    assert lines[2] == "| x | 1.00 GiB | 2.000 s | +1.00% |  |  | -10.00% |"
    assert lines[3].startswith("| y | out of memory |")
    assert lines[-1].endswith("| 1.00% (1.0%) |  |  | 10.00% (10.0%) |")
    cases["x"] |= {"forecast": {"kernels": {"product": 0.5}}}
    cases["x"]["real"] |= {"kernels": {"product": 0.4, "copy": 0.01}}
    assert TABLES["training"](cases)[-3:] == [
        "| ms of a step: forecast / measured | product | copy |",
        "| --- | --- | --- |",
        "| x | 500.0 / 400.0 | - / 10.0 |",
    ]
