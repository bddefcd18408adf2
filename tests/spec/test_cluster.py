"""Clusters: by name, with sizes as text, this machine, and copies of another size."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import pytest
import torch

from zerofit.spec import cluster, local_machine
from zerofit.spec.cluster import Cluster
from zerofit.spec.device_file import read_gpu
from zerofit.spec.devices import DEVICES, INSTANCES, cpu_device
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


def _gpu(name: str, mib: int) -> local_machine.Gpu:
    return local_machine.Gpu(name=name, uuid="", total_bytes=mib * 2**20, free_bytes=0)


@pytest.mark.parametrize(("mib", "kind"), [(40960, "a100-40gb"), (81920, "a100-80gb"), (81000, "a100-40gb")])
def test_this_machine_by_what_its_driver_says(monkeypatch, mib, kind):
    monkeypatch.setattr(cluster, "nvidia_gpus", lambda: [_gpu("NVIDIA A100-SXM4", mib)] * 4)
    here = Cluster.here()
    assert (here.kind, here.gpus, here.host_bytes) == (kind, 4, local_machine.memory_bytes())
    assert here.notes == ("this machine: 4 x NVIDIA A100-SXM4",)
    monkeypatch.setattr(cluster, "nvidia_gpus", lambda: [_gpu("NVIDIA X1", 1024)])
    with pytest.raises(UserError, match="not in the catalog"):
        Cluster.here()


def test_an_instance_type_is_a_device_in_a_node_of_its_own():
    cloud, bare = Cluster("p4d.24xlarge", nodes=2), Cluster("a100-40gb", nodes=2)
    assert cloud.device.kind == "a100-40gb" and cloud.label == "a100-40gb (p4d.24xlarge)" and bare.label == "a100-40gb"
    assert cloud.device.node.network == 400e9 / 8 / 8 < bare.device.node.network  # 400 Gb/s for eight
    assert cloud.ranks == 16 and cloud.host_bytes == 1152 * 2**30
    assert Cluster("ND96isr_H100_v5").device.node.network == 50e9
    assert any("p4d.24xlarge" in note for note in cloud.notes)


def test_every_instance_type_has_its_device_network_and_dated_price():
    for name, device in INSTANCES.items():
        assert device.node.name.lower().startswith(name) and device.kind in DEVICES
        assert device.node.source and 0 < device.node.network < device.link
        price = device.node.price
        assert price is None or (1 < price.usd / device.node.gpus < 13 and price.date[:2] == "20" and price.source)


OWN = """
memory: 96GiB
tflops: {bf16: 400, fp32: 50}
bandwidth: 2TB
link: 300GB
pcie: 63GB
network: 25GB
gpus: 4
price: 1.5
price_date: 2026-11-01
"""


def test_a_file_describes_a_device(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN)
    cluster = Cluster(str(file), nodes=2)
    device = cluster.device
    assert (device.kind, device.memory_bytes, device.link, cluster.gpus) == ("own:mine", 96 * 2**30, 300e9, 4)
    assert device.peak("bf16") == 4e14 and device.peak("fp16") is None and device.node.network == 25e9
    assert (device.node.price.usd, device.node.price.date) == (6.0, "2026-11-01")
    assert device.node.host_bandwidth == 614.4e9 and "host memory bandwidth" in device.node.source  # of no key
    file.write_text(OWN + "host_bandwidth: 512GB\n")
    own = Cluster(str(file)).device
    assert own.node.host_bandwidth == 512e9 and "host memory bandwidth" not in own.node.source
    file.unlink()
    assert replace(cluster, nodes=1).device == device  # it was read once


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("memory: much\ntflops: {bf16: 400}\nbandwith: 2TB\nlink: 300GB\ngpus: 0\nprice: free\n")
    with pytest.raises(UserError) as error:
        Cluster(str(file), gpus=0)
    text = str(error.value)
    for words in (
        "memory: 'much'",
        "fp32 is required",
        "did you mean bandwidth",
        "bandwidth is missing",
        "gpus: got 0",
    ):
        assert words in text, words
    assert {"pcie is missing", "network is missing"} <= {p.message.partition(": ")[2] for p in error.value.problems}
    assert sum(p.where == "--gpus" for p in error.value.problems) == 1
    with pytest.raises(UserError, match="cannot read"):
        Cluster(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "8", 10**400])
def test_numbers_of_devices_and_nodes_that_there_are_not(count):
    with pytest.raises(UserError) as error:
        Cluster("h100-80gb", gpus=count)
    assert error.value.problems[0].kind == "bad-value"
    with pytest.raises(UserError):
        Cluster("h100-80gb", nodes=count)


def test_a_cluster_is_no_larger_than_the_largest(tmp_path):
    assert Cluster("h100-80gb", nodes=2**15).ranks == 2**18
    for gpus, nodes in ((None, 2**15 + 1), (2**18 + 1, None), (100_000, 100_000)):
        with pytest.raises(UserError, match="at most 262,144 devices"):
            Cluster("h100-80gb", gpus=gpus, nodes=nodes)
    (tmp_path / "mine.yaml").write_text(OWN.replace("gpus: 4", "gpus: 1000000"))
    with pytest.raises(UserError, match="gpus: got 1000000"):
        Cluster(str(tmp_path / "mine.yaml"))


def test_a_hung_driver_is_said(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(local_machine, "SMI_S", 0.2)
    with pytest.raises(UserError, match=r"nvidia-smi does not answer: .* timed out after 0.2 seconds"):
        Cluster.here()
    assert local_machine.gpu_memory(1) == []


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("2,0", 2), ("GPU-3", 1), ("", 0), ("-1", 0), ("MIG-5", 0), ("0, 1,2", 3), ("0,-1,1", 1), ("0,0", 0)],
)
def test_only_visible_gpus_count(monkeypatch, visible, count):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    figures = {"name": "NVIDIA H100 80GB HBM3", "memory.total": "81559", "memory.free": "81000"}
    figures["mig.mode.current"] = "Disabled"
    gpus = [figures | {"index": str(n), "uuid": f"GPU-{n}"} for n in range(4)]
    monkeypatch.setattr(local_machine, "_ask_nvidia", lambda *fields: [[gpu[f] for f in fields] for gpu in gpus])
    here = Cluster.here()
    assert here.on_cpu if not count else (here.device.kind, here.gpus) == ("h100-80gb", count)
    assert len(local_machine.gpu_memory(4)) == count
    known = count or visible in ("", "-1")
    assert local_machine.visible_gpus() == (count if known and visible is not None else None)
    if visible not in (None, "MIG-5"):
        assert len(torch.cuda._parse_visible_devices()) == count
    if visible == "2,0":
        assert [gpu.uuid for gpu in local_machine.gpu_memory(4)] == ["GPU-2", "GPU-0"]


# nvidia-smi -L and -q -x, shortened: a whole A100, and one that MIG divides
LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
  MIG 3g.20gb     Device  0: (UUID: MIG-a1)
  MIG 1g.5gb      Device  1: (UUID: MIG-b2)
"""
PART = """<mig_device><fb_memory_usage><total>{} MiB</total><reserved>{} MiB</reserved><free>{} MiB</free>
</fb_memory_usage></mig_device>"""
XML = f"""<?xml version="1.0" ?>
<nvidia_smi_log>
<gpu><product_name>NVIDIA A100-SXM4-40GB</product_name><uuid>GPU-0</uuid><mig_devices>None</mig_devices></gpu>
<gpu><product_name>NVIDIA A100-SXM4-40GB</product_name><uuid>GPU-1</uuid>
<mig_devices>{PART.format(19968, 0, 19900)}{PART.format(4864, 64, 4700)}</mig_devices></gpu>
</nvidia_smi_log>"""
ROWS = """NVIDIA A100-SXM4-40GB, 0, GPU-0, 40960, 40000, Disabled
NVIDIA A100-SXM4-40GB, 1, GPU-1, 40960, 40000, Enabled
"""


def _nvidia_smi(folder, monkeypatch, rows: str, listed: str = "", xml: str = "") -> None:
    for name, text in (("rows", rows), ("-L", listed), ("-q", xml)):
        (folder / name).write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in --query*) cat "{folder}/rows";; *) cat "{folder}/$1";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("visible", "mib", "free"),
    [(None, 19968, 19900), ("MIG-a1", 19968, 19900), ("MIG-b2", 4800, 4700), ("1", 19968, 19900)],
)
def test_a_part_of_a_gpu_counts_alone_with_its_own_memory(tmp_path, monkeypatch, visible, mib, free):
    """CUDA shows a process one part, and no whole GPU beside it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _nvidia_smi(tmp_path, monkeypatch, ROWS, LISTED, XML)
    here = Cluster.here()
    assert (here.device.kind, here.gpus, here.device.memory_bytes) == ("a100-40gb", 1, mib * 2**20)
    assert "a part (MIG)" in here.notes[0]
    assert [gpu.free_bytes for gpu in local_machine.gpu_memory(8)] == [free * 2**20]


def test_whole_gpus_count_where_no_part_is_visible(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    _nvidia_smi(tmp_path, monkeypatch, ROWS, LISTED, XML)
    assert (Cluster.here().gpus, Cluster.here().device.memory_bytes) == (1, read_gpu("a100-40gb").memory_bytes)


def test_a_gpu_without_memory_of_its_own_uses_the_hosts(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _nvidia_smi(tmp_path, monkeypatch, "NVIDIA GB10, 0, GPU-0, [N/A], [N/A], [N/A]\n")
    assert (Cluster.here().device.kind, Cluster.here().gpus) == ("gb10", 1)
    (gpu,) = local_machine.gpu_memory(1)
    assert gpu.of_host and gpu.total_bytes == psutil.virtual_memory().total


def test_a_gpu_whose_memory_is_unknown_is_not_taken_for_a_cpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _nvidia_smi(tmp_path, monkeypatch, "NVIDIA A100-SXM4-40GB, 0, GPU-0, [N/A], [N/A], Disabled\n")
    with pytest.raises(UserError, match="memory that nvidia-smi does not report"):
        Cluster.here()
    assert local_machine.gpu_memory(1) == []
