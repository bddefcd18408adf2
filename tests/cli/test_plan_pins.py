"""Flags that keep what they name of a layout, and layouts that do not fit but have their time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.asking import answer
from tests.config.test_resolve import GPUS
from tests.plan.stub import make_profile
from zerofit.app.planning.layout_pins import batch_and_precision
from zerofit.app.planning.request import PlanningRequest
from zerofit.check.dotted import get
from zerofit.cli.main import main
from zerofit.config.decide import decide
from zerofit.config.ds_json import bundled, read_document
from zerofit.spec.errors import Problems
from zerofit.spec.run import load_run

asked = partial(answer, "plan")

H100 = ["--gpus", "8", "--gpu", "h100-80gb"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> list[str]:
    """A stored profile, so that nothing is traced."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    file.write_text(json.dumps(make_profile().as_dict()))
    return ["--profile", str(file), *H100]


def refused(*args: object) -> list[dict]:
    answer = asked(*args, code=2)
    return answer.get("errors") or [answer["error"]]


def values(answer: dict, *names: str) -> set[tuple]:
    return {tuple(row[name] for name in names) for row in answer["layouts"]}


@pytest.mark.parametrize(
    ("flags", "names", "only"),
    [
        (["--zero-stage", 3], ["zero_stage"], (3,)),
        (["--offload", "cpu", "--offload-param", "none"], ["offload"], ("optimizer:cpu",)),
        (["--zero-stage", 1, "--overlap-comm"], ["zero_stage", "overlap_comm"], (1, True)),
        (["--zero-stage", 2, "--no-overlap-comm"], ["zero_stage", "overlap_comm"], (2, False)),
        (["--activation-checkpointing", "--tensor-parallel", 2], ["activation_checkpointing", "tp"], (True, 2)),
        (["--micro-batch", 4, "--sequence-parallel", 4], ["micro_batch", "sp"], (4, 4)),
    ],
)
def test_a_flag_keeps_what_it_names(stored, flags, names, only):
    assert values(asked(*stored, *flags, "--global-batch", 64, "--top", 100), *names) == {only}


def test_a_deepspeed_json_keeps_what_it_names_and_flags_hold_against_it(stored, tmp_path):
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 12_345_678, "stage3_prefetch_bucket_size": "auto"}
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}
    file.write_text(json.dumps({**sizes, "bf16": {"enabled": True}, "zero_optimization": zero}))
    names = ("zero_stage", "offload", "overlap_comm", "bucket_elements", "micro_batch", "global_batch")
    found = asked(*stored, "--ds-config", file, "--top", 100)
    assert values(found, *names) == {(3, "none", True, 12_345_678, 2, 64)}
    assert {row["tp"] for row in found["layouts"]} > {1}  # of which it says nothing
    found = asked(*stored, "--ds-config", file, "--micro-batch", 4, "--no-overlap-comm", "--top", 100)
    assert values(found, *names) == {(3, "none", False, 12_345_678, 4, 64)}
    asked(*stored, "--ds-config", file, "--zero-stage", 2, "--offload", "cpu", "--write", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "ds_config.json").read_text())["zero_optimization"]
    assert (written["stage"], written["offload_optimizer"]["device"]) == (2, "cpu")
    assert (written["overlap_comm"], written["reduce_bucket_size"]) == (True, 12_345_678)


@pytest.mark.parametrize(
    ("optimizer", "named", "tp", "accumulation"),
    [("sgd", "AdamW", 1, 4), ("adamw", "AdamW", 2, 8), ("adamw", "auto", 1, 4)],
)
def test_a_written_run_agrees_with_its_json(stored, tmp_path, optimizer, named, tp, accumulation):
    """Before, both files had a value of their own, and `zerofit train` refused the pair."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    params = {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    config = {**sizes, "zero_optimization": zero, "fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "optimizer": {"type": named, "params": params}}))
    flags = [
        "--global-batch",
        32,
        "--micro-batch",
        1,
        "--gradient-accumulation-steps",
        accumulation,
        "--offload",
        "none",
    ]
    flags += ["--precision", "bf16", "--optimizer", optimizer, "--tensor-parallel", tp]
    asked(*stored, "--ds-config", tmp_path / "ds.json", *flags, "--write", tmp_path / "out")
    request, problems = load_run(tmp_path / "out" / "run.yaml", {}), Problems()
    document = read_document(tmp_path / "out" / "ds_config.json")
    run = decide(request, document, "ds_config.json", GPUS, problems).run
    assert not [*problems] and (run.optimizer, run.global_batch, run.precision) == (optimizer, 32, "bf16")
    assert get(document.config, "optimizer.params.lr") == (1e-4 if optimizer == "adamw" else None)


@pytest.mark.parametrize(
    ("zero", "sizes"),
    [
        ({"stage": 2}, (500_000_000, False, 0, 0)),
        ({"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True}, (50_000_000, True, 0, 0)),
        ({"stage": 3}, (500_000_000, True, 50_000_000, 100_000)),
        ({"stage": 3, "stage3_prefetch_bucket_size": "auto"}, (500_000_000, True, int(0.9 * 1024**2), 100_000)),
    ],
)
def test_sizes_of_a_deepspeed_json_are_those_of_training(stored, tmp_path, zero, sizes):
    """DeepSpeed's defaults (runtime/zero/config.py) without the key, what zerofit fills in for "auto"."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}))
    found = asked(*stored, "--ds-config", file, "--top", 100)
    assert values(found, "bucket_elements", "overlap_comm", "prefetch_elements", "persistence_elements") == {sizes}


def test_a_bundled_file_leaves_the_run_its_batch(stored):
    found = asked(*stored, "--ds-config", "zero2", "--global-batch", 64, "--top", 100)
    assert values(found, "zero_stage", "micro_batch") > {(2, 8), (2, 4)}


def test_auto_in_a_json_fixes_nothing(stored, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": "auto", "overlap_comm": "auto"}}')
    assert values(asked(*stored, "--ds-config", file, "--top", 100), "zero_stage") >= {(1,), (2,), (3,)}


def test_superoffload_steps_beside_backward_where_nothing_is_clipped(stored, tmp_path):
    early = tmp_path / "early.json"
    early.write_text(
        bundled()["superoffload"].read_text().replace('"gradient_clipping": 1.0', '"gradient_clipping": 0')
    )
    flags = (*stored[:2], "--gpu", "gh200", "--gpus", 1, "--micro-batch", 8, "--top", 1)
    clipped, beside = (asked(*flags, "--ds-config", file)["layouts"][0] for file in ("superoffload", early))
    assert beside["step_s"] < clipped["step_s"]
    assert beside["offload"] == clipped["offload"] == "optimizer:cpu"


def test_features_without_a_forecast_are_refused_with_what_to_do_instead(stored, tmp_path):
    autocast = tmp_path / "autocast.json"
    autocast.write_text('{"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}')
    masters = tmp_path / "masters.json"
    masters.write_text('{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}')
    for config, instead in (("zenflow", "zero3_offload"), (autocast, "simulate"), (masters, "simulate")):
        (wrong,) = refused(*stored, "--ds-config", config)
        assert "cannot forecast" in wrong["message"] and instead in wrong["hint"]


def test_a_json_at_which_deepspeed_stops_is_refused(stored, tmp_path):
    file = tmp_path / "old.json"
    file.write_text('{"zero_optimization": {"stage": 3,\n "mics_shard_size": 2}, "fp16": {"enable": true}}')
    removed, unknown = refused(*stored, "--ds-config", file)
    assert "mics_shard_size was removed" in removed["message"] and removed["where"].startswith(f"{file}:2:2")
    assert unknown["hint"] == "did you mean enabled?"


def test_what_the_forecast_leaves_out_is_a_note():
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    left_out = "zero_optimization.zero_hpz_partition_size, data_types.grad_accum_dtype"
    (note,) = PlanningRequest(model="gpt2", pins={"ds_config": config}).notes
    assert note == f"the forecasts do not include {left_out} of the DeepSpeed JSON"
    config["zero_optimization"]["stage"] = 2  # DeepSpeed ignores the partitions of nodes, and float32 has no other type
    assert not PlanningRequest(model="gpt2", pins={"ds_config": config, "precision": "fp32"}).notes


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, "auto"),
        ({}, "auto"),
    ],
)
def test_a_json_without_16_bit_types_trains_in_float32(blocks, precision):
    assert batch_and_precision({}, blocks).get("precision", "auto") == precision


def test_what_is_written_is_the_json_that_was_given(stored, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "steps_per_print": 7})
    )
    asked(*stored, "--ds-config", file, "--global-batch", 64, "--write", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "ds_config.json").read_text())
    assert written["steps_per_print"] == 7 and written["zero_optimization"]["round_robin_gradients"] is True
    assert written["zero_optimization"]["stage"] == 2 and "run.yaml" in {p.name for p in (tmp_path / "out").iterdir()}


def test_what_does_not_fit_has_its_time_and_stands_last(stored):
    small = [*stored, "--device-memory", "1GiB", "--zero-stage", 0, "--micro-batch", 8]
    found = asked(*small, code=1)
    assert found["layouts"] == [] and found["misfits"]
    for row in found["misfits"]:
        assert not row["fits"] and row["step_s"] > 0 and row["zero_stage"] == 0 and row["micro_batch"] == 8
        assert row["lacks"]["memory"] == "device"
        assert row["lacks"]["bytes"] == row["peak_bytes"] + row["margin_bytes"] - row["device_total_bytes"] > 0
    shown = CliRunner().invoke(main, ["plan", *map(str, small)]).stdout
    assert "lacks" in shown and "NOTHING FITS" in shown
    names = ("tp", "pp", "sp", "activation_checkpointing", "step_s")
    with_memory = asked(*stored, "--zero-stage", 0, "--micro-batch", 8, "--top", 100)
    assert {tuple(row[name] for name in names) for row in found["misfits"]} <= values(with_memory, *names)


def test_fitting_layouts_stand_before_those_that_do_not(stored):
    few = asked(*stored, "--device-memory", "7GiB", "--global-batch", 64, "--zero-stage", 0, "--top", 100)
    assert few["layouts"] and few["misfits"] and len(few["layouts"]) + len(few["misfits"]) <= 100
    assert all(row["fits"] for row in few["layouts"]) and not any(row["fits"] for row in few["misfits"])
    lacks = [row["lacks"]["bytes"] for row in few["misfits"]]
    assert lacks[0] == min(lacks)
    assert asked(*stored, "--global-batch", 64, "--top", 2)["misfits"] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--zero-stage", 3, "--pipeline", 2], "pipeline supports stages 0 and 1"),
        (["--zero-stage", 2, "--offload-param", "cpu"], "needs ZeRO stage 3"),
        (["--zero-stage", 0, "--offload", "cpu"], "needs ZeRO stage 2 or 3"),
        (["--offload", "nvme"], "the cluster has none"),
        (["--offload", "none", "--offload-param", "cpu"], "also offload the optimizer"),
        (["--overlap-comm", "--micro-batch", 3, "--zero-stage", 2, "--global-batch", 64], "--micro-batch 3"),
    ],
)
def test_what_deepspeed_does_not_take_together_is_refused(stored, flags, words):
    wrong = refused(*stored, *flags)
    assert any(words in p["message"] + p["hint"] for p in wrong), wrong


def test_a_file_that_is_no_json_is_named_with_its_line(stored, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n "zero_optimization": {"stage": 3,,}\n}')
    (wrong,) = refused(*stored, "--ds-config", file)
    assert f"{Path(file)}:2" in wrong["where"]


def fastest_s(*args: object) -> float:
    return asked(*args, "--top", 1)["layouts"][0]["step_s"]


def test_the_software_of_a_run_decides_its_times(stored):
    """Torch's kernels, a compiler, fused kernels, and threads of Adam."""
    one = [*stored, "--zero-stage", 2, "--micro-batch", 8]
    plain = fastest_s(*one)
    assert fastest_s(*one, "--compile") < fastest_s(*one, "--liger-kernel") < plain
    host = [*one, "--offload", "cpu"]
    assert fastest_s(*host, "--cpu-threads", 1) > 1.5 * fastest_s(*host) == 1.5 * fastest_s(*host, "--cpu-threads", 64)
    assert fastest_s(*host, "--no-pin-memory") > fastest_s(*host)
    rates = {name: asked(*one, "--attn-implementation", f"flash_attention_{name}")["rates"] for name in "123"}
    assert rates["1"]["attention"] < rates["2"]["attention"] < rates["3"]["attention"]
    assert asked(*one, "--model-args", "attn_implementation=flash_attention_2")["rates"] == rates["2"]
    assert [row["where"] for row in refused(*one, "--liger-kernel", "--write", "nowhere")] == ["--liger-kernel"]


def test_one_thread_steps_at_its_own_bandwidth(stored):
    """8 ranks of one thread: 12 GB/s each, less than the 264 GB/s that Adam reaches on a DGX H100 with all cores."""
    rates = asked(*stored, "--offload", "cpu", "--cpu-threads", 1)["rates"]
    assert rates["host"] == 8 * 12e9
    assert asked(*stored, "--offload", "cpu")["rates"]["host"] == pytest.approx(0.43 * 614.4e9)
