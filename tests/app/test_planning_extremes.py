"""Plans at the ends: one token and a million, a vocabulary of one word, one sample."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import zerofit as zf
from zerofit.app.planning.largest_fit import maximum_of
from zerofit.app.planning.plan import PlannedRun
from zerofit.app.planning.request import PlanningRequest
from zerofit.app.planning.search_setup import forecast_of, setup_of
from zerofit.plan.search import pressure
from zerofit.spec.events import Reporter
from zerofit.spec.profile import OFFERED

LENGTHS = (1, 2, 64, 4096, 2**20)
CLUSTER = zf.Cluster("h100-80gb", gpus=2)


def planned(seq_len: int = 64, vocab: int = 64, batch: int = 2, **work: object) -> PlannedRun:
    """The plan of ZeRO 1 without overlap, whether it fits or not."""
    sizes = {"vocab_size": vocab, "max_position_embeddings": 2**20, "eos_token_id": 0, "bos_token_id": 0}
    pins = {"zero_stage": 1, "tensor_parallel": 1, "activation_checkpointing": False, "overlap_comm": False}
    batches = {"micro_batch": batch // 2, "global_batch": batch}
    found = zf.plan("llama-tiny", CLUSTER, model_args=sizes, seq_len=seq_len, **batches, **pins, **work)
    (one,) = (*found.layouts, *found.misfits)
    return one


def is_sane(one: PlannedRun) -> bool:
    figures = [one.step_s, one.peak_bytes, one.samples_per_s, one.mfu, one.tokens_per_s]
    figures += [one.fit.margin_bytes, *one.memory.breakdown.values()]
    return all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in figures) and one.mfu < 1


def test_from_one_token_to_a_million():
    found = [planned(seq_len=length) for length in LENGTHS]
    assert all(map(is_sane, found))
    # speeds have three digits, which is all that sets one and two tokens apart
    assert all(a.step_s <= 1.005 * b.step_s for a, b in itertools.pairwise(found))
    assert all(a.peak_bytes <= b.peak_bytes for a, b in itertools.pairwise(found))
    assert found[-1].step_s > 100 * found[0].step_s and found[-1].peak_bytes > 100 * found[0].peak_bytes


def test_vocabularies_from_one_word_on():
    found = [planned(vocab=size) for size in (1, 2, 1000, 250_000)]
    assert all(map(is_sane, found))
    assert all(a.step_s <= 1.005 * b.step_s for a, b in itertools.pairwise(found))
    assert all(a.peak_bytes < b.peak_bytes for a, b in itertools.pairwise(found))


def test_batches_from_one_sample_a_rank_on():
    found = [planned(batch=size) for size in (2, 4, 2**10, 2**16)]
    assert all(map(is_sane, found))
    pairs = list(itertools.pairwise(found))
    assert all(a.step_s <= 1.005 * b.step_s and a.samples_per_s < b.samples_per_s for a, b in pairs)


@pytest.mark.slow
def test_what_makes_longer_sequences_fit_is_said_in_order():
    """A large vocabulary on one device: the logits first, then what blocks keep."""
    cluster = zf.Cluster("h100-80gb", gpus=1)
    sizes = {"vocab_size": 128_000, "max_position_embeddings": 2**20, "eos_token_id": 0, "bos_token_id": 0}
    request = PlanningRequest(model="llama-tiny", pins={"model_args": sizes, "precision": "bf16"}, maximum="seq-len")
    setup, _ = setup_of(cluster, request, Reporter(None))
    _, found = maximum_of(setup, cluster, "seq-len", Reporter(None))
    assert found.value is not None and not found.bounded
    first, *others = found.longer
    assert first.savings.fields == {"loss_chunk": OFFERED.loss_chunk} and first.value > 2 * found.value
    lengths = [found.value, *(one.value for one in found.longer)]
    assert lengths == sorted(set(lengths)) and found.to_dict()["longer"][0]["loss_chunk"] == OFFERED.loss_chunk
    for before, after in itertools.pairwise(found.longer):
        assert after.savings.fields.items() > before.savings.fields.items()
    best = found.longer[-1]
    longest = replace(request, pins={**request.pins, "seq_len": best.value, **best.savings.fields})
    assert len(others) <= 2 and fits(longest, cluster)
    assert not fits(replace(longest, pins={**request.pins, "seq_len": 2 * found.value}), cluster)


def fits(request: PlanningRequest, cluster: zf.Cluster) -> bool:
    setup, _ = setup_of(cluster, replace(request, maximum=None), Reporter(None))
    wanted = replace(setup.request, micro_batch=1)
    return pressure(setup.profile, cluster, wanted, forecast_of(setup.profile, cluster)) <= 1


def test_all_ends_at_once_and_the_shortest_training():
    one = planned(seq_len=1, vocab=1, batch=2, tokens=1, price=1e-6, mtbf=1)
    assert is_sane(one) and one.outlook is not None and one.outlook.steps == 1
    assert one.outlook.hours is not None and 0 < one.outlook.hours < 1 and one.outlook.cost > 0
    longest = planned(seq_len=1, vocab=1, batch=2, tokens="1e20", mtbf=1e9)
    assert longest.outlook is not None and math.isfinite(longest.outlook.hours)


@pytest.mark.parametrize("image", ["image:1x28x28", "image:1x32x32"])
def test_one_image(image):
    found = zf.plan("lenet", zf.Cluster("t4", gpus=1), image=image, global_batch=1, zero_stage=0)
    one = found.layouts[0]
    assert math.isfinite(one.step_s) and 0 < one.step_s < 1 and one.peak_bytes > 0
