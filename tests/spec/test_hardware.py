"""The catalog: every entry is complete and plausible, names and kinds are found, sizes are read."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml

from zerofit.spec import device_file
from zerofit.spec.cluster import Cluster
from zerofit.spec.device_file import CATALOG, KEYS, REQUIRED
from zerofit.spec.devices import DEVICES, INSTANCES, by_name, cpu_device, find_device, peak_flops
from zerofit.spec.errors import UserError
from zerofit.spec.overhead import blas_workspace_bytes, context_figure
from zerofit.spec.units import parse_bytes, shown_bytes, shown_count, shown_score

GIB = 2**30
ASKED = {
    *("v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h100-pcie-80gb", "h200", "b200", "l4", "a10"),
    *("a10g", "l40", "l40s", "rtx3090", "rtx4090", "t4", "mi250x", "mi300x"),
    *("a800-80gb", "h800-80gb", "h20", "b300", "gb200", "rtx5090", "rtx-pro-6000", "a6000", "l20", "mi325x", "mi355x"),
    *("gh200", "gh200-144gb", "gb10", "rtx-6000-ada"),
}


def test_all_kinds_are_there():
    assert set(DEVICES) == ASKED


ENTRIES = sorted(CATALOG.glob("*/*"))


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_entry_has_the_keys_of_its_folder_with_source_and_date(path):
    entry = yaml.safe_load(path.read_text())
    assert path.suffix == ".yaml" and path.stem == path.stem.lower()
    assert set(REQUIRED[path.parent.name]) <= set(entry) <= set(KEYS)
    for key in ("date", "price_date") if "price" in entry else ("date",):
        assert re.fullmatch(r"20\d\d(-[01]\d(-[0-3]\d)?)?", str(entry[key])), entry[key]
    assert entry["source"] and ("price" not in entry or entry["price_source"])


def test_every_node_of_the_catalog_is_in_use():
    nodes = {yaml.safe_load(path.read_text())["node"] for path in ENTRIES if path.parent.name == "gpus"}
    assert {path.stem for path in ENTRIES if path.parent.name == "nodes"} <= nodes
    assert all(name in device_file.entry_names("nodes") or name in INSTANCES for name in nodes)


GPU = """
torch_name: X100
architecture: blackwell
capability: [10, 0]
multiprocessors: 160
memory: 79.11GiB
tflops: {bf16: 1000, fp16: 1000, fp32: 70}
bandwidth: 4TB
link: 450GB
link_name: NVLink 9
pcie: 63GB
node: box
source: data sheet
memory_source: nvidia-smi
date: 2027
"""
NODE = """
name: a box
gpus: 4
host_memory: 1TiB
host_bandwidth: 600GB
network: 50GB
nvme_read: 20GB
nvme_write: 10GB
source: user guide
date: 2027-01
"""
INSTANCE = NODE.replace("a box", "x9.metal").replace(
    "gpus: 4", "gpus: 16\ngpu: x100\nprice: 2.5\nprice_date: 2027-02-01"
)


def test_a_gpu_a_node_and_an_instance_are_one_entry_each(tmp_path, monkeypatch):
    catalog = shutil.copytree(CATALOG, tmp_path / "catalog")
    monkeypatch.setattr(device_file, "CATALOG", catalog)
    (catalog / "gpus" / "x100.yaml").write_text(GPU)
    (catalog / "nodes" / "box.yaml").write_text(NODE)
    (catalog / "instances" / "x9.metal.yaml").write_text(INSTANCE)
    usual, cloud, known = Cluster("x100"), Cluster("x9.metal"), by_name("NVIDIA X100")
    assert (usual.gpus, usual.device.node.name, usual.device.node.source) == (4, "a box", "user guide (2027-01)")
    assert (usual.device.memory_bytes, usual.device.peak("bf16")) == (int(79.11 * GIB), 1e15)
    assert known is not None and (known.kind, known.link_name) == ("x100", "NVLink 9")
    assert (cloud.gpus, cloud.label) == (16, "x100 (x9.metal)") and cloud.device.bandwidth == 4e12
    assert cloud.device.node.price is not None and cloud.device.node.price.usd == 2.5 * 16
    (tmp_path / "mine.yaml").write_text("gpu: x100\nnode: box\nnetwork: 25GB\n")  # a user's file, by the same reader
    mine = Cluster(str(tmp_path / "mine.yaml")).device
    assert (mine.kind, mine.bandwidth, mine.node.gpus, mine.node.network) == ("own:mine", 4e12, 4, 25e9)


@pytest.mark.parametrize("kind", ["h100-80gb", "mi300x", "rtx4090"])
def test_a_file_that_names_a_gpu_has_all_figures_of_that_gpu(tmp_path, kind):
    """Context and workspaces are those of its architecture."""
    (tmp_path / "mine.yaml").write_text(f"gpu: {kind}\nnode: dgx-h100\n")
    mine, known = Cluster(str(tmp_path / "mine.yaml")).device, Cluster(kind).device
    assert mine.kind == "own:mine" and context_figure(mine) == context_figure(known)
    assert blas_workspace_bytes(mine) == blas_workspace_bytes(known)
    assert (mine.compute_capability, mine.multiprocessors) == (known.compute_capability, known.multiprocessors)


def test_figures_beside_a_named_gpu_go_before_those_of_the_catalog(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: h100-80gb\nnode: dgx-h100\nmemory: 96GiB\nbandwidth: 4TB\n")
    mine, known = Cluster(str(path)).device, Cluster("h100-80gb").device
    assert (mine.memory_bytes, mine.bandwidth, mine.memory_source) == (96 * GIB, 4e12, str(path))
    assert (mine.tflops, mine.link, mine.name) == (known.tflops, known.link, known.name)


def test_a_wrong_architecture_capability_or_count_is_an_error_with_what_is_allowed(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: h100-80gb\nnode: dgx-h100\narchitecture: hoper\ncapability: 9.0\nmultiprocessors: 0\n")
    with pytest.raises(UserError) as caught:
        Cluster(str(path))
    assert [p.message.partition(": ")[2] for p in caught.value.problems] == [
        "architecture: got 'hoper'",
        "capability: got 9.0",
        "multiprocessors: got 0",
    ]
    assert "hopper" in caught.value.problems[0].hint


@pytest.mark.parametrize("text", ["gpu: h100-8gb\nnode: dgx-h100\n", "gpu: h100-80gb\nnode: dgx-h10\n"])
def test_names_that_are_not_in_the_catalog_get_the_nearest(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        Cluster(str(tmp_path / "mine.yaml"))
    assert [p.kind for p in error.value.problems] == ["bad-value"] and "h100" in error.value.problems[0].hint


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.kind)
def test_every_figure_is_plausible_and_has_a_source(device):
    assert 14 * GIB < device.memory_bytes <= 288 * GIB
    size = device.kind.rpartition("-")[2]
    if size.endswith("gb"):  # the driver hands out a little less than the name promises
        assert 0.97 * int(size[:-2]) < device.memory_bytes / GIB < int(size[:-2])
    assert device.peak("fp32") < device.peak("fp16") and device.peak("bf16") in (None, device.peak("fp16"))
    least = 2.5e11 if device.unified_memory else 3e11  # LPDDR5X
    assert least <= device.bandwidth < 1e13
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
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("CPU (x86_64)", "fp32") is None


def test_unknown_kinds_get_the_nearest():
    for word, hint in {"h100": "h100-80gb or h100-pcie-80gb", "H100 NVL": "h100-", "v100-64gb": "v100-"}.items():
        with pytest.raises(UserError) as error:
            find_device(word)
        assert hint in error.value.problems[0].hint


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("RTX_4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("L40S", "l40s"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_kinds_as_people_and_drivers_write_them(written, kind):
    assert find_device(written).kind == kind and Cluster(written, gpus=2).label == kind


def test_ranks_share_a_host():
    one, two = cpu_device(8, 64 * GIB, 1), cpu_device(8, 64 * GIB, 2)
    assert two.memory_bytes == one.memory_bytes // 2 and two.peak("fp32") == one.peak("fp32") / 2
    many = cpu_device(8, 64 * GIB, 32)  # they take turns
    assert many.peak("fp32") == one.peak("fp32") / 32 and many.bandwidth == one.bandwidth / 32


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
    counts = [shown_count(n) for n in (671e9, 1.0264e12, 1_820_000, 999_600, 950)]
    assert counts == ["671 B", "1.03 T", "1.82 M", "1 M", "950"]
    scores = (1.8437, 0.09706, 0.5, 99.97, 128_431.2, 0)
    assert [shown_score(n) for n in scores] == ["1.84", "0.0971", "0.500", "100", "128,000", "0.00"]
