"""The cause of a loss that is not finite, from what ranks found."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.explain.not_finite import cause_of

FACTS = {"shape": [4, 10], "dtype": "float32", "low": 0.0, "high": 1.0, "bad": 0, "zeros": 3}
ORIGIN: dict[str, Any] = {
    "op": "log",
    "phase": "forward",
    "module": "head",
    "line": "model.py:7",
    "inputs": [FACTS],
    "output": FACTS | {"bad": 3},
    "depends": ["inputs", "weights"],
    "micro": 0,
    "rows": [1],
    "wide": None,
    "tensor": "",
    "samples": [17],
    "of_samples": 4,
}
RANK: dict[str, Any] = {"rank": 0, "weights": [], "sizes": [0.1, 0.1], "done": 4}
STOPPED = RANK | {"step": 5, "stopped": "the loss of step 5 is nan", "batch": [], "lr": 0.1}
HALF = FACTS | {"dtype": "float16"}
BAD = {"name": "head.weight", "kind": "weight", "bad": 1, "of": 320}


@pytest.mark.parametrize(
    ("rank", "losses", "cause", "words"),
    [
        (RANK, [2.3, 2.2], "unknown", "up to step 4 are finite"),
        (RANK, [2.3, 2.2, 9.0], "learning-rate", "rose from 2.2 to 9"),
        (RANK | {"weights": [BAD]}, [], "bad-weights", "1 of 320 numbers of the weight head.weight"),
        (RANK | {"weights": [BAD], "step": 5}, [], "learning-rate", "the update of step 5 was too large"),
        (RANK | {"apart": ["head.bias"], "step": 5}, [], "collective", "the first is head.bias"),
        (STOPPED, [], "collective", "exchange between ranks failed"),
        (STOPPED | {"sizes": [0.1, 1e5]}, [], "learning-rate", "weights grew by a factor of 1e+06"),
        (STOPPED | {"loss_scale": 1024.0}, [], "loss-scale", "overflows at scale 1024"),
        (STOPPED | {"origin": ORIGIN}, [2.3, 2.2], "operation", "A log of zero in head (forward)"),
        (STOPPED | {"origin": ORIGIN}, [2.3, 99.0], "learning-rate", "rose from 2.3 to 99"),
        (STOPPED | {"origin": ORIGIN, "sizes": [0.1, 5.0]}, [], "learning-rate", "weights grew by a factor of 50"),
        (STOPPED | {"origin": ORIGIN | {"depends": ["labels"]}}, [], "sample", "label of sample 17"),
        (STOPPED | {"origin": ORIGIN | {"depends": ["inputs"]}}, [], "sample", "Sample 17"),
        (STOPPED | {"origin": ORIGIN | {"wide": 1e5, "output": HALF}}, [], "fp16-overflow", "1e+05 in float32"),
        (
            STOPPED | {"loss_scale": 4096.0, "origin": ORIGIN | {"wide": 1e5, "output": HALF, "phase": "backward"}},
            [],
            "loss-scale",
            "the gradient 24.4, multiplied by the loss scale 4096,",
        ),
        (
            STOPPED | {"batch": [{"sample": 9, "tensor": "labels", "why": "not in 0 to 9", "values": FACTS}]},
            [],
            "sample",
            "Sample 9 of the training data",
        ),
    ],
)
def test_the_cause_is_named_with_its_figures(rank, losses, cause, words):
    found = cause_of([rank, rank | {"rank": 1}], losses)
    assert found.cause == cause
    assert words.lower() in found.summary.lower()
    assert bool(found.advice) == found.is_known


def test_a_weight_damaged_on_one_rank_is_the_collective():
    apart = {"step": 5, "apart": [BAD["name"]]}
    found = cause_of([RANK | apart, RANK | {"rank": 1, "weights": [BAD]} | apart], [])
    assert (found.cause, found.rank) == ("collective", 1)


def test_a_bad_share_of_a_weight_is_no_damaged_copy():
    """At ZeRO-3, and in a pipeline, only one rank has these numbers."""
    found = cause_of([RANK | {"step": 5}, RANK | {"rank": 1, "weights": [BAD], "step": 5}], [])
    assert (found.cause, found.rank) == ("learning-rate", 1)
