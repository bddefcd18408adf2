"""`zerofit plan --serve` on the command line: the answer, its exit code, and bad input."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from zerofit.cli.main import main


def run(*args: str) -> tuple[int, dict]:
    done = CliRunner().invoke(main, ["plan", *args, "--serve", "--json"])
    return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])


def test_a_model_that_fits():
    code, found = run("llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "2", "--rollout", "max_model_len=8192")
    assert code == 0 and found["fits"] and found["copies"] == 2 and found["problem"] is None
    assert sum(found["breakdown"].values()) == found["requested_bytes"]
    assert found["blocks"] * 16 == found["cache_tokens"]


def test_a_model_that_does_not_fit_names_what_would():
    code, found = run("qwen3-8b", "--gpu", "l4", "--gpus", "1")
    assert code == 1 and "one request of 40,960 tokens" in found["problem"]
    (length,) = (int(r.split("=")[1]) for r in found["remedies"] if r.startswith("max_model_len"))
    assert length == found["longest"]
    assert run("qwen3-8b", "--gpu", "l4", "--gpus", "1", "--rollout", f"max_model_len={length}")[0] == 0


def test_the_answer_names_what_is_assumed_of_weights_and_images():
    args = ["--gpu", "h100-80gb", "--gpus", "1", "--serve"]
    texts = [
        " ".join(CliRunner().invoke(main, ["plan", m, *args]).output.split()) for m in ("gpt-oss-20b", "qwen2-vl-7b")
    ]
    assert "weights in mxfp4 as published" in texts[0] and "image encoder" not in texts[0]
    assert "without the activations of the image encoder" in texts[1]


@pytest.mark.parametrize(
    ("args", "where"),
    [
        (["gpt2", "--gpu", "l4", "--micro-batch", "2"], "--micro-batch"),
        (["gpt2", "--gpu", "l4", "--gpus", "3", "--tensor-parallel", "2"], "--rollout"),
        (["gpt2", "--gpu", "l4", "--rollout", "max_model_len=2048"], "--rollout"),
        (["resnet50", "--gpu", "l4"], "MODEL"),
        (["--gpu", "l4"], "MODEL"),
        (["gpt2", "--gpu", "cpu"], "--gpu"),
    ],
)
def test_bad_input(args, where):
    code, found = run(*args)
    assert code == 2 and found["error"]["where"] == where
