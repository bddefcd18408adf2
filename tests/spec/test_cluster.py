"""Clusters: by name, with sizes as text, this machine, and copies of another size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerofit.spec import cluster, local_machine
from zerofit.spec.cluster import Cluster
from zerofit.spec.devices import cpu_device
from zerofit.spec.errors import UserError
from zerofit.spec.overhead import CPU_LIBRARY_BYTES

GIB = 2**30


def test_sizes_as_text_and_what_is_assumed():
    one = Cluster("h100-80gb", nodes=2, host_memory="1TB", device_memory="40GiB", network="10GB")
    assert (one.gpus, one.ranks, one.host_bytes, one.nvme_bytes) == (8, 16, 10**12, 0)
    assert one.device.memory_bytes == 40 * GIB and one.device.node.network == 1e10
    assert [note.split(":")[0] for note in one.notes] == ["--gpus"]
    assert [note.split(":")[0] for note in Cluster("l4", gpus=2, nodes=2).notes] == ["--host-memory", "--network"]


def test_host_memory_follows_the_devices_unless_it_is_given():
    assert replace(Cluster("h100-80gb", gpus=8), gpus=2).host_bytes == Cluster("h100-80gb", gpus=8).host_bytes // 4
    assert replace(Cluster("h100-80gb", gpus=8, host_memory="1TB"), gpus=2).host_bytes == 10**12


def test_ranks_on_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(cluster, "memory_bytes", lambda: 64 * GIB)
    two = Cluster("cpu", gpus=2)
    assert two.on_cpu and two.host_bytes == 64 * GIB and two.device.memory_bytes == (64 * GIB - CPU_LIBRARY_BYTES) // 2
    assert replace(two, gpus=4).device.memory_bytes == (64 * GIB - CPU_LIBRARY_BYTES) // 4
    assert Cluster("cpu", gpus=2, host_memory="8GiB").device.memory_bytes == (8 * GIB - CPU_LIBRARY_BYTES) // 2
    assert Cluster("cpu", gpus=2, device_memory="1GiB").device.memory_bytes == GIB


def test_a_device_of_ones_own():
    own = Cluster(cpu_device(2, 64 * GIB, 1), gpus=2, host_memory=128 * GIB)
    assert own.on_cpu and own.device.memory_bytes == 64 * GIB - CPU_LIBRARY_BYTES


def test_all_problems_at_once():
    with pytest.raises(UserError) as error:
        Cluster("h100", gpus=0, nodes=-1, host_memory="much")
    assert [p.where for p in error.value.problems] == ["--gpus", "--nodes", "--host-memory", "--gpu"]
    assert "did you mean h100-80gb" in str(error.value)


@pytest.mark.parametrize(("mib", "kind"), [(40960, "a100-40gb"), (81920, "a100-80gb"), (81000, "a100-40gb")])
def test_this_machine_by_what_its_driver_says(monkeypatch, mib, kind):
    monkeypatch.setattr(cluster, "nvidia_gpus", lambda: [("NVIDIA A100-SXM4", mib * 2**20)] * 4)
    here = Cluster.here()
    assert (here.kind, here.gpus, here.host_bytes) == (kind, 4, local_machine.memory_bytes())
    assert here.notes == ("this machine: 4 x NVIDIA A100-SXM4",)
    monkeypatch.setattr(cluster, "nvidia_gpus", lambda: [("NVIDIA X1", 2**30)])
    with pytest.raises(UserError, match="not in the catalogue"):
        Cluster.here()
