"""Memory that grows in every step is noticed, with the line whose tensors stay."""

from __future__ import annotations

import inspect

from tests.train.own_models import Hoarding
from zerofit.spec.files import read_jsonl


def warnings(trained) -> list[str]:
    return [row["text"] for row in read_jsonl(trained.folder.events) if row["event"] == "warning"]


def test_the_line_of_a_leak_is_named(pools, tmp_path):
    how = {"data": "digits", "steps": 20, "micro_batch": 2, "ds_config": "zero2"}
    trained = pools(2).train(tmp_path / "run", model="tests.train.own_models:Hoarding", **how)
    (text,) = [text for text in warnings(trained) if "memory grows" in text]
    lines, first = inspect.getsourcelines(Hoarding.forward)
    made = first + next(n for n, line in enumerate(lines) if "repeat" in line)
    assert text.endswith(f"tests/train/own_models.py:{made} (32.2 MiB per step)")


def test_a_healthy_run_gets_no_word(pools, tmp_path):
    trained = pools(2).train(tmp_path / "run", model="lenet", data="digits", steps=60, micro_batch=8, ds_config="zero2")
    assert not [text for text in warnings(trained) if "memory grows" in text]
