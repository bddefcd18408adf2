"""The tokenizer of a run that names none: that of the folder its weights or its config are from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.chats import write_tokenizer
from zerofit.app.job.resolve import resolve_job
from zerofit.models.inputs import TextInputs
from zerofit.spec.errors import UserError
from zerofit.spec.run import load_run

SHAPE: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 400,
    "n_positions": 64,
    "bos_token_id": 0,
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    GPT2LMHeadModel(GPT2Config(**SHAPE, eos_token_id=0)).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 300)
    return tmp_path / "model"


def settled(folder, **flags):
    text = next(place / "a.txt" for place in folder.parents if (place / "a.txt").is_file())
    resolved = resolve_job(load_run(None, {"data": f"text:{text}", "seq_len": 32, "model": str(folder), **flags}))
    assert isinstance(resolved.inputs, TextInputs)
    return resolved.job.run.tokenizer, resolved.inputs.vocab_size


def test_weights_are_not_trained_on_ids_of_another_vocabulary(model):
    preset = {"model": "gpt2", "model_args": {"n_layer": 1, "n_embd": 8, "n_head": 2}, "pretrained": model}
    for flags in ({}, preset):
        with pytest.raises(UserError, match="no tokenizer files") as caught:
            settled(model, **flags)
        assert [(one.kind, "--tokenizer bytes" in one.hint) for one in caught.value.problems] == [("tokenizer", True)]
    assert settled(model, tokenizer="bytes") == ("bytes", 260)
    assert settled(model / "config.json") == ("bytes", 260)  # from scratch
    (model / "zerofit.json").write_text('{"tokenizer": "bytes"}')
    assert settled(model) == (str(model), 260)
    (model / "zerofit.json").unlink()
    write_tokenizer(model)
    for place in (model, model / "config.json"):
        name, size = settled(place)
        assert name == str(model) and 260 < size <= 400
