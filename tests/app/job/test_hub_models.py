"""hub:ORG/NAME without a network: what the hub's cache has, or what to do about it."""

from __future__ import annotations

import json

import pytest

from zerofit.app.job.hub_models import with_local_model, with_shape
from zerofit.spec.errors import UserError
from zerofit.spec.events import Reporter
from zerofit.spec.run import Run, RunRequest

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which is not reachable."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def asked(model: str) -> RunRequest:
    return with_local_model(RunRequest.of(Run(model=model)), Reporter())


def test_a_snapshot_of_the_cache_is_a_folder(cache):
    there = cache / "models--some--bert"
    snapshot = there / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        asked("hub:some/bert")
    assert "lacks model-00002-of-00002.safetensors" in caught.value.problems[0].message
    (snapshot / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert asked("hub:some/bert").run.model == str(snapshot)
    assert asked(f"hub:some/bert@{COMMIT}").run.model == str(snapshot)


def test_what_is_not_in_the_cache_says_where_it_would_be(cache):
    with pytest.raises(UserError) as caught:
        asked("hub:some/other")
    problem = caught.value.problems[0]
    assert problem.kind == "hub-model" and str(cache) in problem.hint and "hf download some/other" in problem.hint
    assert asked("llama-tiny").run.model == "llama-tiny"


def test_another_spelling_of_a_preset_is_taken_with_a_note():
    notes = []
    for shape_only, name, taken in (
        (False, "llama3-8b", "llama-3-8b"),
        (True, "unsloth/Qwen3-8B-bnb-4bit", "qwen3-8b"),
        (False, "my.package:model", "my.package:model"),
        (False, "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),  # to train it, its weights are needed
    ):
        resolve = with_shape if shape_only else with_local_model
        resolved = resolve(RunRequest.of(Run(model=name)), Reporter(lambda event: notes.append(event.text)))
        assert resolved.run.model == taken
    assert [note.partition(";")[0] for note in notes] == [
        "using llama-3-8b for llama3-8b",
        "using qwen3-8b for unsloth/Qwen3-8B-bnb-4bit",
    ]
