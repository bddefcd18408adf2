"""Kernels of tensor parallel ranks that also split the sequence."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.stub import make_profile
from zerofit.plan.tensor_split import with_split_sequence
from zerofit.spec.profile import Linear, setting


def test_each_rank_moves_its_share_between_products_and_keeps_its_own_products():
    """AutoTP repeats what is between products: each rank moves all of its bytes."""
    profile, one, four = make_profile(), setting("bf16", False, 1, 1), setting("bf16", False, 4, 1)
    whole, mine = profile.costs[one], profile.costs[four]
    repeated = tuple(
        replace(cost, forward_kernels=(cost.forward_kernels[0], full.forward_kernels[1]))
        for cost, full in zip(mine, whole, strict=True)
    )
    split = with_split_sequence(replace(profile, costs={one: whole, four: repeated}))
    assert split.costs[one] == whole
    for run, full, cost, own in zip(profile.layers, whole, split.costs[four], mine, strict=True):
        between, product = sorted(cost.forward_kernels, key=lambda kernel: kernel.kind)
        moved = full.forward_kernels[1].moved_bytes.per_sample
        assert between.moved_bytes == Linear(per_sample=moved / 4)
        products = own if run.name == "block" else full
        share = 1 if run.name == "block" else 4
        assert product.flops.per_sample == products.forward_kernels[0].flops.per_sample / share


def test_each_rank_keeps_a_share_and_gathers_all_tokens_for_a_product():
    """Korthikanti et al., 2022: activations / tp; the whole input in forward, its gradient too in backward."""
    profile, one, four = make_profile(), setting("bf16", False, 1, 1), setting("bf16", False, 4, 1)
    split = with_split_sequence(profile)
    for run, full, cost in zip(profile.layers, profile.costs[one], split.costs[four], strict=True):
        gathered = full.output_bytes.at(2)
        assert cost.saved_bytes.at(2) == full.saved_bytes.at(2) / 4
        assert [line.at(2) for line in cost.forward] == [line.at(2) / 4 + gathered for line in full.forward]
        for mine, whole in zip(cost.backward, full.backward, strict=True):
            assert [line.at(2) for line in mine.live] == [line.at(2) / 4 + 2 * gathered for line in whole.live]
        if run.name != "block":  # embedding and head have a share of the vocabulary
            assert cost.matrices == tuple(numel / 4 for numel in run.matrices)
