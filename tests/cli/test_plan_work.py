"""Hours, money and goodput of a whole training, as `zerofit plan` tells them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import zerofit as zf
from tests.plan.stub import make_profile
from zerofit.app.planning.outlook_options import measured_times, read_work
from zerofit.cli.main import main


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    file.write_text(json.dumps(make_profile().as_dict()))
    return ["--profile", str(file), "--gpus", "8", "--global-batch", "64"]


def run(*args: object, code: int = 0):
    done = CliRunner().invoke(main, ["plan", *map(str, args)])
    assert done.exit_code == code, done.output
    return done


def asked(*args: object, code: int = 0) -> dict:
    return json.loads(run(*args, "--json", code=code).stdout.strip().splitlines()[-1])


def test_hours_and_gpu_hours_follow_from_the_step(stored):
    found = asked(*stored, "--gpu", "h100-80gb", "--tokens", "1.024B", "--epochs", 2, "--mtbf", "1000000000")
    for row in found["layouts"]:
        outlook = row["outlook"]
        assert outlook["steps"] == 31_250  # 2 x 1.024e9 / 1024 tokens / 64 samples
        assert outlook["train_h"] == pytest.approx(31_250 * row["step_s"] / 3600)
        assert outlook["hours"] * outlook["goodput"]["share"] == pytest.approx(outlook["train_h"])
        assert outlook["gpu_hours"] == pytest.approx(8 * outlook["hours"])
        assert outlook["hours_range"][0] / outlook["hours"] == pytest.approx(row["step_s_range"][0] / row["step_s"])
        assert outlook["cost"] is outlook["price"] is None  # no list price of a DGX is known
    assert set(found["assumed"]) == {"save", "restart", "repair"}


def test_samples_and_tokens_are_two_measures(stored):
    rows = [
        asked(*stored, "--gpu", "l4", flag, value, "--top", 1)["layouts"][0]["outlook"]
        for flag, value in (("--tokens", "1.5M"), ("--samples", 1465))
    ]
    assert rows[0] == rows[1] and rows[0]["steps"] == 23  # whole steps: 1,464.8 samples of 64


def test_money_for_each_kind(stored, tmp_path):
    mine = tmp_path / "mine.yaml"
    speeds = "bandwidth: 3TB\nlink: 300GB\npcie: 63GB\nnetwork: 25GB\n"
    mine.write_text("memory: 80GiB\ntflops: {bf16: 500, fp32: 60}\nprice: 1.5\n" + speeds)
    kinds = f"h100-80gb,p5.48xlarge,{mine},l40s"
    found = asked(*stored, "--gpu", kinds, "--tokens", "1B", "--price", "l40s=0.9,h100-80gb=2")
    prices = {box["gpu"]: [] for box in found["boxes"]}
    for box in found["boxes"]:
        outlook = box["layout"]["outlook"]
        assert outlook["cost"] == pytest.approx(outlook["gpu_hours"] * outlook["price"]["per_gpu_hour"])
        prices[box["gpu"]].append(outlook["price"]["per_gpu_hour"])
    assert prices == {"h100-80gb": [2, 2], "own:mine": [1.5], "l40s": [0.9]}
    outlook = asked(*stored, "--gpu", "p5.48xlarge", "--tokens", "1B", "--top", 1)["layouts"][0]["outlook"]
    listed = outlook["price"]
    assert listed["per_gpu_hour"] == pytest.approx(55.04 / 8) and "2026-11-09" in listed["source"]
    shown = run(*stored, "--gpu", kinds, "--tokens", "1B").stdout
    assert "cost" in shown and f"${outlook['cost']:.2f}" in shown and "pass --price USD" in shown


def test_failures_of_nodes_and_of_gpus_are_the_same_ones(stored):
    common = [*stored, "--gpu", "h100-80gb", "--nodes", 4, "--samples", "10M", "--top", 1]
    gpu, node = (asked(*common, "--mtbf", hours)["layouts"][0]["outlook"]["goodput"] for hours in ("3200", "400/node"))
    assert gpu == node and gpu["mtbf_s"] == 100 * 3600
    worse = asked(*common, "--mtbf", 32)["layouts"][0]["outlook"]["goodput"]
    assert worse["share"] < gpu["share"] and worse["save_every_s"] < gpu["save_every_s"]
    slow = asked(*common, "--mtbf", 3200, "--storage", "10MB")["layouts"][0]["outlook"]["goodput"]
    assert slow["save_s"] > 10 * gpu["save_s"] and slow["save_every_s"] > gpu["save_every_s"]


def test_mtbf_alone_tells_when_to_save(stored):
    outlook = asked(*stored, "--gpu", "h100-80gb", "--mtbf", 1000, "--top", 1)["layouts"][0]["outlook"]
    assert outlook["hours"] is None and outlook["goodput"]["save_every_s"] > 0
    shown = run(*stored, "--gpu", "h100-80gb", "--mtbf", 1000).stdout
    assert "save every" in shown and "spare nodes" in shown and "GPU hours" not in shown


def events(folder: Path) -> Path:
    rows = [
        {"event": "phase", "text": "reading the data", "time_s": 100.0},
        {"event": "phase", "text": "building the model and the DeepSpeed engine", "time_s": 110.0},
        {"event": "training", "steps": 9, "done": 0, "time_s": 140.0},
        {"event": "saved", "step": 3, "save_s": 9.0, "stalled_s": 2.0, "time_s": 150.0},
        {"event": "training", "steps": 9, "time_s": 151.0},
        {"event": "saved", "step": 6, "save_s": 9.0, "stalled_s": 4.0, "time_s": 160.0},
        {"event": "saved", "step": 7, "text": "a record without its figures"},
        {"event": "phase", "text": "reading the data", "time_s": 200.0},
        {"event": "training", "steps": 9, "done": 6, "time_s": 260.0},
    ]
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "sa')
    return folder


def test_a_run_folder_tells_what_saves_and_starts_take(stored, tmp_path):
    folder = events(tmp_path / "run")
    assert measured_times(folder) == (3.0, 50.0)
    outlook = asked(*stored, "--gpu", "h100-80gb", "--timed-by", folder, "--top", 1)["layouts"][0]["outlook"]
    assert (outlook["goodput"]["save_s"], outlook["goodput"]["restart_s"]) == (3.0, 50.0)


def test_all_that_is_wrong_is_said_at_once(stored, tmp_path):
    flags = ["--tokens", "many", "--price", "cheap", "--mtbf", "-3", "--storage", "fast", "--timed-by", tmp_path]
    answer = asked(*stored, "--gpu", "h100-80gb", *flags, "--epochs", -1, code=2)
    assert {p["where"] for p in answer["errors"]} == {
        "--tokens",
        "--price",
        "--mtbf",
        "--storage",
        "--timed-by",
        "--epochs",
    }
    with pytest.raises(zf.UserError, match="size of the data"):
        read_work({"epochs": 3})
    with pytest.raises(zf.UserError, match="cannot be combined"):
        read_work({"tokens": 3, "samples": 4})
    assert read_work({"tokens": None}) is None
    work = read_work({"tokens": 1e16, "samples": None})  # str(1e16) is "1e+16"
    assert work and work.tokens == 1e16


def test_from_python(stored):
    plan = zf.plan(profile=stored[1], cluster=zf.Cluster("p5.48xlarge"), tokens="15T", global_batch=64, zero_stage=1)
    best = plan.layouts[0]
    assert best.outlook is not None and best.outlook.hours is not None and best.layout.zero_stage == 1
    assert best.outlook.cost == pytest.approx(best.outlook.gpu_hours * 6.88)
