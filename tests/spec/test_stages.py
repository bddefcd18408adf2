"""Where pipelines are cut, against DeepSpeed's own partition of layers, and what each stage holds."""

from __future__ import annotations

import random

import pytest
from deepspeed.runtime.utils import partition_balanced

from zerofit.config.validate import most_stages
from zerofit.spec.model_facts import LayerFacts
from zerofit.spec.run import Run
from zerofit.spec.run_folder import Layout
from zerofit.spec.stages import balanced, cut_layers, stage_layers

STACK = [
    LayerFacts(name="embedding", parameters=50, trained=50, tied="embedding"),
    *(LayerFacts(name=f"block.{n}", parameters=20, trained=20) for n in range(4)),
    LayerFacts(name="head", parameters=50, trained=50, tied="embedding"),
]


@pytest.mark.parametrize("kind", ["parameters", "seconds", "equal"])
def test_layers_are_cut_as_deepspeed_cuts_them(kind):
    chance = random.Random(kind)
    draw = {"parameters": lambda: chance.randrange(10**6), "seconds": chance.random, "equal": lambda: 7}[kind]
    for _ in range(60):
        weights = [draw() for _ in range(chance.randrange(2, 24))]
        for parts in {1, 2, len(weights), chance.randrange(1, len(weights) + 1)}:
            bounds = balanced(tuple(weights), parts)
            assert [0, *(last for _, last in bounds)] == partition_balanced(weights, parts)


def test_every_part_trains_something():
    assert cut_layers([90, 5, 5], [0, 5, 5], 2) == ((0, 2), (2, 3))  # by weight: the first layer alone


def test_a_shared_weight_counts_once_in_each_stage_that_holds_it():
    layout = Layout(dp=2, pp=2, tp=2)
    first, last = stage_layers(STACK, ((0, 3), (3, 6)), layout, "1f1b")
    assert (first.parameters, last.parameters) == (90, 90)
    assert (first.ranks, last.ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.parts == (("embedding", "block.0", "block.1"),)
    outer, inner = stage_layers(STACK, ((0, 1), (1, 3), (3, 5), (5, 6)), layout, "dualpipev")
    assert (outer.parameters, inner.parameters) == (50, 80)
    assert outer.parts == (("embedding",), ("head",))


@pytest.mark.parametrize(
    ("ranks", "layers", "fields", "stages"),
    [
        (1, 5, {}, 1),
        (4, 5, {}, 4),
        (8, 5, {}, 4),  # and two data parallel ranks
        (7, 5, {}, 1),
        (6, 5, {"tensor_parallel": 2}, 3),
        (8, 12, {"tensor_parallel": 2, "sequence_parallel": 2}, 2),
        (4, 5, {"pipeline_schedule": "dualpipev"}, 2),  # two layers a stage at least
        (8, None, {}, 8),
    ],
)
def test_auto_takes_all_ranks_that_the_layers_are_enough_for(ranks, layers, fields, stages):
    assert most_stages(Run(pipeline="auto", **fields), ranks, layers) == stages
