"""Options that have no effect in a run are named."""

from __future__ import annotations

import pytest

from zerofit.app.job.resolve import resolve_job
from zerofit.spec.events import Event, Reporter
from zerofit.spec.run import Run, RunRequest

MLP = {"model": "mlp", "data": "digits", "steps": 1, "ranks": 1, "micro_batch": 2}
GPT2 = {"model": "gpt2", "model_args": {"n_layer": 1}, "seq_len": 16, "steps": 1, "ranks": 1, "micro_batch": 2}


@pytest.mark.parametrize(
    ("run", "unread"),
    [
        (MLP | {"image_size": 8, "min_lr": 1e-5, "schedule": "cosine"}, set()),
        (MLP | {"min_lr": 1e-5, "schedule": "constant", "label_field": "y"}, {"min_lr", "label_field"}),
        (
            GPT2 | {"image_size": 8, "text_field": "body", "profile_ranks": "0"},
            {"image_size", "text_field", "profile_ranks"},
        ),
    ],
)
def test_an_option_without_effect_is_named(run, unread):
    events = list[Event]()
    resolve_job(RunRequest.of(Run(**run)), report=Reporter(events.append))
    assert {e.data["where"] for e in events if e.kind == "warning" and "has no effect" in e.text} == unread
