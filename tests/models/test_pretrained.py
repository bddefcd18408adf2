"""Files of weights give the model that wrote them; only a head may have another number of classes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from zerofit.models.build import build, forward_logits
from zerofit.models.catalog import ModelError, find
from zerofit.models.deferred import Stored
from zerofit.models.inputs import ImageInputs
from zerofit.models.pretrained_notes import notes_of_pretrained
from zerofit.spec.run import Run

SOURCE = "resnet18"
TEN = ImageInputs(channels=3, size=32, classes=10)
CPU = torch.device("cpu")


def source(path: Path, name: str = SOURCE):
    return replace(find(name), pretrained=str(path))


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torchvision.models.resnet18(num_classes=10)
    model.train()(torch.randn(4, 3, 32, 32))  # running statistics of their own
    return model.eval()


@pytest.mark.parametrize("form", ["pth", "safetensors", "wrapped", "folder"])
def test_logits_are_the_librarys(theirs, tmp_path, form):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(theirs.state_dict(), path)
    elif form == "folder":
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
        path = tmp_path
    else:
        state = theirs.state_dict()
        wrapped = {"model": {f"module.{name}": t for name, t in state.items()}, "epoch": 3}
        torch.save(wrapped if form == "wrapped" else state, path)
    x = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    for stored in (None, Stored(dtype=torch.float32, device=CPU)):
        mine = build(source(path), TEN, {}, stored=stored).eval()
        assert torch.equal(forward_logits(mine, x)[0], theirs(x))
    assert notes_of_pretrained(source(path), TEN, {}) == []


def test_a_head_of_other_classes_is_drawn_anew_and_all_else_is_refused_by_name(theirs, tmp_path):
    path = tmp_path / "w.pth"
    torch.save(theirs.state_dict(), path)
    three = ImageInputs(channels=3, size=32, classes=3)
    torch.manual_seed(0)
    fresh = build(find(SOURCE), three, {}).state_dict()
    torch.manual_seed(0)
    mine = build(source(path), three, {}).state_dict()
    for name, tensor in mine.items():
        wanted = fresh[name] if name.startswith("fc.") else theirs.state_dict()[name]
        assert torch.equal(tensor, wanted), name
    adapted = replace(source(path), partial=Run(lora=2).partial)
    (note,) = notes_of_pretrained(adapted, three, {})
    assert torch.equal(build(adapted, three, {}).state_dict()["conv1.weight"], theirs.conv1.weight)
    assert note == f"the head (fc) is initialized at random: {path} has 10 classes, the data has 3"
    grey = ImageInputs(channels=1, size=32, classes=10)
    with pytest.raises(ModelError, match=r"different shapes: conv1\.weight \(64, 3, 7, 7\) instead of \(64, 1, 7, 7\)"):
        build(source(path), grey, {})
    torch.save({"conv1.weight": theirs.conv1.weight.detach(), "own": torch.ones(1)}, path)
    with pytest.raises(ModelError, match=r"lacks bn1\.weight, .* more; it has own"):
        build(source(path), TEN, {})


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


def test_nothing_in_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.pth").write_bytes(pickle.dumps(Payload()))
    Path("cut.pth").write_bytes(b"PK\x03\x04")
    for name in ("bad.pth", "cut.pth", "missing.pth"):
        with pytest.raises(ModelError):
            build(source(Path(name)), TEN, {})
    assert not Path("touched").exists()


def test_published_names_that_torchvision_renames(tmp_path):
    """DenseNet's and ViT's files have older names, GoogLeNet's auxiliary heads."""
    cases = {
        "densenet121": lambda n: n.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."),
        "vit_b_32": lambda n: n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."),
        "googlenet": lambda n: n,
    }
    for name, old in cases.items():
        inputs = ImageInputs(channels=3, size=32, classes=10)
        torch.manual_seed(1)
        wanted = build(find(name), inputs, {})
        state = {old(key): value for key, value in wanted.state_dict().items()}
        if name == "googlenet":
            state |= {"aux1.fc1.weight": torch.ones(2, 2)}
        torch.save(state, tmp_path / "w.pth")
        torch.manual_seed(2)
        mine = build(source(tmp_path / "w.pth", name), inputs, {})
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), wanted.parameters(), strict=True)), name


def test_images_follow_the_weights(tmp_path):
    from zerofit.data.opening import open_data
    from zerofit.spec.events import Reporter

    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.25], "size": {"height": 16, "width": 16}}))
    run = Run(model="lenet", data="digits", pretrained=tmp_path, random_erasing=0.1)
    mine, plain = (open_data(one, "image", None, Reporter()) for one in (run, Run(model="lenet", data="digits")))
    assert (mine.inputs.size, mine.inputs.mean, plain.inputs.size) == (16, (0.5,), 8)
    small = open_data(run.model_copy(update={"image_size": 8}), "image", None, Reporter())
    pixels = torch.from_numpy(plain.valid.pixels[:2]).float()  # 0..16
    batch = small.valid.batch([0, 1], [0, 1])["inputs"]
    torch.testing.assert_close(batch, (pixels / 16 - 0.5) / 0.25)
