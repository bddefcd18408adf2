"""torch.profiler's trace of chosen steps and ranks, of a real run on two CPU ranks, read back beside its forecast."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from zerofit.cli.main import main
from zerofit.report.traces import COLLECTIVES, HOST, Part, measured_kernels, read_trace
from zerofit.spec.errors import UserError
from zerofit.spec.profiling import SECTION_MARK, STEP_MARK

TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
ASKED = {"model": "llama-tiny", "model_args": TINY, "data": "synthetic", "seq_len": 32, "micro_batch": 2}


@pytest.fixture(scope="module")
def trained(pools, tmp_path_factory):
    how = {
        **ASKED,
        "steps": 5,
        "gradient_accumulation_steps": 2,
        "ds_config": "zero2",
        "activation_checkpointing": True,
    }
    return pools(2).train(tmp_path_factory.mktemp("profiled") / "run", **how, profile="2-3,5", profile_ranks="1")


def test_the_chosen_ranks_write_the_chosen_steps(trained):
    names = ["rank-1-step-2.json", "rank-1-step-5.json"]
    assert sorted(path.name for path in trained.folder.traces.iterdir()) == names
    assert f'"{STEP_MARK}5"' in trained.folder.rank_trace(1, 5).read_text()
    events = json.loads(trained.folder.rank_trace(1, 2).read_text())["traceEvents"]
    assert sorted(e["name"] for e in events if e["name"].startswith(STEP_MARK)) == [f"{STEP_MARK}2", f"{STEP_MARK}3"]
    marks = [e for e in events if e["name"].startswith(SECTION_MARK)]
    layers = ["embedding", *(f"block.{n}" for n in range(3)), "head"]
    expected = [f"forward|{name}" for name in layers] + [f"backward|{name}" for name in layers[::-1]]
    found = [e["name"].removeprefix(SECTION_MARK) for e in sorted(marks, key=lambda event: event["ts"])]
    found = [name for name in found if not name.startswith(("step", "|"))]
    assert found == 4 * expected  # two steps of two micro batches; recomputing marks nothing


def test_a_run_is_the_same_with_a_profile(trained, pools, tmp_path):
    how = {
        **ASKED,
        "steps": 5,
        "gradient_accumulation_steps": 2,
        "ds_config": "zero2",
        "activation_checkpointing": True,
    }
    assert pools(2).train(tmp_path / "run", **how).losses == trained.losses


def test_a_pipelines_stages_mark_their_own_layers(pools, tmp_path):
    how = {**ASKED, "steps": 2, "gradient_accumulation_steps": 2, "ds_config": "pipeline", "pipeline": 2}
    found = pools(2).train(tmp_path / "run", **how, profile="2", profile_ranks="0,1")
    stages = []
    for stage in (0, 1):
        events = json.loads(found.folder.rank_trace(stage, 2).read_text())["traceEvents"]
        marks = sorted((e["ts"], e["name"]) for e in events if e["name"].startswith(SECTION_MARK))
        marked = [name.removeprefix(SECTION_MARK) for _, name in marks]
        forward, backward = (
            [name.partition("|")[2] for name in marked if name.startswith(phase)] for phase in ("forward", "backward")
        )
        own = list(dict.fromkeys(forward))
        assert own == list(dict.fromkeys(filter(None, backward)))[::-1] and "step|" in marked
        assert forward.count(own[-2]) >= 2  # micro batches
        stages.append(own)
        trace = read_trace(found.folder.rank_trace(stage, 2))
        assert trace.parts[Part("block", "product")] > 0 and trace.parts[Part("", "optimizer")] > 0
    assert stages[0] + stages[1] == ["embedding", "block.0", "block.1", "block.2", "head"]


def test_steps_and_ranks_that_the_run_does_not_have_are_refused(pools, tmp_path):
    with pytest.raises(UserError) as error:
        pools(2).train(tmp_path / "run", **ASKED, steps=5, profile="4-6", profile_ranks="0,2")
    assert [problem.where for problem in error.value.problems] == ["--profile", "--profile-ranks"]


def test_what_is_read_back_adds_up_to_the_step(trained):
    trace = read_trace(trained.folder.rank_trace(1, 2))
    assert not trace.forecast and not trace.on_device
    own_s = sum(seconds for part, seconds in trace.parts.items() if part.kind not in COLLECTIVES)
    assert own_s <= trace.step_s and sum(trace.parts.values()) > 0.9 * trace.step_s  # else it waits for its peer
    for kind in ("product", HOST, "elementwise"):
        assert trace.parts[Part("block", kind)] > 0
    assert trace.parts[Part("head", "product")] > 0 and trace.parts[Part("", "all-reduce")] > 0
    assert trace.parts[Part("", "optimizer")] > 0


def test_a_trace_moves_the_forecast_of_its_step_to_what_it_took(trained):
    path = trained.folder.rank_trace(1, 2)
    words = ["--model-args", json.dumps(TINY), "--seq-len", "32", "--gpus", "2", "--gpu", "cpu", "--micro-batch", "2"]
    words += ["--gradient-accumulation-steps", "2", "--activation-checkpointing", "--from-trace", str(path)]
    same = ["--ds-config", str(trained.folder.ds_config), "--json"]
    planned = CliRunner().invoke(main, ["plan", "llama-tiny", *words, *same])
    assert planned.exit_code == 0, planned.output
    answer = json.loads(planned.stdout.splitlines()[-1])
    found, measured_s = answer["from_trace"], read_trace(path).step_s
    assert found["measured_step_s"] == pytest.approx(measured_s) and found["layout"]["zero_stage"] == 2
    assert abs(found["forecast_step_s"] / measured_s - 1) > 1e-3
    best = answer["layouts"][0]
    assert {name: best[name] for name in found["layout"]} == found["layout"]
    assert best["step_s"] == pytest.approx(measured_s, rel=6e-3)  # of three digits
    products = [one for one in measured_kernels(path) if one.kind == "product"]
    assert found["shapes"] == len(measured_kernels(path)) > len(products)
    tokens, width = 2 * 32, TINY["hidden_size"]
    assert any(one.shape == (tokens, width, width) and one.flops == 2 * tokens * width**2 for one in products)


def test_forecast_and_measured_lie_beside_each_other(trained, tmp_path):
    forecast, picture = tmp_path / "forecast.json", tmp_path / "both.png"
    words = ["--model-args", json.dumps(TINY), "--seq-len", "32", "--gpus", "2", "--gpu", "cpu", "--micro-batch", "2"]
    words += ["--gradient-accumulation-steps", "2", "--zero-stage", "2", "--activation-checkpointing"]
    planned = CliRunner().invoke(main, ["plan", "llama-tiny", *words, "--trace", str(forecast), "--json"])
    assert planned.exit_code == 0, planned.output
    measured = str(trained.folder.rank_trace(1, 2))
    drawn = ["plot", "--trace", measured, "--trace", str(forecast), "--out", str(picture), "--json"]
    drew = CliRunner().invoke(main, drawn)
    assert drew.exit_code == 0, drew.output
    found = json.loads(drew.stdout.splitlines()[-1])
    assert picture.stat().st_size > 0
    step_s = json.loads(planned.stdout.splitlines()[-1])["layouts"][0]["step_s"]
    assert found["forecast_step_s"] == pytest.approx(step_s)
    assert found["measured_step_s"] == read_trace(trained.folder.rank_trace(1, 2)).step_s
    off = [abs(row["off_s"]) for row in found["rows"]]
    assert off == sorted(off, reverse=True)
    products = next(row for row in found["rows"] if (row["module"], row["kind"]) == ("block", "product"))
    assert products["forecast_s"] > 0 and products["off_s"] == products["measured_s"] - products["forecast_s"]
    shown = CliRunner().invoke(main, drawn[:-1]).stdout
    largest = found["rows"][0]  # which one depends on how busy the machine is
    assert "times the forecast" in shown and f"{1e3 * largest['off_s']:+.3f} ms" in shown
