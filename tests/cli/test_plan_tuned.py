"""`zerofit plan --from`: step times corrected by what a tuning has measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from tests.cli.test_plan import ARGS, H100, asked, refused, run
from zerofit.plan.layout import PlannedLayout

MODEL = ("llama-tiny", "--model-args", ARGS, "--seq-len", 1024, "--global-batch", 64, "--top", 1000)


def truth(row):
    """Slower than any plan says, and stage 3 by far."""
    return 3 * row["step_s"] * (2 if row["zero_stage"] == 3 else 1)


def alike(row):
    names = ("zero_stage", "offload", "micro_batch", "dp", "tp", "pp", "sp", "activation_checkpointing")
    return tuple(row[name] for name in names)


def trial(row):
    names = ("zero_stage", "micro_batch", "dp", "tp", "pp", "sp", "precision")
    choice = PlannedLayout(
        **{name: row[name] for name in names},
        accumulation=row["gradient_accumulation_steps"],
        checkpointing=row["activation_checkpointing"],
        bucket=row["bucket_elements"],
        overlap=row["overlap_comm"],
        prefetch=row["prefetch_elements"],
        persistence=row["persistence_elements"],
    )
    figures = {"forecast_step_s": row["step_s"], "peak_bytes": row["peak_bytes"], "measured_step_s": truth(row)}
    return {"choice": asdict(choice), "compiled": False, **figures}


@pytest.fixture(scope="module")
def planned(cache):
    return asked(*MODEL, *H100)["layouts"]


@pytest.fixture
def tuning(planned, tmp_path):
    plain = [row for row in planned if row["offload"] == "none" and row["dp"] == 8]
    rows = [row for stage in (0, 1, 3) for row in [r for r in plain if r["zero_stage"] == stage][:3]]
    about = {"model": "another", "device": "h100-80gb", "measured": [trial(row) for row in rows]}
    (tmp_path / "trials.json").write_text(json.dumps(about))
    return tmp_path


def test_step_times_and_their_order_are_those_of_the_trials(planned, tuning):
    answer = asked(*MODEL, *H100, "--from", tuning)
    before = {alike(row): row for row in planned}
    plain = [row for row in answer["layouts"] if row["offload"] == "none" and row["dp"] == 8]
    assert {row["zero_stage"] for row in plain} == {0, 1, 2, 3}
    for row in plain:
        if row["zero_stage"] != 2:  # of which no trial tells
            assert row["step_s"] == pytest.approx(truth(before[alike(row)]), rel=0.1)
        assert sum(row["time"].values()) <= row["step_s"] * 1.01
    assert answer["layouts"][0]["zero_stage"] != 3
    slowest_plain = max(row["step_s"] for row in plain if row["zero_stage"] == 1)
    assert slowest_plain < max(row["step_s"] for row in plain if row["zero_stage"] == 3)
    errors = answer["tuned"]["errors"]
    assert errors["planned"]["most"] == pytest.approx(1 - 1 / 6, abs=0.01)
    assert errors["learned"]["median"] < 0.1
    assert math.isclose(errors["planned"]["median"], 1 - 1 / 3, abs_tol=0.01)


def test_people_see_how_good_the_forecast_was(tuning):
    out = " ".join(run(*MODEL, *H100, "--from", tuning).output.split())
    assert "corrected by 9 trials of another; the plan's errors were 67% (median) and 83% (largest)" in out


def test_what_was_measured_elsewhere_or_is_no_tuning(tuning, tmp_path):
    (problem,) = refused(*MODEL, "--gpus", 8, "--gpu", "a100-80gb", "--from", tuning)
    assert problem["kind"] == "tuned-elsewhere"
    assert "h100-80gb" in problem["message"]
    (tmp_path / "other.json").write_text('{"measured": 3}')
    (problem,) = refused(*MODEL, *H100, "--from", tmp_path / "other.json")
    assert problem["kind"] == "tuned"
    (problem,) = refused(*MODEL, *H100, "--from", tmp_path / "nowhere")
    assert "zerofit tune" in problem["hint"]
