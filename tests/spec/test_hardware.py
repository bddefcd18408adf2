"""The catalogue: every row is whole and plausible, names and kinds are found, sizes are read."""

from __future__ import annotations

import pytest

from zerofit.spec.devices import DEVICES, KINDS, by_name, cpu_device, find_device, peak_flops, supports
from zerofit.spec.errors import UserError
from zerofit.spec.units import parse_bytes, shown_bytes

GIB = 2**30
ASKED = {
    *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h100-pcie-80gb", "h200", "b200", "l4", "a10"),
    *("a10g", "l40", "l40s", "rtx3090", "rtx4090", "t4", "mi250x", "mi300x", "cpu"),
    *("a800-80gb", "h800-80gb", "h20", "b300", "gb200", "rtx5090", "rtx-pro-6000", "a6000", "l20", "mi325x", "mi355x"),
    *("gh200", "gh200-144gb"),
}


def test_all_kinds_are_there():
    assert set(KINDS) == ASKED


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.kind)
def test_every_figure_is_plausible_and_has_a_source(device):
    assert 14 * GIB < device.memory_bytes <= 288 * GIB
    size = device.kind.rpartition("-")[2]
    if size.endswith("gb"):  # the driver hands out a little less than the name promises
        assert 0.97 * int(size[:-2]) < device.memory_bytes / GIB < int(size[:-2])
    assert device.peak("fp32") < device.peak("fp16") and device.peak("bf16") in (None, device.peak("fp16"))
    assert 3e11 <= device.bandwidth < 1e13
    most = 450e9 if device.host_link == "NVLink-C2C" else 64e9
    assert 1e10 < device.pcie <= most and device.pcie <= device.link * 1.01 <= 1e12
    assert device.source and device.memory_source and device.node.source
    assert device.node.gpus >= 1 and 0 < device.node.nvme_write <= device.node.nvme_read
    assert device.node.network < device.link and device.node.host_bandwidth > device.pcie


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("CPU (x86_64)", None),
    ],
)
def test_names_that_torch_reports(name, kind):
    found = by_name(name)
    assert (found.name if found else None) == (DEVICES[kind].name if kind else None)


def test_peaks():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None and not supports("v100-32gb", "bf16")
    assert peak_flops("CPU (x86_64)", "fp32") is None


def test_unknown_kinds_get_the_nearest():
    for word, hint in {"h100": "h100-80gb or h100-pcie-80gb", "RTX_4090": "rtx4090", "v100-64gb": "v100-"}.items():
        with pytest.raises(UserError) as error:
            find_device(word)
        assert hint in error.value.problems[0].hint


def test_ranks_share_a_host():
    one, two = cpu_device(8, 64 * GIB, 1), cpu_device(8, 64 * GIB, 2)
    assert two.memory_bytes == one.memory_bytes // 2 and two.peak("fp32") == one.peak("fp32") / 2


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("1TB", 10**12), ("512", 512), ("1.5 gib", 3 * GIB // 2), ("64k", 64000)]
)
def test_sizes(text, size):
    assert parse_bytes(text, "--x") == size


@pytest.mark.parametrize("text", ["", "much", "-3GB", "0", "3XB", "GB", "nan", "inf", "8192PiB", "9" * 400, "1e400GB"])
def test_bad_sizes(text):
    with pytest.raises(UserError) as error:
        parse_bytes(text, "--host-memory")
    assert error.value.problems[0].where == "--host-memory"


def test_sizes_are_shown_in_three_digits():
    assert [shown_bytes(n) for n in (512, 2048, 79.1 * GIB, 5 * 2**40)] == ["512 B", "2.00 KiB", "79.1 GiB", "5.00 TiB"]
