"""What is simulated against what real ranks allocate, on a few of the benchmark's configurations."""

from __future__ import annotations

import shutil
import statistics

import pytest

from benchmarks.meter.comparison import compare
from benchmarks.meter.configurations import target
from benchmarks.meter.pool import Ranks

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the allocator meter is compiled with g++")

CONFIGURATIONS = (
    "llama zero3 bf16 mb2 ckpt x2",
    "gpt2 zero1 bf16 mb2 ckpt offload x2",
    "lenet zero3 fp32 mb2 ga2 ckpt x2",
    "bert zero1 bf16 mb2 pp2 x2",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_simulated_peaks_are_the_real_ones(name, ranks):
    errors = [abs(error) for error in compare(name, target(name), ranks).errors("with_kernels")]
    assert statistics.median(errors) <= 0.001
    assert max(errors) <= 0.01
