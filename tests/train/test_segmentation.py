"""A class for each pixel: figures against scikit-learn and by hand, a run on made-up masks, its evaluation."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score
from torch.nn import functional

from zerofit.app.inference import evaluate
from zerofit.data.opening import open_data
from zerofit.models.build import build, check_forward, forward_logits
from zerofit.models.catalog import find
from zerofit.models.inputs import SegmentationInputs, inputs_from_dict, inputs_to_dict
from zerofit.models.presets import NAMED
from zerofit.models.scores import class_table, mean_iou
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run
from zerofit.train.loss import counts, weighted_cross_entropy


def test_figures_are_scikit_learns():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 5, 5), torch.randint(4, (3, 5, 5))
    labels[0, :2] = -100
    real, answers = labels != -100, logits.argmax(1)
    wanted, got = labels[real].numpy(), answers[real].numpy()
    table = class_table(logits, labels, 4)
    assert np.array_equal(table.view(4, 4).numpy(), confusion_matrix(wanted, got, labels=range(4)))
    assert mean_iou(table.tolist()) == pytest.approx(jaccard_score(wanted, got, average="macro"))
    loss, targets, right = counts(logits, labels)[:3].tolist()
    assert right / targets == pytest.approx(accuracy_score(wanted, got))
    assert loss / targets == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-6)


def test_mean_iou_by_hand():
    """2x2 pixels: class 0 has 1 of 2 pixels in common (union 2), class 1 has 2 of 3; class 2 occurs nowhere."""
    labels = torch.tensor([[[0, 0], [1, 1]]])
    logits = functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).movedim(-1, 1).float()
    assert mean_iou(class_table(logits, labels, 3).tolist()) == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_loss_is_torchs_and_independent_of_parts():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 3, 6, 6), torch.randint(3, (4, 6, 6))
    whole = weighted_cross_entropy(logits, labels, 1 / 4, smoothing=0.1)
    assert torch.allclose(whole, functional.cross_entropy(logits, labels, label_smoothing=0.1))
    labels[0, :5], labels[1] = -100, -100  # an image of few labelled pixels, and one of none
    wanted = sum(functional.cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in (0, 2, 3)) / 4
    parts = [weighted_cross_entropy(logits[i : i + 2], labels[i : i + 2], 1 / 4) for i in (0, 2)]
    assert torch.allclose(parts[0] + parts[1], wanted)


@pytest.mark.parametrize(
    "name", [p.name for p in NAMED.values() if p.origin == "torchvision" and p.kind == "segmentation"]
)
def test_torchvisions_models_are_built_and_called(name):
    inputs = SegmentationInputs(channels=3, size=64, classes=5)
    with torch.device("meta"):
        model = build(find(name), inputs, {})
        assert forward_logits(model.eval(), torch.zeros(2, 3, 64, 64))[0].shape == (2, 5, 64, 64)
        assert check_forward(model, find(name), inputs)
    assert type(inputs_from_dict(inputs_to_dict(inputs))) is SegmentationInputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """40 pictures of 40x48 pixels: a bright square of class 1 on a dark ground, its border of no class."""
    root, draw = tmp_path_factory.mktemp("masks"), np.random.default_rng(0)
    (root / "images").mkdir()
    (root / "masks").mkdir()
    for n in range(40):
        top, left = draw.integers(0, 20, 2)
        pixels, mask = draw.integers(0, 90, (40, 48, 3)), np.zeros((40, 48))
        mask[top : top + 18, left : left + 18] = 255
        mask[top + 1 : top + 17, left + 1 : left + 17] = 1
        pixels[mask > 0] += 120
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"images/{n:02}.png")
        Image.fromarray(mask.astype(np.uint8)).save(root / f"masks/{n:02}.png")
    return root


def test_image_and_mask_are_cut_together(folder):
    run = Run(model="fcn-tiny", data=f"segmentation:{folder}", image_size=32)
    data = open_data(run, "segmentation", None, Reporter())
    assert (data.inputs, data.notes) == (SegmentationInputs(channels=3, size=32, classes=2), ())
    assert (len(data.train), len(data.valid)) == (36, 4)
    batch = data.train.batch(range(8), range(8))
    bright = batch["inputs"].mean(1) > -0.4
    inside, outside = batch["labels"] == 1, batch["labels"] == 0
    assert batch["labels"].shape == (8, 32, 32) and (batch["labels"] == -100).any()
    assert bright[inside].float().mean() > 0.97 and bright[outside].float().mean() < 0.03
    again = data.train.batch(range(8), range(8))
    assert torch.equal(again["inputs"], batch["inputs"]) and torch.equal(again["labels"], batch["labels"])


def test_values_with_gaps_are_reported(folder, tmp_path):
    """Masks with 0, 7 and 255, as exported by tools that number all their labels, train eight classes."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "masks").iterdir():
        mask = np.array(Image.open(file))
        mask[mask == 1] = 7
        Image.fromarray(mask).save(file)
    data = open_data(Run(model="fcn-tiny", data=f"segmentation:{tmp_path}"), "segmentation", None, Reporter())
    assert data.inputs.classes == 8 and "have 2 different values from 0 to 7, so the model has 8" in data.notes[0]


def test_bad_folders_are_refused_with_names(tmp_path):
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images/a.png")
    run = Run(model="fcn-tiny", data=f"segmentation:{tmp_path}")
    with pytest.raises(UserError, match=r"1 images in .* have no mask: a\.png"):
        open_data(run, "segmentation", None, Reporter())
    Image.new("RGB", (8, 8)).save(tmp_path / "masks/a.png")
    with pytest.raises(UserError, match="the mask has mode RGB"):
        open_data(run, "segmentation", None, Reporter())
    rows = b"".join(b"\0" + bytes([0b00011011, 0]) for _ in range(8))  # 8 x 8 gray pixels of 2 bits: 0, 1, 2, 3, 0, ...
    parts = (b"IHDR" + struct.pack(">IIBBBBB", 8, 8, 2, 0, 0, 0, 0), b"IDAT" + zlib.compress(rows), b"IEND")
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    (tmp_path / "masks/a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(UserError, match="gray values of 2 or 4 bits"):
        open_data(run, "segmentation", None, Reporter())
    with pytest.raises(UserError, match="has no images with masks"):
        open_data(run.model_copy(update={"data": "digits"}), "segmentation", None, Reporter())


def test_it_trains_on_two_ranks_and_is_evaluated(pools, folder, tmp_path):
    how = {"model": "fcn-tiny", "data": f"segmentation:{folder}", "image_size": 32, "steps": 20, "global_batch": 8}
    how |= {"model_args": {"width": 4}, "optimizer": "adamw", "lr": 0.01, "sync_batch_norm": True, "data_workers": 0}
    run = pools(2).train(tmp_path / "run", ds_config="zero3", image_sizes=None, **how)
    figures = run.result["eval"]
    assert figures["mean_iou"] > 0.7 and figures["pixel_accuracy"] > 0.85
    mine = evaluate(tmp_path / "run", micro_batch=3)
    assert mine.mean_iou == pytest.approx(figures["mean_iou"], rel=1e-3)
    assert (mine.accuracy, mine.loss) == pytest.approx((figures["pixel_accuracy"], figures["loss"]), rel=1e-3)
