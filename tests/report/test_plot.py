"""`zerofit plot` draws run folders."""

from __future__ import annotations

import json

from click.testing import CliRunner
from PIL import Image

from zerofit.cli.main import main


def a_run(path, tokens: float | None = 100.0):
    (path / "logs").mkdir(parents=True)
    steps = [
        {"step": n, "loss": 3 / n, "samples_per_s": 9.0, "tokens_per_s": tokens, "memory_bytes": 2**30}
        for n in range(1, 9)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (path / "logs" / "events.jsonl").write_text(json.dumps({"event": "eval", "step": 8, "loss": 0.5}) + "\n")
    return path


def test_two_runs_in_one_picture(tmp_path):
    runs = [str(a_run(tmp_path / name)) for name in ("a", "b")]
    out = tmp_path / "both.png"
    done = CliRunner().invoke(main, ["plot", *runs, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == dict.fromkeys(runs, 8)
    with Image.open(out) as image:
        assert image.width > 600
        assert len(image.convert("RGB").getcolors(2**24)) > 10


def test_every_folder_without_metrics_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(main, ["plot", str(tmp_path / "empty"), str(tmp_path / "none"), "--json"])
    assert done.exit_code == 2
    assert [e["where"] for e in json.loads(done.stdout)["errors"]] == [str(tmp_path / "empty"), str(tmp_path / "none")]
