"""`zerofit simulate` as a user and as a script meet it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from click.testing import CliRunner

from tests.simulate.targets import TINY
from zerofit.cli.main import main
from zerofit.cli.simulate import _write_config
from zerofit.simulate.forecast.result import Simulation
from zerofit.spec.run import Run, fields_of

SMALL = ["--model-args", json.dumps(TINY), "--seq-len", "16", "--micro-batch", "2"]
KEYS = {
    *("world_size", "rank", "phases", "peak_bytes", "peak_phase", "peak_at", "breakdown", "reserved_bytes"),
    *("device_total_bytes", "host_bytes", "nvme_bytes", "comm", "fits", "margin_bytes", "knobs", "seconds"),
}
# fields of a run without a flag of `simulate`; a run file may contain them
WITHOUT_FLAG = {
    *("model", "download", "generate_samples", "stream", "chat_template", "packing", "skip_bad", "data_workers"),
    *("random_erasing", "epochs", "lr", "schedule", "warmup_steps", "min_lr", "weight_decay", "momentum", "seed"),
    *("compile", "fit", "pipeline_balance", "save_every", "save_async", "keep_last", "keep_every", "resume"),
    *("eval_every", "eval_samples", "check_loss", "record_memory", "heartbeat_timeout", "log_every", "callbacks"),
    *("profile", "profile_ranks", "tensorboard", "wandb", "output"),
}


def test_every_field_of_a_run_has_a_flag_or_is_listed_without_one():
    assert set(Run.model_fields) - set(fields_of("simulate")) == WITHOUT_FLAG


def ask(*args: str, code: int = 0):
    done = CliRunner().invoke(main, ["simulate", *args], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def answer(*args: str, code: int = 0) -> dict:
    return json.loads(ask(*args, "--json", code=code).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def whole() -> dict:
    return answer(
        "llama-tiny", *SMALL, "--ds-config", "zero2", "--gpus", "2", "--gpu", "h100-80gb", "--precision", "bf16"
    )


def test_the_answer_has_what_scripts_rely_on(whole):
    assert set(whole) >= KEYS
    assert whole["run"]["precision"] == "bf16" and whole["run"]["seq_len"] == 16
    assert (whole["world_size"], whole["rank"], whole["fits"]) == (2, 0, True)
    assert sum(whole["breakdown"].values()) == whole["peak_bytes"]
    assert {"name", "start_bytes", "peak_bytes", "end_bytes"} <= set(whole["phases"][0])
    assert set(whole["host_bytes"]) == {"pageable", "pinned"}
    assert {"op", "bytes", "group_size", "phase", "count"} == set(whole["comm"][0])


def test_every_knob_is_simulated(whole):
    changes = {knob["change"]: knob["peak_bytes"] for knob in whole["knobs"]}
    assert "--activation-checkpointing" in changes
    assert any(change.startswith("--micro-batch 1") for change in changes)
    assert "--ds-config zero3" in changes
    assert any(size < whole["peak_bytes"] for size in changes.values())


def test_what_does_not_fit_is_a_finding():
    result = answer("llama-tiny", *SMALL, "--gpus", "1", "--gpu", "t4", "--device-memory", "1MB", "--no-knobs", code=1)
    assert result["fits"] is False
    assert result["margin_bytes"] < 0
    assert "missing" in result["because"]


def test_a_run_file_with_data_and_a_picture(tmp_path: Path):
    run = {"model": "lenet", "data": "digits", "ds_config": "zero1", "micro_batch": 4}
    (tmp_path / "run.yaml").write_text("\n".join(f"{key}: {value}" for key, value in run.items()))
    picture, page = tmp_path / "memory.png", tmp_path / "memory.html"
    files = ["--plot", str(picture), "--html", str(page)]
    words = [str(tmp_path / "run.yaml"), "--gpus", "4", "--gpu", "l4", "--no-knobs", "--rank", "3", "--details"]
    result = answer(*words, *files)
    assert result["rank"] == 3
    assert picture.stat().st_size > 10_000
    highest = max(result["timeline"], key=lambda point: sum(point["bytes"].values()))
    assert highest["bytes"] == {kind: size for kind, size in result["breakdown"].items() if size}
    assert highest["at"] == (result["peak_at"]["own"] or result["peak_at"]["line"])
    chart = json.loads(page.read_text().split('<script type="application/json">')[1].split("</script>")[0])
    heights = map(sum, zip(*(line["values"] for line in chart["lines"]), strict=True))
    assert max(heights) == result["peak_bytes"]
    assert any(highest["at"] in hint for hint in chart["hints"])


def test_every_stage_of_a_pipeline_is_looked_at():
    args = ["--pipeline", "2", "--ds-config", "pipeline", "--gpus", "2", "--gpu", "l4", "--no-knobs"]
    result = answer("llama-tiny", *SMALL, *args)
    assert [stage["rank"] for stage in result["stages"]] == [0, 1]
    assert result["peak_bytes"] in [stage["peak_bytes"] for stage in result["stages"]]


def test_many_layers_are_extended_from_few(tmp_path):
    """24 layers, extended from a few, against all of them; buckets that one layer fills."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = dict.fromkeys((*sizes, "stage3_max_live_parameters", "stage3_max_reuse_distance"), 100)
    ds_config = tmp_path / "ds.json"
    ds_config.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    deep = ["--model-args", json.dumps({**TINY, "num_hidden_layers": 24}), *SMALL[2:]]
    args = ["--ds-config", str(ds_config), "--gpus", "2", "--gpu", "l4", "--no-knobs"]
    few, exact = answer("llama-tiny", *deep, *args), answer("llama-tiny", *deep, *args, "--exact")
    assert few["layers_simulated"] and not exact["layers_simulated"]
    assert abs(few["extension_error"]) <= 0.005
    assert few["peak_bytes"] == pytest.approx(exact["peak_bytes"], rel=0.005)
    for one, other in zip(few["phases"], exact["phases"], strict=True):
        assert one["peak_bytes"] == pytest.approx(other["peak_bytes"], rel=0.005), one["name"]
    assert sum(r["bytes"] for r in few["comm"]) == pytest.approx(sum(r["bytes"] for r in exact["comm"]), rel=0.005)
    assert few["flops"] == pytest.approx(exact["flops"], rel=0.005)


def test_bad_input_comes_all_at_once():
    done = ask("llama-tiny", "--gpu", "h100-80g", "--gpus", "0", code=2)
    assert "h100-80gb" in done.stderr
    assert "--gpus" in done.stderr
    error = answer("llama-tiny", *SMALL, "--gpus", "3", "--gpu", "l4", "--tensor-parallel", "2", code=2)["error"]
    assert "multiple" in error["message"]
    error = answer("llama-tiny", *SMALL, "--gpus", "2", "--gpu", "l4", "--rank", "2", code=2)["error"]
    assert error["where"] == "--rank"
    error = answer("llama-tiny", *SMALL, "--ranks", "3", "--nodes", "2", "--gpu", "l4", code=2)["error"]
    assert "3 ranks cannot be divided among 2 nodes" in error["message"]


def test_a_json_is_written_only_where_it_can_be(tmp_path: Path):
    (tmp_path / "there.json").write_text("mine")
    args = ["llama-tiny", "--gpu", "l4", "--write-config"]
    for name, kind in (("there.json", "exists"), ("nowhere/zero3.json", "bad-value")):
        assert answer(*args, str(tmp_path / name), code=2)["error"]["kind"] == kind
    assert answer(*args, str(tmp_path / "new.json"), "--no-knobs", code=2)["error"]["kind"] == "usage"
    assert (tmp_path / "there.json").read_text() == "mine"


def test_the_written_json_is_named_as_the_user_named_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    change = "TrainingArguments(gradient_checkpointing=True, deepspeed='zero3_offload.json')"
    row = SimpleNamespace(fits=True, config="zero3_offload", file=None, change=change, cost_rank=1)
    _write_config(cast("Simulation", SimpleNamespace(tried=[row])), tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["zero_optimization"]["stage"] == 3
    assert (
        f"TrainingArguments(gradient_checkpointing=True, deepspeed='{tmp_path}/mine.json')" in capsys.readouterr().err
    )


def test_a_model_that_cannot_be_simulated_says_where():
    error = answer("tests.simulate.own:looks_at_values", "--gpus", "1", "--gpu", "l4", "--no-knobs", code=2)["error"]
    assert error["kind"] == "not-simulated"
    assert "nonzero" in error["message"]


def test_tokens_mean_nothing_to_images():
    error = answer("lenet", "--seq-len", "16", "--gpus", "1", "--gpu", "l4", "--no-knobs", code=2)["error"]
    assert error["where"] == "--seq-len"


def test_a_request_to_stop_ends_everything(tmp_path: Path):
    """SIGTERM to the command: exit code 130, one word of JSON, and no process of its own left."""
    command = [sys.executable, "-m", "zerofit.cli", "simulate", "llama-tiny", *SMALL]
    command += ["--gpus", "2", "--gpu", "l4", "--json"]
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and len(psutil.Process(process.pid).children(recursive=True)) < 3:
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(60) == 130
        _, alive = psutil.wait_procs(children, timeout=20)
        out.seek(0)
        assert json.loads(out.read().splitlines()[-1])["error"]["kind"] == "interrupted"
    assert children and not alive
