from __future__ import annotations

import numpy as np
import pytest
import torch

from zerofit.data.loader import eval_batches, eval_indices
from zerofit.data.text import CausalText, MaskedText
from zerofit.data.token_cache import TokenFile


@pytest.fixture
def row(tmp_path):
    """1,003 distinct tokens, so that each can be told from the others."""
    tokens = np.arange(1003, dtype=np.uint16)
    tokens.tofile(tmp_path / "row.bin")
    return TokenFile(tmp_path / "row.bin", "uint16")


@pytest.mark.parametrize("seq_len", [1, 8, 167, 334, 1002])
def test_each_token_is_a_label_once(row, seq_len):
    data = CausalText(file=row, tokens=1003, seq_len=seq_len, pad_id=9999)
    batch = data.batch(range(len(data)), range(len(data)))
    real = batch["labels"] != -100
    assert batch["labels"][real].tolist() == list(range(1, 1003))
    assert batch["inputs"][real].tolist() == list(range(1002))
    # what is behind a window's last real input is the row's very last token, then padding
    assert set(batch["inputs"][~real].tolist()) <= {1002, 9999}
    assert batch["inputs"].shape == batch["labels"].shape == (len(data), seq_len)
    assert data.targets(range(len(data))) == int(real.sum()) == 1002
    assert data.targets([len(data) - 1]) == int(real[-1].sum())


def test_a_batch_in_any_order_is_its_samples(row):
    data = CausalText(file=row, tokens=1003, seq_len=50, pad_id=0)
    picked = [20, 3, 3, 0, 19]
    batch = data.batch(picked, [0] * 5)
    for place, index in enumerate(picked):
        alone = data.batch([index], [0])
        assert torch.equal(batch["inputs"][place], alone["inputs"][0])
        assert torch.equal(batch["labels"][place], alone["labels"][0])


@pytest.fixture
def masked(row):
    return MaskedText(file=row, tokens=1003, seq_len=100, pad_id=0, mask_id=5000, ordinary_ids=np.arange(2000, 3000))


def test_masking_has_exact_counts_and_keeps_the_rest(masked):
    assert len(masked) == 11
    batch = masked.batch(range(11), range(11))
    chosen = batch["labels"] != -100
    assert chosen.sum(1).tolist() == [15] * 10 + [0]  # the last window holds 3 tokens: 0.45 rounds to none
    assert masked.targets(range(11)) == 150
    tokens = torch.arange(1100).view(11, 100)
    assert torch.equal(batch["labels"][chosen], tokens[chosen])
    kept = ~chosen & (tokens < 1003)
    assert torch.equal(batch["inputs"][kept], tokens[kept])


def test_masking_never_chooses_padding(tmp_path):
    np.arange(130, dtype=np.uint16).tofile(tmp_path / "row.bin")
    file = TokenFile(tmp_path / "row.bin", "uint16")
    data = MaskedText(file=file, tokens=130, seq_len=100, pad_id=0, mask_id=500, ordinary_ids=np.arange(100))
    for key in range(50):
        labels = data.batch([1], [key])["labels"][0]
        assert (labels[30:] == -100).all() and (labels[:30] != -100).sum() == round(0.15 * 30)
    assert data.targets([0, 1]) == 15 + 4


def test_masking_is_80_10_10(masked):
    indices = np.arange(4000) % 10
    batch = masked.batch(indices, np.arange(4000))
    chosen = batch["labels"] != -100
    shown, truth = batch["inputs"][chosen], batch["labels"][chosen]
    n = len(shown)  # 60,000
    assert abs((shown == 5000).sum() / n - 0.8) < 0.01
    assert abs((shown == truth).sum() / n - 0.1) < 0.01
    assert abs(((shown >= 2000) & (shown < 3000)).sum() / n - 0.1) < 0.01
    where = chosen.sum(0) / 4000
    assert abs(where - 0.15).max() < 0.03  # each place is as likely as any other


def test_masking_is_a_function_of_the_key(masked):
    first, again, other = (masked.batch([4, 5], keys) for keys in ([1, 2], [1, 2], [3, 4]))
    assert torch.equal(first["inputs"], again["inputs"]) and torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["labels"], other["labels"])
    swapped = masked.batch([5, 4], [2, 1])
    assert torch.equal(first["inputs"].flip(0), swapped["inputs"])


def test_evaluation_sees_every_target_once_on_any_number_of_ranks(row):
    data = CausalText(file=row, tokens=1003, seq_len=50, pad_id=0)
    for dp, micro in ((1, 4), (3, 4), (4, 8), (8, 16)):
        shares = [list(eval_batches(data, rank, dp, micro, None)) for rank in range(dp)]
        assert len({len(share) for share in shares}) == 1
        labels = torch.cat([b["labels"][b["labels"] != -100] for share in shares for b in share])
        assert sorted(labels.tolist()) == list(range(1, 1003))
        assert all(b["inputs"].shape == (micro, 50) for share in shares for b in share)
    assert data.targets(eval_indices(len(data), None)) == 1002
