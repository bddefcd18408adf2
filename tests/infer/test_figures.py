"""Figures of all kinds of models, held against plain torch; memory that was forecast, against memory that is taken."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.infer import own
from tests.infer.small import CPU, SAMPLES, data_of, figures, loaded, save, save_small
from tests.models.small import IMAGES, TEXT, TRANSFORMERS
from zerofit.checkpoint.model_folder import ModelInfo
from zerofit.data.loader import eval_batches
from zerofit.infer.evaluate import EvalFigures, EvalSamples, cross_entropy_counts, evaluate, figures_of, working_bytes
from zerofit.infer.saved_model import open_saved
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import ImageInputs
from zerofit.spec.errors import RunFailed, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run


def test_pieces_of_logits_count_as_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 7, 11, generator=generator), torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, :3] = -100
    whole = cross_entropy_counts(logits, labels, 5)
    monkeypatch.setattr("zerofit.infer.evaluate.CHUNK_BYTES", 4 * 11 * 4)
    torch.testing.assert_close(cross_entropy_counts(logits, labels, 5), whole)
    flat, wanted = logits.flatten(0, 1)[3:].double(), labels.flatten()[3:]
    near = (flat.topk(5).indices == wanted[:, None]).any(1).sum()
    right = (flat.argmax(1) == wanted).sum()
    loss = functional.cross_entropy(flat, wanted, reduction="sum")
    assert whole.tolist() == pytest.approx([loss.item(), 18, right.item(), near.item()])


def test_fewer_than_five_classes():
    counts = cross_entropy_counts(torch.eye(3), torch.tensor([0, 1, 0]), 5)
    assert counts.tolist()[1:] == [3, 2, 3]


def test_a_model_that_gives_its_own_loss(tmp_path):
    model = own.Writer()
    run = Run(model="tests.infer.own:Writer", data="synthetic:90", seq_len=TEXT.seq_len)
    (tmp_path / "model").mkdir()
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
    ModelInfo.of_run(run, "causal-lm", TEXT, 1, "float32").write(tmp_path / "model")
    mine, _ = loaded(tmp_path / "model", 0.0, tmp_path)
    got = figures(tmp_path / "model", mine)
    (batch,) = eval_batches(
        data_of(open_saved(tmp_path / "model", trust_model_code=True)).valid, 0, 1, SAMPLES, SAMPLES
    )
    x = batch["inputs"]
    logits = model(x)["logits"][:, :-1]
    wanted = functional.cross_entropy(logits.flatten(0, 1).double(), x[:, 1:].flatten())
    assert got["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert got["accuracy"] is got["top5_accuracy"] is None


def test_squared_errors(tmp_path):
    model = save(tmp_path / "model", "tests.infer.own:Scale")
    saved = open_saved(tmp_path / "model", trust_model_code=True)
    data = data_of(saved)
    judged = EvalFigures(task="image", dtype=torch.float32, own=True, loss="mse")
    got = vars(evaluate(model, judged, data, EvalSamples(at_once=8, limit=SAMPLES), CPU, Reporter()))
    (batch,) = eval_batches(data.valid, 0, 1, SAMPLES, SAMPLES)
    wanted = functional.mse_loss(model(batch["inputs"]), batch["labels"].float())
    assert got["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert got["accuracy"] is None


def test_a_loss_that_is_not_finite(tmp_path):
    model = save(tmp_path / "model", "lenet")
    saved = open_saved(tmp_path / "model", trust_model_code=True)
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(RunFailed, match="the loss is nan"):
        evaluate(
            model,
            figures_of(saved, model, torch.float32),
            data_of(saved),
            EvalSamples(at_once=8, limit=8),
            CPU,
            Reporter(),
        )


def test_working_memory_is_what_a_hand_count_says():
    """A linear layer on flattened images: the batch, its output, and what the loss makes of that."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 4096))
    inputs = ImageInputs(channels=3, size=32, classes=4096)
    judged = EvalFigures(task="image", dtype=torch.float32)
    got = working_bytes(model, judged, inputs, 16, "cpu", "it")
    batch, logits, labels = 4 * 16 * 3072, 4 * 16 * 4096, 8 * 16
    log_softmax = logits
    assert got == pytest.approx(batch + logits + log_softmax + labels, rel=0.01)


@pytest.mark.parametrize("key", ["mixtral", "vit"])
def test_working_memory_grows_with_the_batch(key):
    name, args = TRANSFORMERS[key]
    source = find(name)
    inputs = IMAGES if source.task == "image" else TEXT
    with torch.device("meta"):
        model = build(source, inputs, args).eval()
    judged = EvalFigures(task=source.task, dtype=torch.float32)
    four, eight = (working_bytes(model, judged, inputs, micro, "cpu", key) for micro in (4, 8))
    assert 1.7 < eight / four < 2.05
    assert four > 4 * (inputs.seq_len * 100 if source.task != "image" else 3 * 32 * 32) * 4


def test_images_that_a_model_cannot_take(tmp_path):
    save_small(tmp_path / "model", "vit")
    saved = open_saved(tmp_path / "model", trust_model_code=True)
    with torch.device("meta"):
        model = build(saved.source, None, {})
    with pytest.raises(UserError, match="does not support images of 48 pixels"):
        working_bytes(
            model,
            figures_of(saved, model, torch.float32),
            ImageInputs(channels=3, size=48, classes=8),
            2,
            "cpu",
            "the model",
        )
