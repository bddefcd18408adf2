from __future__ import annotations

import numpy as np
import pytest

from zerofit.data.loader import Order


def test_each_epoch_is_a_permutation_and_they_differ():
    order = Order(101, seed=5)
    epochs = [order.indices(e * 101, (e + 1) * 101) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert len({tuple(e) for e in epochs}) == 4


@pytest.mark.parametrize("step", [1, 7, 101, 250])
def test_any_cut_of_the_stream_gives_the_same_stream(step):
    order = Order(101, seed=5)
    whole = order.indices(0, 500)
    cut = np.concatenate([order.indices(p, min(p + step, 500)) for p in range(0, 500, step)])
    assert (whole == cut).all()
    keys = np.concatenate([order.keys(p, min(p + step, 500)) for p in range(0, 500, step)])
    assert (order.keys(0, 500) == keys).all()


def test_ranks_together_take_what_one_rank_takes():
    order, dp, micro = Order(64, seed=1), 4, 3
    ranks = [order.indices((k * dp + r) * micro, (k * dp + r + 1) * micro) for k in range(10) for r in range(dp)]
    assert (np.concatenate(ranks) == order.indices(0, 10 * dp * micro)).all()


def test_seed_matters_and_nothing_else():
    assert (Order(50, 3).indices(0, 50) == Order(50, 3).indices(0, 50)).all()
    assert (Order(50, 3).indices(0, 50) != Order(50, 4).indices(0, 50)).any()
    assert (Order(50, 3).keys(0, 50) != Order(50, 4).keys(0, 50)).all()


def test_keys_are_distinct_and_fit_a_torch_seed():
    keys = Order(10, seed=0).keys(0, 10_000)
    assert keys.dtype == np.int64 and keys.min() >= 0 and len(set(keys.tolist())) == 10_000


def test_an_empty_range():
    assert Order(5, 0).indices(3, 3).tolist() == []
