"""What a host has, versions that clash, and figures against what they should be."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.doctor.test_findings import put
from zerofit.doctor import host_checks, measured
from zerofit.doctor.check import FAIL, OK, WARN
from zerofit.doctor.host_checks import CLASHES, clashes, driver, version
from zerofit.doctor.system import compilers
from zerofit.spec.devices import DEVICES


@pytest.fixture
def well(facts):
    """A host that lacks nothing."""
    tools = {name: f"/usr/bin/{name}" for name in facts["tools"]}
    found = put(facts, "tools", tools) | {"compilers": {"g++": "13.2", "nvcc": "13.0", "newest_g++": 15}}
    found["libaio"] = {"header": True, "library": True}
    found["limits"] = {"nofile": 65536, "nproc": None, "memlock": None}
    found["infiniband"] = ["mlx5_0"]
    found["shared_memory_bytes"] = 2**34
    found["versions"] |= {"torch": "2.14.1+cu130", "torchvision": "0.29.1", "deepspeed": "0.19.8", "nccl": "2.30.7"}
    return found


def bad(facts, many: bool = True):
    return [(c.name, c.status) for c in host_checks.checks("a", facts, many=many) if c.status != OK]


def test_a_host_in_order(well):
    assert bad(well) == []
    names = {check.name for check in host_checks.checks("a", well, many=True)}
    assert {"gpus", "driver", "nccl", "compiler nvcc", "versions-clash", "libaio", "pdsh", "limit memlock"} <= names


FAULTS = [
    ("gpus/0/name", "NVIDIA FancyGPU", "gpus", WARN),
    ("gpus/0/total_bytes", 40 * 2**30, "gpus", WARN),
    ("driver", "570.86.15", "driver", FAIL),
    ("versions/nccl", None, "nccl", WARN),
    ("tools/nvcc", None, "compiler nvcc", WARN),
    ("tools/ninja", None, "compiler ninja", WARN),
    ("libaio/header", False, "libaio", WARN),
    ("tools/pdsh", None, "pdsh", WARN),
    ("limits/nofile", 1024, "limit nofile", WARN),
    ("limits/memlock", 65536, "limit memlock", WARN),
    ("shared_memory_bytes", 64 * 2**20, "shared-memory", WARN),
    ("versions/nccl", "2.29.2", "versions-clash", FAIL),
    ("versions/nccl", "2.28.3", "versions-clash", FAIL),
    ("versions/deepspeed", "0.18.0", "versions-clash", FAIL),
    ("versions/torchvision", "0.28.0", "versions-clash", WARN),
    ("compilers/nvcc", "12.8", "versions-clash", WARN),
    ("compilers/nvcc", "13.1", "versions-clash", WARN),
    ("compilers/g++", "16.1", "versions-clash", WARN),
]


@pytest.mark.parametrize(("path", "value", "name", "status"), FAULTS)
def test_one_fault_is_one_line(well, path, value, name, status):
    told = put(well, path, value)
    assert bad(told) == [(name, status)]
    (check,) = [c for c in host_checks.checks("a", told, many=True) if c.status != OK]
    assert check.hint and check.value
    assert check.source or name not in ("driver", "versions-clash", "limit memlock")


def test_an_old_nccl_hangs_on_arm_alone(well):
    old = put(well, "versions/nccl", "2.28.9")
    assert bad(old) == []
    assert bad(put(old, "cores/machine", "aarch64")) == [("versions-clash", FAIL)]


def test_without_gpus_nothing_of_cuda_is_asked_for(well):
    told = put(put(well, "gpus", []), "driver", None)
    told = put(put(put(told, "tools/nvcc", None), "versions/nccl", "2.29.2"), "limits/memlock", 65536)
    assert bad(told) == [] and bad(put(told, "tools/pdsh", None), many=False) == []
    assert bad(put(put(well, "limits/memlock", 65536), "infiniband", [])) == []
    assert bad(put(told, "gpu_error", "no driver")) == [("gpus", FAIL)]


def test_every_clash_has_a_source():
    assert all(re.match(r"https://|deepspeed/|crt/", clash.source) and clash.hint for clash in CLASHES)
    assert len({clash.name for clash in CLASHES}) == len(CLASHES)


@pytest.mark.parametrize(
    ("torch", "vision", "clash"),
    [("2.15.0", "0.29.2", False), ("2.14.1", "0.30.0", True), ("2.14.1", "0.28.0", True), ("2.13.0", "0.28.0", False)],
)
def test_torchvision_goes_with_the_torch_that_it_asks_for(well, torch, vision, clash):
    told = put(put(well, "versions/torch", torch), "versions/torchvision", vision)
    assert bool([check for check in clashes("a", told) if check.value.startswith("torchvision")]) is clash


def test_the_installed_pair_of_torch_and_torchvision_goes_together(true_facts):
    told = true_facts | {"gpus": []}
    assert not [check for check in clashes("a", told) if check.value.startswith("torchvision")]


def test_versions_and_drivers(well):
    assert version("2.30.7") == (2, 30, 7) and version("13.0+cu130") == (13, 0) and version(None) == ()
    assert version("2.14.0a0+git") == (2, 14, 0)
    assert [c.status for c in driver("a", put(well, "versions/cuda", "12.8"))] == [OK]
    assert [c.status for c in driver("a", put(well, "driver", "520.10"))] == [FAIL]


def test_compilers_are_asked(tmp_path):
    home = tmp_path / "cuda-13"
    (home / "bin").mkdir(parents=True)
    (home / "include" / "crt").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    (home / "include" / "crt" / "host_config.h").write_text("#if __GNUC__ > 15\n#error unsupported GNU version\n")
    (tmp_path / "link").symlink_to(nvcc)
    found = compilers({"nvcc": str(tmp_path / "link"), "g++": None, "c++": "/nonexistent"})
    assert found == {"g++": None, "nvcc": "13.0", "newest_g++": 15}


H100 = DEVICES["h100-80gb"]
GOOD = {
    "matmul_flops": {"fp32": 60e12, "bf16": 700e12},
    "memory_bandwidth": 3.0e12,
    "host_copy": 50e9,
    "link": 360e9,
    "link_latency_s": 40e-6,
    "disk_read": 3e9,
    "disk_write": 1e9,
}
SLOW = {
    "memory_bandwidth": ("memory bandwidth", 1.0e12),
    "host_copy": ("host to device", 10e9),
    "link": ("all-reduce", 40e9),
    "link_latency_s": ("all-reduce latency", 500e-6),
    "disk_read": ("disk read", 50e6),
    "disk_write": ("disk write", 50e6),
}


def test_figures_of_a_gpu_in_order(well):
    checks = list(host_checks.speeds("a", well, GOOD, 2))
    assert {check.status for check in checks} == {OK}
    named = {check.name: check for check in checks}
    assert named["matrix products bf16"].figure == 700e12 and named["matrix products bf16"].source == H100.source
    assert (
        named["matrix products bf16"].value == "700 TFLOP/s" and "593 TFLOP/s" in named["matrix products bf16"].expected
    )


@pytest.mark.parametrize("key", SLOW)
def test_one_slow_figure_is_one_line(well, key):
    name, value = SLOW[key]
    low = [check for check in host_checks.speeds("a", well, GOOD | {key: value}, 2) if check.status != OK]
    assert [(check.name, check.status) for check in low] == [(name, WARN)] and low[0].hint and low[0].expected


def test_slow_products_are_named_by_their_precision(well):
    figures = GOOD | {"matmul_flops": {"fp32": 60e12, "bf16": 100e12}}
    low = [check for check in host_checks.speeds("a", well, figures, 2) if check.status != OK]
    assert [check.name for check in low] == ["matrix products bf16"]


def test_a_gpu_that_is_not_in_the_catalogue_is_only_shown(well):
    told = put(well, "gpus/0/name", "FancyGPU")
    figures = GOOD | {"memory_bandwidth": 1.0, "link": 1.0}
    assert all(check.status == OK for check in host_checks.speeds("a", told, figures, 2))


def test_a_processor_without_bf16(well):
    told = put(put(well, "gpus", []), "cores/usable", 2)
    figures = {k: v for k, v in GOOD.items() if k != "link"} | {"matmul_flops": {"fp32": 1e12, "bf16": 1e10}}
    low = [check for check in host_checks.speeds("a", told, figures, 1) if check.status != OK]
    assert [check.hint for check in low] == ["train in fp32: --precision fp32"]


def test_figures_between_hosts(well):
    rows = [{"interface": "eth0", "address": "10.0.0.1", "mtu": 1500, "speed_mbit": 10_000}]
    cpu = put(put(well, "gpus", []), "addresses", rows)
    status = {
        gb: next(c.status for c in host_checks.speeds_across("a", cpu, GOOD | {"link": gb * 1e9}, "eth0"))
        for gb in (1, 0.3)
    }
    assert status == {1: OK, 0.3: WARN}
    (rate, latency) = host_checks.speeds_across("a", well, GOOD | {"link": 1e9}, "eth0")
    assert rate.status == WARN and H100.node.name in rate.expected and latency.status == OK
    figures = {"/nvme": {"disk_read": 1e9, "disk_write": 1e9}}
    assert [c.status for c in host_checks.nvme_speeds("a", figures)] == [OK, WARN]


def test_nvme_file_systems_are_measured_in_folders(tmp_path, monkeypatch):
    """Docker mounts /etc/hosts and other files from the host's disk."""
    file, folder = tmp_path / "hosts", tmp_path / "data"
    file.touch()
    folder.mkdir()
    parts = [SimpleNamespace(device="/dev/nvme0n1p1", mountpoint=str(place)) for place in (file, folder)]
    monkeypatch.setattr(measured.psutil, "disk_partitions", lambda: parts)
    monkeypatch.setattr(measured, "BYTES", measured.BLOCK)
    found = measured.nvme_disks(lambda words: None)
    assert list(found) == [str(folder)] and found[str(folder)].keys() == {"disk_write", "disk_read"}
    assert not list(folder.iterdir())


def test_a_file_system_that_cannot_be_written_loses_no_other(tmp_path, monkeypatch):
    folders = [tmp_path / "full", tmp_path / "data"]
    parts = [SimpleNamespace(device=f"/dev/nvme{n}n1", mountpoint=str(folder)) for n, folder in enumerate(folders)]
    monkeypatch.setattr(measured.psutil, "disk_partitions", lambda: parts)
    monkeypatch.setattr(measured, "BYTES", measured.BLOCK)

    def measure(folder: Path) -> dict[str, float]:
        if folder.parent.name == "full":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return {"disk_read": 1e9}

    monkeypatch.setattr(measured, "measure_disk", measure)
    for folder in folders:
        folder.mkdir()
    assert measured.nvme_disks(lambda words: None) == {str(tmp_path / "data"): {"disk_read": 1e9}}
