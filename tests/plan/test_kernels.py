"""Seconds of single kernels on round rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.stub import make_cluster
from zerofit.plan.kernels import kernels_s, launches
from zerofit.plan.rates import Rates, rates_of
from zerofit.spec.profile import Kernel, Linear


@pytest.fixture
def rates() -> Rates:
    found = rates_of(make_cluster(), "bf16")
    return replace(found, flops=1e12, general=1e11, attention=5e11, memory=1e12, edge=100.0, attention_blocks=64.0)


def kernel(kind: str, *sizes: float, **fields: object) -> Kernel:
    shape = tuple(Linear(fixed=size) for size in sizes)
    known = {"flops": Linear(per_sample=1e12), "moved_bytes": Linear(per_sample=1e9), "count": 2.0}
    return Kernel(kind=kind, dtype="bfloat16", shape=shape, **{**known, **fields})  # pyright: ignore[reportArgumentType]


def test_each_kind_has_its_rate(rates):
    assert kernels_s([kernel("product", 1000, 1000, 1000)], 1, rates) == pytest.approx(1.3)
    assert kernels_s([kernel("product", 1000, 1000, 1000)], 4, rates) == pytest.approx(5.2)
    assert kernels_s([kernel("convolution", 1000, 1, 9, groups=96)], 1, rates) == pytest.approx(10.0)
    assert kernels_s([kernel("convolution", 1000, 64, 576)], 1, rates) == pytest.approx(1.0)
    assert kernels_s([kernel("elementwise", flops=Linear())], 1, rates) == pytest.approx(1e-3)
    assert launches([kernel("product"), kernel("copy")]) == 4


def test_a_causal_mask_halves_attention_and_few_blocks_slow_it(rates):
    whole = kernels_s([kernel("attention", 64, 1280, 1280, 64)], 1, rates)
    assert whole == pytest.approx(2.0 * 1.1)
    assert kernels_s([kernel("attention", 64, 1280, 1280, 64, causal=True)], 1, rates) == pytest.approx(whole / 2)
    assert kernels_s([kernel("attention", 1, 128, 1280, 64)], 1, rates) == pytest.approx(2.0 * 65)


def test_what_moves_more_than_it_computes_takes_its_traffic(rates):
    heavy = kernel("product", 1000, 1000, 1000, moved_bytes=Linear(per_sample=5e12))
    assert kernels_s([heavy], 1, rates) == pytest.approx(5.0)
    fused = replace(rates, unfused=0.5)
    assert kernels_s([heavy], 1, fused) == pytest.approx(5.0)
    assert kernels_s([kernel("normalisation", flops=Linear())], 1, fused) == pytest.approx(0.5e-3)


def test_kernels_without_a_shape_waste_nothing(rates):
    assert kernels_s([kernel("product")], 1, rates) == pytest.approx(1.0)
    assert kernels_s([kernel("attention")], 1, rates) == pytest.approx(2.0)
