"""The global batch on fewer ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerofit.config.batch import brief, regroup, shown
from zerofit.spec.run_folder import Batch


def test_three_ranks_become_two():
    ranks, batch = regroup(Batch(micro=8, accumulation=2, dp=3), 1, 2)
    assert (ranks, batch.micro, batch.accumulation, batch.dp) == (2, 8, 3, 2)
    assert shown(batch) == "2 data parallel ranks x micro batch 8 x 3 accumulation steps = 48 samples per step"
    assert brief(batch) == "micro batch 8 x 3, 48 samples per step"


def test_a_batch_that_cannot_be_shared_leaves_ranks_out():
    ranks, batch = regroup(Batch(micro=1, accumulation=1, dp=32), 1, 31)
    assert (ranks, batch.accumulation) == (16, 2)
    assert regroup(Batch(micro=1, accumulation=1, dp=4), 8, 7) is None


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 17), st.sampled_from([1, 2, 4]), st.integers(1, 64))
def test_the_global_batch_stays_and_the_micro_batch_does_not_grow(micro, accumulation, dp, inner, ranks):
    before = Batch(micro=micro, accumulation=accumulation, dp=dp)
    found = regroup(before, inner, ranks)
    if ranks < inner:
        assert found is None
        return
    taken, batch = found
    assert batch.total == before.total
    assert batch.micro <= before.micro
    assert taken == batch.dp * inner <= ranks
    assert not any(before.total % more == 0 for more in range(batch.dp + 1, ranks // inner + 1))
