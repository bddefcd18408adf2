from __future__ import annotations

import numpy as np
import torch

from zerofit.data.loader import eval_batch_count, eval_batches, eval_indices


def test_images_each_once_and_a_limit_is_spread(opened):
    valid = opened("image", data="digits").valid
    for limit, dp, micro in ((None, 3, 16), (100, 4, 8), (3, 4, 2), (10_000, 2, 64)):
        batches = [b for r in range(dp) for b in eval_batches(valid, r, dp, micro, limit)]
        assert len(batches) == dp * eval_batch_count(len(valid), dp, micro, limit)
        seen = np.concatenate([b["indices"][b["real"]] for b in batches])
        assert sorted(seen) == eval_indices(len(valid), limit).tolist()
        for batch in batches:
            assert ((batch["labels"] != -100).numpy() == batch["real"]).all()
        assert valid.targets(eval_indices(len(valid), limit)) == len(seen) == min(limit or 359, 359)
    assert eval_indices(1000, 4).tolist() == [0, 250, 500, 750]


def test_masked_evaluation_is_the_same_each_time_and_on_any_layout(opened):
    valid = opened("masked-lm", 32, data="synthetic").valid
    one = {i: row for b in eval_batches(valid, 0, 1, 8, 40) for i, row in _rows(b)}
    four = {i: row for r in range(4) for b in eval_batches(valid, r, 4, 3, 40) for i, row in _rows(b)}
    assert one.keys() == four.keys() and len(one) == 40
    assert all(torch.equal(one[i], four[i]) for i in one)


def _rows(batch):
    return [
        (i, row) for i, row, real in zip(batch["indices"].tolist(), batch["inputs"], batch["real"], strict=True) if real
    ]
