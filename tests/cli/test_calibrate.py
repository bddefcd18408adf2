"""`zerofit calibrate`: figures of this machine, kept, and used by the next plan."""

from __future__ import annotations

import pytest

from tests.cli.asking import answer
from tests.plan.stub import make_cluster
from zerofit.plan.kernels import kernels_s
from zerofit.plan.rates import rates_of
from zerofit.spec.cluster import Cluster
from zerofit.spec.local_machine import (
    Calibration,
    MeasuredKernel,
    calibration_file,
    read_calibration,
    write_calibration,
)
from zerofit.spec.profile import Kernel, Linear


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_two_ranks_measure_this_machine(own_cache, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)  # the CPU, also where there are GPUs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measured = answer("calibrate", "--seconds", "0.05")
    assert measured["kind"] == "cpu" and measured["file"] == str(own_cache / "calibration.json")
    found = read_calibration("cpu")
    assert found is not None and found.date and found.versions["torch"]
    assert {"fp32", "bf16"} <= set(found.matmul_flops) and all(v > 1e8 for v in found.matmul_flops.values())
    names = ("memory_bandwidth", "host_copy", "host_bandwidth", "disk_read", "disk_write", "launch_s")
    names += ("adam_bandwidth", "sgd_bandwidth")
    assert all(getattr(found, name) > 0 for name in names)
    assert (found.link is not None) == (found.devices > 1) == bool(found.collectives)
    assert {(one.kind, one.dtype) for one in found.kernels} == {
        (kind, dtype)
        for kind in ("product", "attention", "convolution", "elementwise", "normalisation", "copy", "embedding")
        for dtype in ("float32", "bfloat16")
    }
    rates = rates_of(Cluster("cpu"), "fp32", found)
    assert (rates.hook_s, rates.gradient_s, rates.sgd) == (found.hook_s, found.gradient_s, found.sgd_bandwidth)
    # differences of two times: on a busy machine they may be 0
    assert 0 <= found.hook_s < 1 and 0 <= found.gradient_s < 1
    assert found.adam_bandwidth > 1e8 and {one.ranks for one in found.collectives} <= {2}
    product = next(one for one in found.kernels if one.kind == "product" and one.dtype == "float32")
    assert kernels_s([as_planned(product)], 1, rates) == pytest.approx(product.seconds)


def as_planned(one: MeasuredKernel) -> Kernel:
    shape = tuple(Linear(per_sample=size) for size in one.shape)
    amounts = {"flops": Linear(fixed=one.flops), "moved_bytes": Linear(fixed=one.moved_bytes)}
    return Kernel(kind=one.kind, dtype=one.dtype, count=1, shape=shape, **amounts)  # pyright: ignore[reportArgumentType]


def test_it_is_used_for_its_own_kind_alone(own_cache):
    write_calibration(Calibration(kind="l4", device_name="NVIDIA L4", devices=1, date="2026-01-02", disk_read=5e9))
    assert read_calibration("h100-80gb") is None and read_calibration("l4").disk_read == 5e9
    assert rates_of(make_cluster("l4"), "bf16", read_calibration("l4")).nvme_read == 5e9


def test_a_file_of_another_version_is_passed_over(own_cache):
    assert read_calibration("cpu") is None
    for text in ("{}", "nonsense", '{"kind": "cpu", "another": 1}'):
        calibration_file().write_text(text)
        assert read_calibration("cpu") is None
