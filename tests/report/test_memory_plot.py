"""The picture of a simulated rank's memory."""

from __future__ import annotations

import matplotlib as mpl
import pytest
from PIL import Image

from zerofit.report.memory_plot import COLORS, MemoryTimeline, draw
from zerofit.spec.errors import UserError

MIB, GIB = 2**20, 2**30


def a_timeline(unit: int = GIB, **more) -> MemoryTimeline:
    forward = {"parameters": unit, "activations": 2 * unit, "of no known kind": unit}
    step = {"parameters": unit, "optimizer state": 2 * unit}
    moments = {
        "build": ((0, 3), {"parameters": unit}),
        "forward": ((4, 60), forward),
        "a phase too short for its name": ((60, 61), forward),
        "step": ((61, 100), step),
    }
    points = [{"t": t, "phase": name, "step": 0, "bytes": of} for name, (times, of) in moments.items() for t in times]
    return MemoryTimeline(points=points, **more)


def words_of(timeline, path) -> str:
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(timeline, path)
    return path.read_text()


def test_formats(tmp_path):
    for ending, beginning in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        draw(a_timeline(), tmp_path / f"memory{ending}")
        assert (tmp_path / f"memory{ending}").read_bytes().startswith(beginning)


def test_what_it_says(tmp_path):
    more = {"title": "a title", "device": "A100", "device_total_bytes": 8 * GIB, "peak_at": "layers.3, engine.py:12"}
    words = words_of(a_timeline(**more), tmp_path / "memory.svg")
    for said in ("a title", "A100: 8.00 GiB", "peak 4.00 GiB in forward", "layers.3, engine.py:12", "(GiB)"):
        assert said in words
    for kind, size in (("parameters", "1.00"), ("activations", "2.00"), ("other", "1.00")):
        assert f"{kind}  {size} GiB" in words
    assert "optimizer state  0 B" in words  # none at the peak, but in the picture
    assert "build" in words and "a phase too short" not in words


def test_small_models_and_large_devices(tmp_path):
    words = words_of(a_timeline(MIB, device_total_bytes=80 * GIB), tmp_path / "memory.svg")
    assert "(MiB)" in words and "above this plot" in words


def test_nothing_but_points(tmp_path):
    points = [{"t": 0, "phase": "build", "step": -1, "bytes": {}}]
    draw(MemoryTimeline(points=points), tmp_path / "memory.png")


def test_kinds_have_their_colors(tmp_path):
    draw(a_timeline(), tmp_path / "memory.png")
    with Image.open(tmp_path / "memory.png") as image:
        seen = {"#{:02X}{:02X}{:02X}".format(*color) for _, color in image.convert("RGB").getcolors(2**24)}
    assert {COLORS[kind] for kind in ("parameters", "activations", "optimizer state", "other")} <= seen
    assert COLORS["gradients"] not in seen
    assert len(set(COLORS.values())) == len(COLORS)


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(UserError) as raised:
        draw(a_timeline(), tmp_path / "missing" / "memory.txt")
    assert [p.where for p in raised.value.problems] == ["--plot", "--plot"]
