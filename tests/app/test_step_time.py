"""The forecast of a step's time at the start of a training: from what is kept, or not at all."""

from __future__ import annotations

import pytest

import zerofit as zf
from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import resolve_job
from zerofit.app.planning import job_forecast
from zerofit.app.simulation.runs import prepare_simulation
from zerofit.plan.layout import PlannedLayout
from zerofit.spec.events import Reporter
from zerofit.spec.local_machine import Calibration, write_calibration

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
RUN = {"model": "llama-tiny", "model_args": TINY, "seq_len": 32, "micro_batch": 4, "ds_config": "zero1", "ranks": 2}
MEASURED = {"matmul_flops": {"fp32": 2e10}, "memory_bandwidth": 5e9, "launch_s": 1e-5}


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(job_forecast.Cluster, "here", lambda: zf.Cluster("cpu"))


def test_it_is_plans_own_where_its_profile_and_a_calibration_are_kept(empty_cache, tmp_path):
    resolved = resolve_job(as_request(zf.Run(**RUN, data="synthetic", steps=2, output=tmp_path / "run")))
    assert job_forecast.forecast_step_s(resolved) is None
    calibration = Calibration(kind="cpu", device_name="cpu", devices=2, date="2026-01-01", **MEASURED)
    write_calibration(calibration)
    assert job_forecast.forecast_step_s(resolved) is None  # no profile, and none is made
    pins = {"model_args": TINY, "seq_len": 32, "micro_batch": 4, "precision": "fp32"}
    plan = zf.plan("llama-tiny", zf.Cluster("cpu", gpus=2), top=10**6, **pins, gradient_accumulation_steps=1)
    layout = PlannedLayout.of(resolved.job)
    (planned,) = [one for one in plan.layouts if one.layout == layout]
    assert job_forecast.forecast_step_s(resolved) == pytest.approx(planned.time.step_s)
    other = resolve_job(as_request(zf.Run(**{**RUN, "seq_len": 48}, data="synthetic", steps=2)))
    assert job_forecast.forecast_step_s(other) is None


def test_a_processor_that_was_not_measured_has_none(empty_cache, tmp_path):
    pins = {"model_args": TINY, "seq_len": 32, "precision": "fp32", "tensor_parallel": 1}
    zf.plan("llama-tiny", zf.Cluster("cpu", gpus=2), **pins)
    assert job_forecast.forecast_step_s(resolve_job(as_request(zf.Run(**RUN, data="synthetic", steps=2)))) is None


def test_a_simulated_change_costs_what_plan_says(empty_cache):
    cluster = zf.Cluster("h100-80gb", gpus=2)
    pins = {"model_args": TINY, "seq_len": 32, "micro_batch": 4, "precision": "bf16", "gradient_accumulation_steps": 1}
    plan = zf.plan("llama-tiny", cluster, top=10**6, **pins)
    planned = {one.layout: one.time.step_s for one in plan.layouts}
    for checkpointing in (False, True):
        run = zf.Run(**RUN, precision="bf16", activation_checkpointing=checkpointing)
        made = prepare_simulation(as_request(run), cluster)
        found = job_forecast.traced_step_s(made.job, made.inputs, cluster, Reporter())
        assert found == pytest.approx(planned[PlannedLayout.of(made.job)])
