"""A run is loaded strictly, and everything wrong comes at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerofit.spec.errors import UserError
from zerofit.spec.run import Run, RunRequest, load_run


def test_a_flag_overrides_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: lenet\nmicro_batch: 4\nlr: 0.5\n")
    asked = load_run(file, {"micro_batch": 16})
    assert (asked.run.model, asked.run.micro_batch, asked.run.lr) == ("lenet", 16, 0.5)
    assert asked.place("micro_batch") == "--micro-batch"
    assert asked.place("lr") == f"{file}:3"


def test_every_field_can_stand_in_the_file(tmp_path):
    values = Run(output=tmp_path, steps=3, data_root=tmp_path).model_dump(mode="json")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(values))
    assert load_run(file, {}).run == Run(output=tmp_path, steps=3, data_root=tmp_path)


def test_the_attention_kernel_is_an_argument_of_the_model():
    run = Run(attn_implementation="eager", model_args={"n_layer": 2})
    assert run.model_args == {"n_layer": 2, "attn_implementation": "eager"}


def test_all_faults_at_once_with_their_lines_and_nearest_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: lenet\nmicrobatch: 4\nlr: -1\nsteps: many\nprecision: fp8\n")
    with pytest.raises(UserError) as error:
        load_run(file, {})
    problems = {p.where: p for p in error.value.problems}
    assert set(problems) == {f"{file}:{line}" for line in (2, 3, 4, 5)}
    assert problems[f"{file}:2"].kind == "unknown-key"
    assert "micro_batch" in problems[f"{file}:2"].hint
    assert "-1" in problems[f"{file}:3"].message
    assert "'fp32', 'bf16' or 'fp16'" in problems[f"{file}:5"].message


@pytest.mark.parametrize(
    ("text", "place"), [("model: [\n", ":2:1"), ("a: b: c\n", ":1:5"), ("- lenet\n", ""), ("", "")]
)
def test_a_file_that_is_no_mapping(tmp_path, text, place):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_run(file, {})
    assert error.value.problems[0].where == f"{file}{place}"


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_run(tmp_path / "run.yaml", {})


def test_a_run_made_in_python_names_its_own_fields():
    run = Run(model="mlp", micro_batch=4)
    asked = RunRequest.of(run)
    assert (asked.run, asked.place("micro_batch"), asked.place("lr")) == (run, "micro_batch", "--lr")
    assert RunRequest.of(asked) is asked


def test_a_run_made_in_python_is_refused_with_all_that_is_wrong():
    with pytest.raises(UserError) as error:
        Run(model="mlp", microbatch=4, lr=-1, precision="fp8", save_every="often")
    problems = {p.where: p for p in error.value.problems}
    assert set(problems) == {"microbatch", "lr", "precision", "save_every"}
    assert (problems["microbatch"].kind, problems["lr"].kind) == ("unknown-key", "bad-value")
    assert "micro_batch" in problems["microbatch"].hint and "peak learning rate" in problems["lr"].hint
    assert "lr: got -1" in str(error.value) and "--" not in str(error.value)


def test_a_run_is_loaded_from_its_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: lenet\nmicro_batch: 4\n")
    assert Run.load(file, steps=3) == Run(model="lenet", micro_batch=4, steps=3)
    assert Run.load(str(file), micro_batch=8).micro_batch == 8
    file.write_text("model: lenet\nmicro_batch: 0\nsteps: many\n1: 2\n")
    with pytest.raises(UserError) as error:
        Run.load(file, steps=-1)
    assert {p.where for p in error.value.problems} == {f"{file}:2", "steps", f"{file}:4"}
    with pytest.raises(UserError, match="cannot read"):
        Run.load(tmp_path / "none.yaml")


WRONG = {
    "steps": [True, 1.5, "010", "1:30", "0x", "", "five", float("inf"), float("nan"), 0, 2**32, 1e30, [1]],
    "pipeline": [True, 0, -1, 1.5, "0", "010", "Auto", "", float("nan"), float("inf"), 2**32],
    "micro_batch": [False, "1_0_", "1e-1", -1],
    "seed": [True, -1, 2**32, "99999999999"],
    "lr": [True, float("nan"), float("inf"), "nan", "inf", "0x10", "fast", 0],
    "epochs": [float("inf"), False, "-1"],
    "micro_batch_by_rank": ["4,0", "4,99999999999", "4," + "9" * 5000, "4;2", True, 1.5],
    "lora_dropout": [float("nan"), True],
    "heartbeat_timeout": [float("inf"), 1e300, True],
    "compile": [0, 1, 1.0, "1", "nope", "", None],
    "model": [5, True, 1.5],
    "wandb": [10, True],
    "profile": ["x", "5-3", ""],
    "model_args": [{"a": float("nan")}, {"a": [{"b": float("inf")}]}, {"a": object()}, [], "x"],
    "ds_config": [{"a": {"b": float("nan")}}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_values_that_are_none_of_a_field(field, value):
    with pytest.raises(UserError) as error:
        Run(**{"lr" if field != "lr" else "min_lr": -1, field: value})
    assert {problem.where for problem in error.value.problems} == {field, "lr" if field != "lr" else "min_lr"}


def test_values_that_mean_one_thing_only():
    values: dict[str, Any] = {"steps": "5", "seed": 2.0, "lr": "1e-4", "epochs": 3, "warmup_steps": 1e3}
    run = Run(**values | {"compile": "no", "save_async": "Yes"})
    assert (run.steps, run.seed, run.lr, run.epochs, run.compile, run.save_async) == (5, 2, 1e-4, 3.0, False, True)
    assert run.warmup_steps == 1000
    assert [Run(pipeline=value).pipeline for value in ("4", 4.0, "auto")] == [4, 4, "auto"]


def test_a_file_is_read_with_the_values_that_stand_there(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: 2026-11-27\noutput: 2026-11-28\nlr: 1e-4\nseed: 1_000\ncompile: yes\nimage_sizes: 128:0.5,192\n"
    )
    run = load_run(file, {}).run
    assert (run.model, str(run.output), run.lr, run.seed, run.compile) == ("2026-11-27", "2026-11-28", 1e-4, 1000, True)
    assert run.image_sizes == "128:0.5,192"


def test_what_a_file_says_twice_or_in_two_ways_is_refused_with_all_else(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: lenet\nsteps: 010\nlr: 1e999\nepochs: .inf\nsteps: yes\nmicro_batch: 1:30\nds_config:\n  a: 1\n  a: 2\n"
    )
    with pytest.raises(UserError) as error:
        load_run(file, {})
    places = {problem.where.removeprefix(f"{file}:") for problem in error.value.problems}
    assert places == {"2:8", "3", "4", "5:1", "6", "9:3"}


def test_a_run_folders_own_file_comes_back_as_it_was(tmp_path):
    run = Run(model="gpt2", model_args={"layer_norm_epsilon": 1e-05}, wandb="\U0001f600", lr=1e-9, seed=7)
    (tmp_path / "run.json").write_text(json.dumps(run.model_dump(mode="json"), indent="\t"))
    assert Run.load(tmp_path / "run.json") == run
