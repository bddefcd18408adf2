"""`zerofit compare` as a user and as a script see it: real processes, files, a kill in the middle."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from PIL import Image
from sklearn.datasets import load_digits

from zerofit.cli.main import main

KEYS = {
    *("strategy", "status", "samples_per_s", "speedup", "peak_bytes_per_rank", "comm_bytes_per_step", "accuracy"),
    *("loss", "max_weight_difference", "reason"),
}
SIZE_KEYS = {
    *("batch_size", "seed", "seconds", "epochs_to_target", "seconds_to_target", "final_accuracy", "best_accuracy"),
}
FILES = {"results.json", "results.csv", "comparison.png", "comparison.html"}
WORK = ["mlp", "--data", "digits", "--ranks", "2", "--global-batch", "16", "--output", "out", "--json"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def started(*args: str, cwd: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "zerofit.cli", "compare", *args]
    return subprocess.Popen(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(*args: str):
    """What the command says in this process, for calls that start no other."""
    done = CliRunner().invoke(main, ["compare", *args])
    lines = done.stdout.strip().splitlines()
    return done.exit_code, json.loads(lines[-1]) if lines else {}, done.stderr


def compared(*args: str, cwd: Path):
    process = started(*args, cwd=cwd)
    out, err = process.communicate(timeout=300)
    lines = out.strip().splitlines()
    return process.returncode, json.loads(lines[-1]) if lines else {}, err


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    """A comparison that was killed while its second strategy trained, and then repeated."""
    place = tmp_path_factory.mktemp("strategies")
    command = ["strategies", *WORK, "--strategies", "ddp,hybrid,device-map", "--steps", "20"]
    process = started(*command, cwd=place)
    deadline = time.monotonic() + 300
    while not (place / "out" / "rows" / "ddp" / "rank-0.log").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(children, timeout=10)
    left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return place, left, compared(*command, cwd=place)


def test_a_killed_comparison_leaves_nothing_behind_and_goes_on(strategies):
    _, left, (code, answer, err) = strategies
    assert left == []
    assert code == 0, err
    assert "single: known" in err
    rows = {row["strategy"]: row for row in answer["rows"]}
    assert list(rows) == ["single", "device-map", "ddp", "hybrid"]
    assert set(rows["ddp"]) >= KEYS
    assert set(rows["hybrid"]) >= KEYS
    assert rows["ddp"]["max_weight_difference"] <= 1e-5
    assert rows["ddp"]["speedup"] == pytest.approx(rows["ddp"]["samples_per_s"] / rows["single"]["samples_per_s"])
    assert rows["single"]["comm_bytes_per_step"] == 0
    assert (rows["single"]["ranks"], rows["single"]["efficiency"]) == (1, 1.0)
    assert (rows["hybrid"]["status"], rows["device-map"]["status"]) == ("not-here", "not-here")
    assert "--ranks 4" in rows["hybrid"]["reason"]


def test_results_as_files(strategies):
    place, _, (_, answer, _) = strategies
    assert {path.name for path in (place / "out").iterdir()} == FILES | {"asked.json", "rows"}
    assert {Path(path).name for path in answer["written"]} == FILES
    stored = json.loads((place / "out" / "results.json").read_text())
    assert stored["rows"] == answer["rows"]
    with (place / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == [row["strategy"] for row in answer["rows"]]
    assert float(lines[2]["samples_per_s"]) == answer["rows"][2]["samples_per_s"]
    with Image.open(place / "out" / "comparison.png") as picture:
        assert picture.width > 1000


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (Debian: chromium)")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(strategies, tmp_path, width):
    """All rows are there, and nothing but the table itself scrolls sideways."""
    text = (strategies[0] / "out" / "comparison.html").read_text()
    script = "<script>document.title = document.documentElement.scrollWidth + ' of ' + window.innerWidth</script>"
    (tmp_path / "page.html").write_text(text.replace("</body>", script + "</body>"))
    argv = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    argv += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout
    wide, there = map(int, re.search(r"<title>(\d+) of (\d+)</title>", dom).groups())
    assert wide <= there
    assert dom.count("<tr") == 2 + 4  # what was measured, and what was not
    assert 'alt="mlp on digits' in dom


def test_people_see_a_table(strategies, monkeypatch):
    monkeypatch.chdir(strategies[0])
    argv = ["compare", "strategies", *WORK[:-1], "--strategies", "ddp,hybrid,device-map", "--steps", "20"]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0, done.stderr
    assert "samples/s" in done.stdout
    assert "hybrid: needs 4 ranks" in done.stdout


def test_batch_sizes(tmp_path):
    """512 samples per step are shared out by two ranks, and both sizes end with an epoch of small batches."""
    command = ["mlp", "--data", "digits", "--sizes", "256,512", "--seeds", "2", "--epochs", "3", "--target", "0.6"]
    command += ["--per-rank", "256", "--finish", "32=1", "--scale-lr", "sqrt"]
    code, answer, err = compared("batch-size", *command, "--output", "out", "--json", cwd=tmp_path)
    assert code == 0, err
    rows = answer["rows"]
    assert [(row["batch_size"], row["seed"], row["ranks"]) for row in rows] == [
        *((256, 0, 1), (256, 1, 1)),
        *((512, 0, 2), (512, 1, 2)),
    ]
    assert all(set(row) >= SIZE_KEYS for row in rows)
    assert rows[2]["lr"] == pytest.approx(2**0.5 * rows[0]["lr"])
    samples = [point["samples"] for point in rows[2]["curve"]]
    epoch = len(load_digits().target) - len(load_digits().target) // 5  # a fifth validates
    assert [point["steps"] for point in rows[2]["curve"]] == [3, 6, 6 + -(-(3 * epoch - 6 * 512) // 32)]
    assert samples == [3 * 512, 6 * 512, samples[1] + 32 * (rows[2]["steps"] - 6)]
    assert all(row["best_accuracy"] >= row["final_accuracy"] > row["curve"][1]["accuracy"] for row in rows)
    assert all(row["curve"][row["best_epoch"] - 1]["test_accuracy"] == row["test_accuracy"] > 0.3 for row in rows)
    assert [size["runs"] for size in answer["summary"]] == [2, 2]
    assert answer["summary"][0]["noise_scale"][0] > 1
    assert answer["summary"][1]["noise_scale"] is None  # of several ranks
    assert {path.name for path in (tmp_path / "out").iterdir()} >= FILES


def test_scaling(tmp_path):
    code, answer, err = compared("scaling", *WORK, "--steps", "8", cwd=tmp_path)
    assert code == 0, err
    rows = [(row["mode"], row["ranks"], row["global_batch"]) for row in answer["rows"]]
    assert rows == [("weak", 1, 8), ("weak", 2, 16), ("strong", 1, 16), ("strong", 2, 16)]
    assert [row["speedup"] for row in answer["rows"] if row["ranks"] == 1] == [1.0, 1.0]
    assert all(row["efficiency"] > 0 for row in answer["rows"])


def test_everything_that_is_wrong_at_once(tmp_path, monkeypatch):
    wrong = ["mlp", "--strategies", "dpp,zero4", "--global-batch", "33", "--ranks", "2", "--json"]
    monkeypatch.chdir(tmp_path)
    code, answer, _ = said("strategies", *wrong)
    assert code == 2
    problems = answer["errors"]
    assert [p["kind"] for p in problems] == ["strategy", "strategy", "batch-size"]
    assert "ddp" in problems[0]["hint"]
    assert "32 or 34" in problems[2]["hint"]
    code, answer, _ = said("strategies", "vgg16", "--data", "digits", "--json")
    assert (code, answer["error"]["where"]) == (2, "MODEL")  # 8x8 pixels are too few
    code, _, err = said("strategies", "mlp", "--steps", "3")
    assert code == 2
    assert "x>=4" in err
    code, answer, _ = said("scaling", "mlp", "--strategy", "single", "--json")
    assert (code, answer["error"]["kind"]) == (2, "strategy")
    code, answer, _ = said("batch-size", "dcgan", "--sizes", "16", "--json")
    assert (code, answer["error"]["kind"]) == (2, "model-task")
    assert list(tmp_path.iterdir()) == []
