"""Document 003: its commands are read as its trainings are meant, and a training leaves its row and its drawing."""

from __future__ import annotations

import shlex

import pytest

from benchmarks.documents import shared_models
from benchmarks.documents.document import DocumentRun, entries, result_store
from benchmarks.documents.shared_models import drawing, train_all, trained
from zerofit.app.comparing.laboratory import flags
from zerofit.app.training.result import TrainingResult
from zerofit.cli.options import given
from zerofit.cli.train import train
from zerofit.spec.errors import Problem, RunFailed
from zerofit.spec.run import Run, load_run

TRAININGS = entries()["003"]["trainings"]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_command_on_the_page_is_the_training(name):
    words = shlex.split(shlex.join(flags(TRAININGS[name])))
    options = given(train.make_context("train", words).params)
    fields = {key: value for key, value in options.items() if key in Run.model_fields}
    assert load_run(None, {"model": options["target"], **fields}).run == Run(**TRAININGS[name])


def test_one_that_fails_is_a_reason_and_is_tried_again(tmp_path, monkeypatch):
    def fails(document, name):
        if name == "VGG":
            raise RunFailed(Problem(kind="out-of-memory", message="rank 0: out of memory", hint=""))
        return {"steps": 1}

    document = DocumentRun("003", result_store(tmp_path / "documents"))
    monkeypatch.setattr(shared_models, "trained", fails)
    kept, missing = train_all(document)
    assert [*kept] == ["Transformer", "BERT", "ResNet", "GAN"] and missing == ["VGG: rank 0: out of memory"]
    monkeypatch.setattr(shared_models, "trained", lambda document, name: {"steps": 2})
    kept, missing = train_all(document)
    assert {name: row["steps"] for name, row in kept.items()} == {name: 1 + (name == "VGG") for name in TRAININGS}
    assert not missing


def test_a_gan_leaves_a_row_and_a_drawing(tmp_path, monkeypatch, pools):
    def on_waiting_ranks(run):
        done = pools(2).train(**run.model_dump(exclude_unset=True, exclude={"ranks"}))
        return TrainingResult.of(done.folder, done.result)

    monkeypatch.setattr(shared_models, "train", on_waiting_ranks)
    short = {**TRAININGS["GAN"], "model_args": {"width": 4}, "steps": 3}
    monkeypatch.setitem(TRAININGS, "GAN", {key: value for key, value in short.items() if key != "epochs"})
    document = DocumentRun("003", result_store(tmp_path / "documents"))
    row = trained(document, "GAN")
    assert row["steps"] == 3 and row["loss_before"] > 0 and row["seconds"] > 0
    # 100 numbers to 4 maps of 4x4 with batch norm, to 1 image; mirrored: 1 image to 4 maps of 4x4, to 1 number
    assert row["parameters"] == (100 * 4 * 16 + 2 * 4 + 4 * 16) + (16 * 4 + 4 * 16)
    assert drawing(document).read_bytes().startswith(b"\x89PNG") and not (document.folder / "rows" / "003-GAN").exists()
