"""Plans held against simulations: what is written, and the largest value that fits. Simulations are stand-ins here."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import zerofit as zf
from tests.plan.stub import make_profile
from zerofit.app.planning import planner
from zerofit.app.planning.largest_fit import LargestFit
from zerofit.plan.inverse import with_layers
from zerofit.spec.errors import Problem
from zerofit.spec.events import Reporter

GIB = 2**30


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(make_profile().as_dict()))
    return zf.plan(profile=path, cluster=zf.Cluster("h100-80gb", gpus=8, host_memory="2TiB"), global_batch=64, top=20)


def simulated(fits, needed=81 * GIB):
    figures = {"peak_bytes": needed, "reserved_bytes": needed, "reserved_ahead_bytes": needed, "overheads": ()}
    return SimpleNamespace(fits=fits, verdict="fits" if fits else "does not fit", **figures, because="",
                           device_total_bytes=80 * GIB)  # fmt: skip


def test_a_refused_layout_is_not_written(plan, monkeypatch, tmp_path):
    first = plan.result.plainest or 0
    monkeypatch.setattr(
        planner, "_simulate", lambda planned, _: simulated(planned.layout != plan.layouts[first].layout)
    )
    found = planner.confirm_written(plan, Reporter(None))
    assert [one.fits for one in found.confirmed].count(True) == 1 and found.chosen != first
    found.write(tmp_path)
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert written == found.layouts[found.chosen].ds_config
    monkeypatch.setattr(planner, "_simulate", lambda planned, _: simulated(False))
    nothing = planner.confirm_written(plan, Reporter(None))
    assert nothing.chosen is None and len(nothing.confirmed) == planner.MOST
    with pytest.raises(zf.UserError, match="nothing to write"):
        nothing.write(tmp_path / "other")


def test_what_cannot_be_simulated_stands_by_its_forecast(plan, monkeypatch):
    def fail(planned, _):
        raise zf.UserError(Problem(kind="not-simulated", message="it looks at values"))

    monkeypatch.setattr(planner, "_simulate", fail)
    found = planner.confirm_written(plan, Reporter(None))
    assert found.chosen == plan.chosen and "looks at values" in str(found.confirmed[0])
    first = plan.layouts[plan.chosen].layout
    monkeypatch.setattr(
        planner, "_simulate", lambda planned, _: simulated(False) if planned.layout == first else fail(planned, _)
    )
    found = planner.confirm_written(plan, Reporter(None))
    assert [one.layout for one in found.confirmed if one.problem] == [found.chosen] != [plan.chosen]


def test_the_best_layouts_are_confirmed_on_request(plan, monkeypatch):
    monkeypatch.setattr(planner, "_simulate", lambda planned, _: simulated(True))
    found = planner.confirm(plan, 3, Reporter(None))
    assert [one.layout for one in found.confirmed] == [0, 1, 2] and len(found.to_dict()["confirmed"]) == 3


def test_a_layout_that_only_the_margin_excludes_is_simulated_and_joins_the_plan_if_it_fits(plan, monkeypatch):
    """The device is made so small that the best layout's peak fits, and its margin does not."""
    best = plan.result.layouts[0]
    memory = best.memory.peak_bytes + round(best.fit.margin_bytes / 2)
    cluster = zf.Cluster("h100-80gb", gpus=8, host_memory="2TiB", device_memory=memory)
    small = zf.plan(profile=plan.request.profile, cluster=cluster, global_batch=64, top=20)
    close = small.result.close[0]
    assert close.fit.verdict == close.to_dict()["verdict"] == "close to the limit"
    assert close.memory.peak_bytes <= memory < close.fit.device_bytes
    assert not small.layouts or close.samples_per_s > small.layouts[0].samples_per_s
    looked = []

    def simulate(planned, _):
        looked.append(planned.layout)
        return simulated(planned.layout == close.layout)

    monkeypatch.setattr(planner, "_simulate", simulate)
    found = planner.confirm(small, 3, Reporter(None))
    assert looked.count(close.layout) == 1
    assert found.result.layouts[0] is close and close not in found.result.close
    assert found.confirmed[0].fits and not any(one.fits for one in found.confirmed[1:])
    monkeypatch.setattr(planner, "_simulate", lambda *_: simulated(False))
    refused = planner.confirm(small, 3, Reporter(None)).result
    assert refused.layouts == small.result.layouts and refused.close == small.result.close[3:]


@pytest.mark.parametrize("most", [0, 1, 7, 8, 19, 20])
def test_the_largest_value_is_one_that_a_simulation_lets_fit(plan, monkeypatch, most):
    asked = []

    def at(value):
        asked.append(value)
        return plan

    monkeypatch.setattr(planner, "_simulate", lambda *_: simulated(asked[-1] <= most, needed=80 * GIB + asked[-1]))
    answer = LargestFit(what="micro-batch", value=20, step=1, looked=5, bounded=False)
    found = planner.settle(at(20), answer, at, Reporter(None))
    assert found.answer.value == (most or None)
    assert asked.count(most + 1) == (most < 20)  # the next one was refused, not guessed


def test_layers_that_were_asked_for_are_written(plan, tmp_path):
    asked = replace(plan, request=replace(plan.request, maximum="layers"))
    deep = replace(asked, profile=replace(with_layers(plan.profile, 31), model_type="llama"))
    assert deep.layouts[0].to_run().model_args == {"num_hidden_layers": 31}
    assert plan.layouts[0].to_run().model_args == {}
