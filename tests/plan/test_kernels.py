"""Seconds of single kernels on round rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.stub import make_cluster
from zerofit.plan.kernels import RankGroup, collective_s, kernels_s, launches
from zerofit.plan.measured_rates import CollectiveTable, KernelTable, unaligned_lengths
from zerofit.plan.rates import AttentionRate, Rates, rates_of
from zerofit.plan.software import Software
from zerofit.spec.local_machine import Calibration, MeasuredCollective, MeasuredKernel
from zerofit.spec.profile import Kernel, Linear


@pytest.fixture
def rates() -> Rates:
    found = rates_of(make_cluster(), "bf16")
    shape = AttentionRate(share=0.5, half=1280.0, full_half=128.0, narrow=0.5, blocks=64.0, how="")
    return replace(found, flops=1e12, general=1e11, attention=5e11, memory=1e12, edge=100.0, attention_shape=shape)


def kernel(kind: str, *sizes: float, **fields: object) -> Kernel:
    shape = tuple(Linear(fixed=size) for size in sizes)
    known = {"dtype": "bfloat16", "flops": Linear(per_sample=1e12), "moved_bytes": Linear(per_sample=1e9), "count": 2.0}
    return Kernel(kind=kind, shape=shape, **{**known, **fields})  # pyright: ignore[reportArgumentType]


def test_each_kind_has_its_rate(rates):
    assert kernels_s([kernel("product", 1000, 1000, 1000)], 1, rates) == pytest.approx(1.3)
    assert kernels_s([kernel("product", 1000, 1000, 1000)], 4, rates) == pytest.approx(5.2)
    assert kernels_s([kernel("convolution", 1000, 1, 9, groups=96)], 1, rates) == pytest.approx(10.0)
    assert kernels_s([kernel("convolution", 1000, 64, 576)], 1, rates) == pytest.approx(1.0)
    assert kernels_s([kernel("elementwise", flops=Linear())], 1, rates) == pytest.approx(1e-3)
    assert launches([kernel("product"), kernel("copy")]) == 4


def test_rows_of_no_multiple_of_16_bytes_are_slow_in_16_bits_where_it_was_measured(rates):
    logits = kernel("product", 8192, 50257, 768)
    padded = kernels_s([kernel("product", 8192, 50264, 768)], 1, rates)
    assert kernels_s([logits], 1, rates) == pytest.approx(padded / 0.16, rel=1e-3)
    even = kernels_s([kernel("product", 8192, 50258, 768)], 1, rates)
    assert even == pytest.approx(padded / 0.34, rel=1e-3)
    assert kernels_s([replace(logits, dtype="float32")], 1, rates) == pytest.approx(padded, rel=1e-3)
    rows = replace(logits, shape=(Linear(per_sample=1023), Linear(fixed=50264), Linear(fixed=768)))
    assert unaligned_lengths(rows) == [] and unaligned_lengths(logits) == [50257]  # rows, not their length
    assert rates_of(make_cluster("v100-32gb"), "fp16").unaligned == 1.0


def test_grouped_convolutions_run_on_the_general_cores_and_batch_norms_a_channel_to_a_block(rates):
    known = replace(rates, depthwise=4e11, channel={"float32": 1e9, "bfloat16": 2.5e8})

    def grouped(channels: int, dtype: str = "bfloat16") -> Kernel:
        return kernel("convolution", 3136, channels, 9 * channels, groups=32, dtype=dtype)

    for one, rate in (
        (grouped(1), 1e11),
        (grouped(4), 4e11),
        (grouped(64), 1e12),
        (grouped(1, "float16"), 4e11),
        (grouped(8, "float16"), 8e11),
    ):
        assert kernels_s([one], 1, known) == pytest.approx(1e12 / rate)
    for groups, dtype, rate in ((64, "float32", 6.4e10), (64, "bfloat16", 1.6e10), (4096, "float32", 1e12)):
        norm = kernel("normalisation", flops=Linear(), groups=groups, dtype=dtype)
        assert kernels_s([norm], 1, known) == pytest.approx(1e9 / rate)


def test_unaligned_rows_that_were_measured_are_as_measured(rates):
    """As in a trace; where none was, the others' table and the share count."""
    logits = kernel("product", 8192, 50257, 768, flops=Linear(per_sample=2e12))
    even = MeasuredKernel(kind="product", dtype="bfloat16", shape=(8192, 50264, 768), flops=1e12, seconds=1.0)
    odd = replace(even, shape=(8192, 50257, 768), seconds=3.0)
    for known, seconds in (((even,), 2.0 / 0.16), ((even, odd), 6.0), ((odd,), 6.0)):
        table = replace(rates, kernels=KernelTable(known))
        assert kernels_s([logits], 1, table) == pytest.approx(seconds, rel=1e-3)
    assert kernels_s([replace(logits, shape=kernel("product", 8192, 50264, 768).shape)], 1, table) == pytest.approx(
        6.0, 0.01
    )


def test_attention_is_slower_for_few_blocks_short_sequences_and_narrow_heads(rates):
    whole = kernels_s([kernel("attention", 64, 1280, 1280, 128)], 1, rates)
    assert whole == pytest.approx(2.0 * 1.1 * 1.1)
    causal = kernel("attention", 64, 1280, 1280, 128, causal=True)  # half of the products, at half of the rate
    assert kernels_s([causal], 1, rates) == pytest.approx(1.0 * 1.1 * 2.0)
    assert kernels_s([kernel("attention", 64, 1280, 1280, 64)], 1, rates) == pytest.approx(2 * whole)
    assert kernels_s([kernel("attention", 1, 128, 1280, 128)], 1, rates) == pytest.approx(2.0 * 65 * 1.1)


# TFLOP/s of the forward with a causal mask, heads of 128 and 16k tokens a call (FlashAttention-3 paper, figure 5), and
# of torch's SDPA, forward and backward together (benchmarks/results/gpu-environment.json)
@pytest.mark.parametrize(
    "name, heads, length, published",
    [
        *(("flash_attention_2", 16 * 16384 // n, n, rate) for n, rate in ((512, 191), (2048, 298), (16384, 335))),
        *(("flash_attention_3", 16 * 16384 // n, n, rate) for n, rate in ((512, 292), (2048, 521), (16384, 616))),
        *(("sdpa", 32, n, rate) for n, rate in ((2048, 316), (8192, 509))),
    ],
)
def test_attention_reaches_what_was_measured_on_an_h100(name, heads, length, published):
    rates = rates_of(make_cluster(), "bf16", software=Software(attn_implementation=name))
    call = kernel("attention", heads, length, length, 128, causal=True, flops=Linear(fixed=1e12))
    assert 0.5 / kernels_s([call], 1, rates) == pytest.approx(published, rel=0.13)


def test_what_moves_more_than_it_computes_takes_its_traffic(rates):
    heavy = kernel("product", 1000, 1000, 1000, moved_bytes=Linear(per_sample=5e12))
    assert kernels_s([heavy], 1, rates) == pytest.approx(5.0)
    fused = replace(rates, unfused=0.5)
    assert kernels_s([heavy], 1, fused) == pytest.approx(5.0)
    assert kernels_s([kernel("normalisation", flops=Linear())], 1, fused) == pytest.approx(0.5e-3)


def test_kernels_without_a_shape_waste_nothing(rates):
    assert kernels_s([kernel("product")], 1, rates) == pytest.approx(1.0)
    assert kernels_s([kernel("attention")], 1, rates) == pytest.approx(2.0)


def product(m: int, rate: float, **fields: object) -> MeasuredKernel:
    flops = 2.0 * m * 512 * 512
    known = {"kind": "product", "dtype": "bfloat16", "shape": (m, 512, 512), "flops": flops, "seconds": flops / rate}
    return MeasuredKernel(**{**known, **fields})  # pyright: ignore[reportArgumentType]


def test_kernels_that_were_measured_take_what_they_took(rates):
    moves = MeasuredKernel(kind="elementwise", dtype="bfloat16", moved_bytes=1e6, seconds=1e-5)
    table = KernelTable([product(64, 1e11), product(4096, 4e11), product(64, 1e10, dtype="float32"), moves])
    known = replace(rates, kernels=table, unfused=0.5, slower=2.0, longer={"elementwise": 3.0})

    def one(m: int, **fields: object) -> Kernel:
        flops = {"flops": Linear(per_sample=2.0 * m * 512 * 512), "count": 1.0}
        return kernel("product", m, 512, 512, **{**flops, **fields})

    assert table.shapes == 4
    assert kernels_s([one(64)], 1, known) == pytest.approx(2 * product(64, 1e11).seconds)
    assert kernels_s([one(64)], 3, known) == pytest.approx(2 * 3 * 2.0 * 64 * 512 * 512 / 1.03e11, rel=0.05)
    between = 2.0 * 512 * 512 * 512 / table.seconds(one(512), 1)  # pyright: ignore[reportOperatorIssue]
    assert between == pytest.approx(2e11)  # half way in the logarithm of the sizes
    assert kernels_s([kernel("elementwise", flops=Linear())], 1, known) == pytest.approx(2 * 3 * 0.5 * 1e-2)
    # nothing of their kind and dtype was measured
    for other in (one(64, groups=2), kernel("attention", 64, 1280, 1280, 64)):
        assert kernels_s([other], 1, known) == kernels_s([other], 1, rates)


def test_collectives_that_were_measured_are_a_line():
    sizes = (2**16, 2**20, 2**26)
    table = CollectiveTable(
        MeasuredCollective(op="all_gather", ranks=2, size_bytes=size, seconds=1e-4 + size / 4e9) for size in sizes
    )
    line = table.line("all_gather", 2)
    assert line and (line.call_s, 1 / line.byte_s) == (pytest.approx(1e-4), pytest.approx(4e9))
    assert table.line("all_gather", 4) is None and table.line("all_reduce", 2) is None


def test_a_trace_corrects_rates_by_kind():
    longer = {"optimizer": 4.0, "launches and hooks": 3.0, "all-reduce": 2.0}
    plain = Calibration(kind="h100-80gb", device_name="", devices=8, date="")
    before, traced = rates_of(make_cluster(), "bf16", plain), replace(plain, origin="t.json", longer=longer, slower=1.5)
    found = rates_of(make_cluster(), "bf16", traced)
    assert before.flops / found.flops == before.link / found.link == pytest.approx(1.5)
    assert before.adam / found.adam == before.host / found.host == pytest.approx(6.0)
    assert found.launch_s / before.launch_s == found.hook_s / before.hook_s == pytest.approx(4.5)
    assert found.exposed_between == before.exposed_between
    assert found.sources["flops"].endswith("corrected by t.json")
    group = RankGroup(8, 8)
    for op, times in (("all_reduce", 3.0), ("all_gather", 1.5)):
        assert collective_s(op, 1e9, 2, group, found) == pytest.approx(times * collective_s(op, 1e9, 2, group, before))
