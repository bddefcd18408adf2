"""Document 002: its collectives on two real ranks, and what its page says of curves that are known."""

from __future__ import annotations

from matplotlib import colormaps
from PIL import Image

from benchmarks.documents.page import draw_epochs
from benchmarks.documents.several_devices import lenet_values, resnet_values, run_collectives, sums
from zerofit.app.comparing.laboratory import Done, Experiment
from zerofit.app.comparing.rows import Comparison, SizeRow


def test_two_ranks_add_up_and_share_a_matrix():
    seen = run_collectives()["ranks"]
    assert [one["before"] for one in seen] == [[[1, 1]], [[2, 2]]]
    assert [one["all_reduced"] for one in seen] == [[[3, 3]], [[3, 3]]]
    assert seen[0]["scattered"] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert seen[1]["scattered"] == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert sums(seen) == {"before": "1, 2", "after": "3, 3", "parts": "2 x 5, 2 x 5"}


def row(accuracies, ranks=1, **more):
    curve = [{"test_accuracy": one} for one in accuracies]
    return SizeRow(status="ok", batch_size=64 * ranks, seed=0, lr=0.05, ranks=ranks, curve=curve, **more)


def done(*rows):
    compared = Comparison(kind="batch-size", about={}, rows=rows)
    return Done(Experiment(name="x", question="", kind="batch-size", options={}), "zerofit compare", compared)


def test_what_devices_and_what_seeds_change():
    level = [0.5] * 7
    one, two = done(row([*level, 0.90]), row([*level, 0.80])), done(row([*level, 0.91]), row([*level, 0.80]))
    values = lenet_values(one, two)
    assert values["lenet"] == ["0.85", "0.85"]  # means of seeds
    assert "differ by 0.010 at most, with another seed by up to 0.100" in values["lenet_why"]


def test_the_picture_has_the_lines_of_runs_that_ended(tmp_path):
    draw_epochs({"1 device": [[0.1, 0.8], [0.1, 0.9]], "2 devices": []}, "accuracy", tmp_path / "x.png")
    shown = {color for _, color in Image.open(tmp_path / "x.png").convert("RGB").getcolors(700 * 360)}
    first, second = (tuple(round(255 * part) for part in colormaps["viridis"](at)[:3]) for at in (0.0, 0.75))
    assert first in shown and second not in shown


def test_a_run_that_failed_has_no_figures():
    failed = SizeRow(status="failed", reason="a rank died", batch_size=64, seed=0, lr=0.05)
    assert lenet_values(done(failed), done(failed)) == {"lenet": ["-", "-"], "lenet_why": ""}
    ended = row([0.9, 0.92], seconds_per_epoch=13.7)
    values = resnet_values(done(ended, failed))
    assert (values["accuracies"], values["seconds"]) == ("0.92 -> -", "13.7 -> -")
