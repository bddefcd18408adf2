"""Flags of `zerofit plan` that do not go together, and what it leaves to be filled in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cli.asking import answer
from tests.plan.stub import make_profile
from zerofit.app.planning.output_files import data_line


def refused(*args: object) -> list[dict]:
    found = answer("plan", *args, code=2)
    return found.get("errors") or [found["error"]]


def test_flags_are_looked_at_together():
    wrong = refused("gpt2", "--gpus", -1, "--seq-len", 5000, "--global-batch", 7, "--micro-batch", 0)
    assert {p["where"] for p in wrong} == {"--gpus", "--seq-len", "--micro-batch"}
    wrong = refused("gpt2", "--gpus", -1, "--global-batch", 7, "--micro-batch", 2)
    assert [p["kind"] for p in wrong] == ["batch-size", "bad-value"]


def test_a_run_is_no_model():
    (wrong,) = refused("run.yaml", "--gpu", "t4")
    assert "zerofit simulate run.yaml" in wrong["hint"] and wrong["where"] == "MODEL"


def test_images_have_no_tokens():
    assert refused("lenet", "--seq-len", 128, "--gpu", "t4")[0]["where"] == "--seq-len"


def test_the_data_to_fill_in_is_named_with_its_size():
    profile = make_profile(blocks=1)
    assert "text:" in data_line(profile, None)
    line = data_line(replace(profile, task="image"), "image:5x64x64")
    assert line.startswith("# ") and "5x64x64 images; default: digits" in line


def test_degrees_are_refused_before_the_model_is_traced(monkeypatch):
    monkeypatch.setattr("zerofit.app.planning.search_setup.get_profile", None)
    (wrong,) = refused("gpt2", "--gpu", "l4", "--gpus", 3, "--pipeline", 2)
    assert wrong["kind"] == "degree-ranks" and wrong["where"] == "--pipeline"


def test_a_flag_that_the_answer_does_not_read_is_refused(tmp_path):
    def unread(*args: object) -> set[str]:
        return {p["where"] for p in refused("gpt2", "--gpu", "l4", "--gpus", 1, *args)}

    assert unread("--rollout", "max_model_len=64") == {"--rollout"}
    ignored = "--write", tmp_path / "new", "--max", "seq-len", "--confirm", 3
    assert unread("--serve", *ignored) == {"--write", "--max", "--confirm"}
    assert unread("--method", "grpo", "--trace", tmp_path / "t.json", "--tokens", "1B") == {"--trace", "--tokens"}
    assert unread("--methods", "full,lora", "--html", tmp_path / "page.html", "--max", "seq-len") == {"--html", "--max"}


@pytest.mark.parametrize(
    ("option", "names", "known"),
    [
        ("--methods", "full,prefix", "full, lora, qlora"),
        ("--columns", "MFU,speed", "MFU"),
        ("--engine", "fsdp3", "deepspeed"),
    ],
)
def test_unknown_names_are_refused_with_those_that_there_are(option, names, known):
    (wrong,) = refused("gpt2", "--gpu", "l4", option, names)
    assert (wrong["kind"], wrong["where"]) == ("usage", option)
    assert f"{names.rpartition(',')[2]!r}; there are: " in wrong["message"] and known in wrong["message"]
