"""The search on step times that are known beforehand: deterministic, no process is started."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from zerofit.plan.layout import PlannedLayout
from zerofit.tune.search import Regret, Search, expected_gain
from zerofit.tune.step_time_model import FEATURES, StepTimeModel, features, forecast_errors
from zerofit.tune.trial import Candidate, Trial


def candidates(seed):
    """96 configurations with forecasts such as a planner's."""
    chance, found = random.Random(seed), []
    for stage in (0, 1, 2, 3):
        for micro in (1, 2, 4, 8, 16, 32):
            for checkpointing in (False, True):
                for overlap in (False, True):
                    layout = PlannedLayout(
                        zero_stage=stage,
                        micro_batch=micro,
                        accumulation=32 // micro,
                        dp=2,
                        checkpointing=checkpointing,
                        overlap=overlap and stage > 0,
                    )
                    step_s = (0.2 + 0.05 * 32 / micro) * (1.33 if checkpointing else 1) * (1 + 0.02 * stage)
                    peak = 1_000_000 * micro * (1 if checkpointing else 3)
                    forecast = step_s * math.exp(chance.gauss(0, 0.02))
                    found.append(Candidate(layout=layout, forecast_step_s=forecast, peak_bytes=peak))
    return list({c.key: c for c in found}.values())


def truth(found, seed):
    """What a machine would measure: off by a common factor, by one for each knob, and by a little noise."""
    chance = random.Random(1000 + seed)
    weights = np.array([chance.gauss(0, 0.5), *(chance.gauss(0, 0.8 * deviation) for deviation, _ in FEATURES[1:])])
    return {c.key: c.forecast_step_s * math.exp(float(features(c) @ weights) + chance.gauss(0, 0.02)) for c in found}


def ok(candidate, measured):
    step_s = measured[candidate.key]
    return Trial(key=candidate.key, status="ok", forecast_step_s=candidate.forecast_step_s, measured_step_s=step_s)


def failed(candidate, status):
    return Trial(key=candidate.key, status=status, forecast_step_s=candidate.forecast_step_s, reason="it failed")


def replay(search, measured, most=8, fail=lambda candidate: None):
    while len(search.trials) < most and (candidate := search.next()):
        status = fail(candidate)
        search.add(failed(candidate, status) if status else ok(candidate, measured))
    return search


def test_eight_trials_find_the_best_to_three_per_cent():
    reached = []
    for seed in range(30):
        found = candidates(seed)
        measured = truth(found, seed)
        search = replay(Search(found), measured)
        reached.append(min(measured.values()) / search.best.step_s)
    assert sorted(reached)[2] >= 0.97  # in nine of ten
    assert min(reached) >= 0.9
    assert sum(r > 0.999 for r in reached) >= 15


def test_the_same_measurements_give_the_same_trials():
    found = candidates(3)
    measured = truth(found, 3)
    first, second = (replay(Search(found), measured) for _ in range(2))
    assert [t.key for t in first.trials] == [t.key for t in second.trials]
    cut = Search(found, first.trials[:4])  # a tuner that was killed, and goes on
    assert [t.key for t in replay(cut, measured).trials] == [t.key for t in first.trials]


def test_what_needs_as_much_as_what_ran_out_of_memory_is_left_out():
    found = candidates(1)
    search = replay(Search(found), truth(found, 1), fail=lambda c: "oom" if c.peak_bytes > 20_000_000 else None)
    peaks = [next(c.peak_bytes for c in found if c.key == t.key) for t in search.trials]
    smallest = math.inf
    for peak, trial in zip(peaks, search.trials, strict=True):
        assert peak < smallest
        smallest = min(smallest, peak) if trial.status == "oom" else smallest
    assert search.best is not None
    assert search.regret().untried == sum(c.peak_bytes < smallest for c in found) - sum(p < smallest for p in peaks)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_too_little_host_memory_rules_out_only_what_uses_it(offload):
    small = PlannedLayout(zero_stage=2, micro_batch=1, offload_optimizer=offload)
    sizes = {small: 10, replace(small, micro_batch=2): 20, PlannedLayout(zero_stage=2, micro_batch=4): 30}
    found = [Candidate(layout=one, forecast_step_s=1.0, peak_bytes=size) for one, size in sizes.items()]
    assert Search(found, [failed(found[0], "does-not-fit")]).next() == (found[2] if offload == "cpu" else None)


@pytest.mark.parametrize("status", ["crash", "hang"])
def test_what_keeps_failing_is_left_alone(status):
    found = candidates(2)
    search = replay(
        Search(found), truth(found, 2), most=20, fail=lambda c: status if c.layout.zero_stage == 3 else None
    )
    stages = [next(c.layout.zero_stage for c in found if c.key == t.key) for t in search.trials]
    assert stages.count(3) <= 2
    assert search.best is not None


def test_regret_is_none_when_all_was_tried():
    found = candidates(4)[:5]
    search = Search(found, [ok(c, truth(found, 4)) for c in found])
    assert search.next() is None
    nothing = {"untried": 0, "untried_step_s": None, "untried_best": None, "gap": 0.0, "at_most": 0.0}
    assert search.regret() == Regret(best_step_s=search.best.step_s, **nothing)
    assert Search(found).regret() is None


def test_regret_shrinks_and_holds():
    within = 0
    for seed in range(30):
        found = candidates(seed)
        measured = truth(found, seed)
        search = replay(Search(found), measured)
        regret = search.regret()
        tried = {t.key for t in search.trials}
        left = min(step_s for key, step_s in measured.items() if key not in tried)
        within += 1 - left / search.best.step_s <= regret.at_most + 1e-9
        assert 0 <= regret.gap <= regret.at_most < 1
    assert within >= 24  # it speaks of one chance in twenty for each, and the noise is not quite as assumed


def test_corrections_are_those_of_least_squares_where_much_is_known():
    found = candidates(5)
    chance = random.Random(5)
    weights = np.array([0.7, *(chance.gauss(0, 0.3) for _ in FEATURES[1:])])
    rows = [(c, c.forecast_step_s * math.exp(float(features(c) @ weights))) for c in found]
    learned = StepTimeModel(rows)
    matrix = np.array([features(candidate) for candidate, _ in rows])
    logs = np.array([math.log(measured_s / candidate.forecast_step_s) for candidate, measured_s in rows])
    solution, *_ = np.linalg.lstsq(matrix, logs, rcond=None)
    for candidate in found[::7]:
        mean, deviation = learned.expected(candidate)
        plain = math.log(candidate.forecast_step_s) + float(features(candidate) @ solution)
        assert mean == pytest.approx(plain, abs=0.01)
        assert 0.03 <= deviation < 0.06


def test_expected_improvement_is_that_of_drawing():
    rng = np.random.default_rng(0)
    for mean, deviation, best in [(0.0, 0.2, 1.0), (-0.3, 0.1, 0.9), (0.5, 0.4, 1.1)]:
        drawn = np.exp(rng.normal(mean, deviation, 400_000))
        assert expected_gain(mean, deviation, best) == pytest.approx(np.maximum(0, 1 - drawn / best).mean(), abs=2e-3)


def test_keys_tell_configurations_apart():
    found = candidates(0)
    assert len({c.key for c in found}) == len(found)
    assert replace(found[0], forecast_step_s=1.0).key == found[0].key
    # A stored trial of an earlier version has the former fields of a layout, and counts.
    other = replace(found[0].layout, has_weight_decay=False)
    assert "has_weight_decay" not in found[0].key and replace(found[0], layout=other).key != found[0].key


def test_other_batches_are_compared_by_their_time_for_a_sample():
    slow, fast = (
        Candidate(layout=PlannedLayout(zero_stage=1, micro_batch=micro, dp=2), forecast_step_s=1.0, peak_bytes=1)
        for micro in (4, 16)
    )
    search = Search([slow, fast])
    assert search.next() == fast  # four times the samples in the same time
    search.add(ok(fast, {fast.key: 2.0}))
    search.add(ok(slow, {slow.key: 1.0}))
    assert search.best.candidate == fast
    assert search.best.sample_s == pytest.approx(2.0 / 32)
    regret = Search([slow, fast], [ok(fast, {fast.key: 2.0})]).regret()
    assert regret.untried_step_s == pytest.approx(2.0, rel=0.2)  # of its own, smaller batch
    assert regret.gap == 0.0


def test_how_far_forecasts_are_off():
    found = candidates(6)[::5]
    rows = [(c, c.forecast_step_s * (4.0 if c.layout.zero_stage == 3 else 2.0)) for c in found]
    errors = forecast_errors(rows)
    assert errors.planned == (pytest.approx(0.5), pytest.approx(0.75))
    assert errors.learned[0] < 0.02
    assert errors.learned[1] < 0.15
    assert forecast_errors(rows[:2]).learned is None
