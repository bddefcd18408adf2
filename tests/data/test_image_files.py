"""Image files as they come: deep, turned, of few pixels or many pictures, among folders that are no classes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.data.test_imagefolder import paint
from zerofit.data.imagefolder import as_rgb

RAMP = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)  # of 16 bits: 0x0000, 0x0101, ... 0xffff


def read(path, upright=True) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(as_rgb(image, upright))


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_keep_their_upper_eight(tmp_path, name):
    Image.fromarray(RAMP).save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        assert image.mode.startswith("I")
    grey = np.arange(256).reshape(16, 16)
    assert (read(tmp_path / name) == grey[:, :, None]).all()


def test_sixteen_bits_of_color_are_read_alike(tmp_path):
    """Pillow's own reader of PNG has both in one file: the grey one of this ramp and a colored one agree."""
    import struct
    import zlib

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for name, color, channels in (("grey", 0, 1), ("rgb", 2, 3)):
        rows = b"".join(b"\0" + np.repeat(row, channels).astype(">u2").tobytes() for row in RAMP)
        header = struct.pack(">IIBBBBB", 16, 16, 16, color, 0, 0, 0)
        body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
        (tmp_path / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    assert (read(tmp_path / "grey.png") == read(tmp_path / "rgb.png")).all()


@pytest.mark.parametrize("values", [np.array([[0.5, 255.0]], np.float32), np.array([[70000, -1]], np.int32)])
def test_numbers_without_a_white_are_refused(tmp_path, refused, opened, values):
    for n in range(12):
        paint(tmp_path / "pics" / "a" / f"{n}.png", n)
        paint(tmp_path / "pics" / "b" / f"{n}.png", n)
    Image.fromarray(values).save(tmp_path / "pics" / "a" / "deep.tif")
    (problem,) = refused("image", data=f"imagefolder:{tmp_path}/pics", image_size=8)
    assert problem.kind == "bad-image" and "deep.tif" in problem.message and "16 bits" in problem.message
    data = opened("image", data=f"imagefolder:{tmp_path}/pics", image_size=8, skip_bad=True)
    assert len(data.train) + len(data.valid) == 24 and "1 broken image skipped" in data.notes


def test_a_turned_image_is_seen_upright(tmp_path):
    """Orientation 6: the first row of the picture is the first column of the file, bottom to top (EXIF 2.3)."""
    stored = np.zeros((2, 3, 3), np.uint8)
    stored[0] = [[10, 0, 0], [20, 0, 0], [30, 0, 0]]
    stored[1] = [[40, 0, 0], [50, 0, 0], [60, 0, 0]]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert read(tmp_path / "a.png")[:, :, 0].tolist() == [[40, 10], [50, 20], [60, 30]]
    assert read(tmp_path / "a.png", upright=False)[:, :, 0].tolist() == stored[:, :, 0].tolist()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "LAB", "RGB"])
def test_all_modes_and_a_single_pixel(tmp_path, opened, mode):
    for n in range(6):
        for name in ("a", "b"):
            paint(tmp_path / name / f"{n}.png", n)
    suffix = {"CMYK": "tif", "YCbCr": "jpg", "LAB": "tif"}.get(mode, "png")
    Image.new(mode, (1, 1)).save(tmp_path / "a" / f"small.{suffix}")
    frames = [Image.new("P", (9, 5), n) for n in range(3)]
    frames[0].save(tmp_path / "b" / "moving.gif", save_all=True, append_images=frames[1:])
    data = opened("image", data=f"imagefolder:{tmp_path}", image_size=8)
    for split in (data.train, data.valid):
        assert split.batch(range(len(split)), range(len(split)))["inputs"].isfinite().all()


def test_folders_of_systems_are_no_classes(tmp_path, opened):
    for n in range(12):
        for name in ("cat", "dog", "__MACOSX", "@eaDir", ".thumbs", "cat/.ipynb_checkpoints", "dog/@eaDir"):
            paint(tmp_path / name / f"{n}.png", n)
    (tmp_path / "cat" / "loop").symlink_to(tmp_path)
    (tmp_path / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")
    data = opened("image", data=f"imagefolder:{tmp_path}", image_size=8)
    assert data.inputs.classes == 2 and len(data.train) + len(data.valid) == 24
    assert data.notes[0] == "2 classes: cat, dog"


@pytest.mark.parametrize(("other", "file"), [("annotations", "instances.json"), ("labels", "0.txt")])
def test_annotations_are_no_class(tmp_path, refused, other, file):
    for n in range(12):
        paint(tmp_path / "images" / f"{n}.png", n)
    (tmp_path / other).mkdir()
    (tmp_path / other / file).write_text("{}")
    (problem,) = refused("image", data=f"imagefolder:{tmp_path}", image_size=8)
    assert problem.kind == "no-classes" and other in problem.message and "images" not in problem.message.split(":")[1]
