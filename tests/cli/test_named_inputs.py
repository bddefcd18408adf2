"""Models that are fed several tensors by name, as commands take and refuse them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.cli.asking import answer
from tests.models.small import NAMED
from zerofit.models.build import build, parameter_count
from zerofit.models.catalog import find

L4 = ["--gpus", "2", "--gpu", "l4"]


def refused(*args: object) -> str:
    found = answer(*args, code=2)
    return " ".join(problem["message"] for problem in found.get("errors") or [found["error"]])


def small(name: str, **more: object) -> list[object]:
    return [name, "--model-args", json.dumps({**NAMED[name], **more})]


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory) -> Path:
    """A training of CLIP of two steps on made-up images and texts."""
    more = {"data": "synthetic", "seq_len": 8, "micro_batch": 4, "steps": 2, "eval_samples": 8, "ds_config": "zero3"}
    name = "clip-vit-base-patch32"
    return (
        pools(2).train(tmp_path_factory.mktemp("run") / "run", model=name, model_args=NAMED[name], **more).folder.path
    )


def test_made_up_tensors_train_a_model(run):
    """A loss over four pairs, of weights that know nothing: about ln 4."""
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert losses and all(abs(loss - math.log(4)) < 2 for loss in losses)


def test_a_trained_model_is_not_fed_by_commands_that_want_logits(run):
    assert "image-text-pairs" in refused("eval", run / "model")
    assert "image-text-pairs" in refused("generate", run / "model", "--prompt", "a")


def test_what_is_refused():
    assert "synthetic tensors only" in refused("train", "whisper-tiny", "--data", "pysource", "--ranks", 1)
    assert "has no labeled text" in refused("train", "t5-small", "--data", "pysource", "--ranks", 1)
    assert "computes its own loss" in refused("compare", "strategies", "t5-small", "--ranks", 1, "--output", "out")
    assert "has no input frames" in refused("simulate", "t5-small", "--input", "frames:300", *L4)
    assert "decoder:x" in refused("simulate", "t5-small", "--input", "decoder:x", *L4)
    too_short = refused("plan", "llava-1.5-7b", "--seq-len", 256, *L4)
    assert "an image needs 576 tokens, but a sample has only 256" in too_short
    assert "cannot be split into pipeline stages" in refused("simulate", *small("t5-small"), "--pipeline", 2, *L4)


@pytest.mark.parametrize("name", ["t5-small", "llava-1.5-7b", "mamba-130m"])
def test_a_plan_has_no_pipelines_and_says_why(name, cache):
    found = answer("plan", *small(name), "--seq-len", 16, *L4, "--top", 100)
    assert found["layouts"] and {layout["pp"] for layout in found["layouts"]} == {1}
    assert found["parameters"] == parameter_count(build(find(name), None, NAMED[name]))
    assert "cut into stages" in refused("plan", *small(name), "--seq-len", 16, *L4, "--pipeline", 2)
