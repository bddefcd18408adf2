"""Read hardware from YAML: the catalog's GPUs, nodes and instance types, and `--gpu FILE`.

Each entry is a file, and all files have the same keys:

    catalog/gpus/KIND.yaml         a GPU, and the name of its usual node
    catalog/nodes/NAME.yaml        a node
    catalog/instances/TYPE.yaml    a node, and the name of its GPU
    FILE.yaml                      a GPU and its node; the file gives figures or a catalog name for each

A forecast reads only the two files that it needs, so a larger catalog does not slow the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from zerofit.spec.errors import Problems, UserError, nearest
from zerofit.spec.units import parse_bytes

GB = 1_000_000_000
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ListPrice:
    """On-demand price of a node per hour."""

    usd: float
    date: str  # of the listing
    source: str


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host, as published by its vendor; bandwidths in bytes per second and direction."""

    name: str
    gpus: int
    host_bytes: int  # host memory
    host_bandwidth: float  # of host memory: channels x transfers x 8 bytes
    network: float  # to other nodes, per GPU: 6.25e9 if 8 GPUs share 400 Gb/s
    nvme_read: float  # of all local disks together
    nvme_write: float
    source: str
    price: ListPrice | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, used by one rank.

    Bandwidths are bytes per second; bandwidths of links count one direction.
    """

    kind: str  # the name for `--gpu`
    name: str  # words of the name that torch reports
    memory_bytes: int  # "total capacity" in torch's messages, not the vendor's figure
    tflops: dict[str, float]  # dense peak by precision, without TF32 (off by default)
    bandwidth: float  # of the device's memory
    link: float  # to the other devices of its node
    link_name: str
    pcie: float  # to host memory, over PCIe or NVLink-C2C
    node: Node  # its usual node
    source: str  # of FLOP/s, bandwidth and link
    memory_source: str
    host_link: str = "PCIe"  # name of the link to host memory
    architecture: str = ""  # hopper, cdna3, ...: decides memory outside of torch's allocator; "" if unknown
    unified_memory: bool = False  # the GPU has no memory of its own: it uses the host's, as in a DGX Spark
    compute_capability: tuple[int, int] = (8, 0)  # an A100's, as the next figure, if a user's file has none
    multiprocessors: int = 108

    def peak(self, precision: str) -> float | None:
        """Return the peak FLOP/s at "bf16", "fp16" or "fp32"; None if unsupported."""
        tflops = self.tflops.get(precision)
        return None if tflops is None else tflops * 1e12


CATALOG = Path(__file__).parents[1] / "catalog"
SUFFIXES = (".yaml", ".yml")
# Sizes have a unit. Bandwidths are per second; bandwidths of links count one direction.
GPU_FIGURES = {
    "memory": "memory of one device, as its driver reports it: 80GiB",
    "tflops": "dense peaks: {bf16: 989, fp16: 989, fp32: 67}",
    "bandwidth": "bandwidth of the device's memory, per second: 3.35TB",
    "link": "bandwidth to other devices of the node, per second and direction: 450GB",
    "pcie": "bandwidth to host memory, per second and direction: 63GB; NVLink-C2C 450GB",
}
# Sources in the catalog: docs.nvidia.com/cuda (CUDA GPUs), NVIDIA's architecture whitepapers, AMD's data sheets
# (gfx942, gfx950, gfx90a, compute units of a device)
GPU_MODEL = {
    "architecture": "architecture of the GPU: hopper; zerofit uses it to forecast memory outside of tensors",
    "capability": "CUDA's compute capability: [9, 0]",
    "multiprocessors": "streaming multiprocessors of one device: 132",
}
UNIFIED = {"unified_memory": "true if the GPU uses the host's memory [false]"}
NODE_FIGURES = {
    "network": "bandwidth to other nodes, per second and device: 50GB; 6.25GB if 8 devices share 400 Gb/s",
    "gpus": "devices per node [8]",
    "host_memory": "host memory per node [1TiB]",
    "host_bandwidth": "bandwidth of a node's host memory, per second: 512GB [614.4GB]",
    "nvme_read": "total read bandwidth of a node's disks, per second: 25GB [12GB]",
    "nvme_write": "total write bandwidth of a node's disks, per second: 12GB [6GB]",
}
PRICE = {
    "price": "US dollars per device and hour",
    "price_date": "date of the price: 2026-11-01",
    "price_source": "where the price is published",
}
NAMES = {
    "gpu": "a GPU of the catalog, instead of its figures: h100-80gb",
    "node": "a node or instance type of the catalog, instead of its figures: dgx-h100",
    "torch_name": "words of the name that torch reports: H100 PCIe",
    "link_name": "name of the link between devices: NVLink 4",
    "host_link": "name of the link to host memory [PCIe]",
    "name": "name of the node: p5.48xlarge",
}
ORIGIN = {
    "source": "who publishes the figures: NVIDIA H100 data sheet",
    "memory_source": "who reports the memory",
    "date": "date of the source, or the day when it was read: 2024 or 2026-11-23",
}
KEYS = {**GPU_FIGURES, **GPU_MODEL, **UNIFIED, **NODE_FIGURES, **PRICE, **NAMES, **ORIGIN}
# of the files in each folder of the catalog
REQUIRED = {
    "gpus": (*GPU_FIGURES, *GPU_MODEL, "torch_name", "link_name", "node", *ORIGIN),
    "nodes": (*NODE_FIGURES, "name", "source", "date"),
    "instances": (*NODE_FIGURES, "name", "source", "date", "gpu"),
}
# the field of `Device` that each key of a GPU becomes
DEVICE_FIELDS = {"torch_name": "name", "memory": "memory_bytes", "capability": "compute_capability"}
for _key in (*GPU_FIGURES, *GPU_MODEL, *UNIFIED, "link_name", "host_link", "memory_source"):
    DEVICE_FIELDS.setdefault(_key, _key)
# the field of `Node` that each figure of a node becomes
NODE_FIELDS = {key: "host_bytes" if key == "host_memory" else key for key in NODE_FIGURES}
SIZES = (*(key for key in (*GPU_FIGURES, *NODE_FIGURES) if key not in ("tflops", "gpus")),)
DEFAULT_NODE = "h100-pcie-server"  # has what a user's file leaves out
MOST_GPUS = 1024  # per node
LARGEST = 1e18  # largest figure that a file may have
PRECISIONS = ("bf16", "fp16", "fp32")
ARCHITECTURES = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4")


def entry_names(folder: str) -> tuple[str, ...]:
    """Return the names of the entries in "gpus", "nodes" or "instances" of the catalog."""
    return tuple(sorted(path.stem for path in (CATALOG / folder).glob("*.yaml")))


def read_device(path: Path, where: str = "--gpu") -> Device:
    """Return the device that a user's file describes, of kind `own:NAME`.

    Raises UserError with all problems.
    """
    entry = _read(path, where)
    return _device(path, entry, kind=f"own:{path.stem}", node=_node(path, entry))


@cache
def read_gpu(kind: str) -> Device:
    """Return a GPU of the catalog, in its usual node."""
    path = CATALOG / "gpus" / f"{kind}.yaml"
    entry = _read(path, required=REQUIRED["gpus"])
    return _device(path, entry, kind=kind, node=read_node(entry["node"]))


@cache
def read_node(name: str) -> Node:
    """Return a node of the catalog, or the node of an instance type."""
    folder = "nodes" if name in entry_names("nodes") else "instances"
    path = CATALOG / folder / f"{name}.yaml"
    return _node(path, _read(path, required=REQUIRED[folder]))


@cache
def read_instance(name: str) -> Device:
    """Return an instance type's GPU, in the node that the instance type describes."""
    path = CATALOG / "instances" / f"{name}.yaml"
    entry = _read(path, required=REQUIRED["instances"])
    return _device(path, entry, kind=entry["gpu"], node=read_node(name))


def _read(path: Path, where: str = "", required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the entry of a file, with sizes in bytes. Raises UserError with all problems."""
    from zerofit.spec.foreign_yaml import read_own_values  # most commands need neither a GPU nor PyYAML

    hint = "write it as lines of `key: value`; keys: " + ", ".join(KEYS)
    entry, problems = read_own_values(path, hint=hint, where=where), Problems()
    if not required:  # a user's file: a name in the catalog replaces figures
        required = () if "gpu" in entry else tuple(GPU_FIGURES)
        required += () if "node" in entry else ("network",)
    _check_keys(path, entry, required, problems, where)
    sizes = {}
    for key in (key for key in SIZES if key in entry):
        try:
            sizes[key] = parse_bytes(str(entry[key]), where)
        except UserError as error:
            message = f"{path}: {key}: {error.problems[0].message}"
            problems.add("bad-size", message, f"{key}: {KEYS[key]}", where)
    tflops = _tflops(path, entry["tflops"], problems, where) if entry.get("tflops") is not None else {}
    gpus, price = entry.get("gpus", 1), entry.get("price")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= MOST_GPUS:
        problems.add("bad-value", f"{path}: gpus: got {gpus!r}", f"use 1 to {MOST_GPUS}", where)
    if price is not None and not _positive(price):
        problems.add("bad-value", f"{path}: price: got {price!r}", f"price: {KEYS['price']}", where)
    _check_model(path, entry, problems, where)
    problems.raise_if_any()
    return entry | sizes | {"tflops": tflops}


def _check_keys(
    path: Path, entry: dict[object, object], required: tuple[str, ...], problems: Problems, where: str
) -> None:
    for key in entry.keys() - KEYS.keys():
        hint = nearest(str(key), KEYS)
        problems.add("unknown-key", f"{path}: unknown key {key!r}", hint or f"known: {', '.join(KEYS)}", where)
    for key in required:
        if entry.get(key) is None:
            problems.add("missing-key", f"{path}: {key} is missing", f"{key}: {KEYS[key]}", where)
    for key, folders in (("gpu", ["gpus"]), ("node", ["nodes", "instances"])):
        known = [name for folder in folders for name in entry_names(folder)]
        if key in entry and entry[key] not in known:
            hint = nearest(str(entry[key]), known) or f"{key}: {KEYS[key]}"
            problems.add("bad-value", f"{path}: {key}: no {entry[key]!r} in the catalog", hint, where)


def _check_model(path: Path, entry: dict[object, object], problems: Problems, where: str) -> None:
    capability, multiprocessors = entry.get("capability", [8, 0]), entry.get("multiprocessors", 1)
    right = {
        "architecture": entry.get("architecture", "") in ("", *ARCHITECTURES),
        "capability": isinstance(capability, list) and [type(number) for number in capability] == [int, int],
        "multiprocessors": type(multiprocessors) is int and 0 < multiprocessors < LARGEST,
        "unified_memory": entry.get("unified_memory", False) in (True, False),
    }
    for key in (key for key, is_right in right.items() if not is_right):
        hint = f"{key}: {KEYS[key]}"
        hint += f"; known: {', '.join(ARCHITECTURES)}" if key == "architecture" else ""
        problems.add("bad-value", f"{path}: {key}: got {entry[key]!r}", hint, where)


def _tflops(path: Path, value: object, problems: Problems, where: str) -> dict[str, float]:
    peaks = value if isinstance(value, Mapping) else {}
    if "fp32" not in peaks or peaks.keys() - set(PRECISIONS) or not all(map(_positive, peaks.values())):
        hint = f"tflops: {KEYS['tflops']}; fp32 is required, bf16 and fp16 if the device supports them"
        problems.add("bad-value", f"{path}: tflops: got {value!r}", hint, where)
        return {}
    return {str(name): float(peak) for name, peak in peaks.items()}


def _positive(value: object) -> bool:
    # YAML has .nan and .inf, which fail these comparisons.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def _device(path: Path, entry: dict[str, Any], *, kind: str, node: Node) -> Device:
    figures = {field: entry[key] for key, field in DEVICE_FIELDS.items() if entry.get(key)}
    figures |= {key: str(figures[key]) for key in ("name", "link_name", "host_link", "memory_source") if key in figures}
    if "compute_capability" in figures:
        figures["compute_capability"] = tuple(entry["capability"])
    if "memory" in entry:
        figures.setdefault("memory_source", str(path))
    if "gpu" in entry:  # the file's own figures go before those of the catalog's GPU
        return replace(read_gpu(entry["gpu"]), kind=kind, node=node, **figures)
    assumed: dict[str, Any] = {
        "name": path.stem,
        "link_name": "PCIe" if entry["link"] <= entry["pcie"] else "its own links",
    }
    return Device(kind=kind, node=node, source=_source(path, entry), **assumed | figures)


def _node(path: Path, entry: dict[str, Any]) -> Node:
    figures = {field: entry[key] for key, field in NODE_FIELDS.items() if key in entry}
    price, source = None, _source(path, entry)
    if len(figures) < len(NODE_FIELDS):  # another node has the missing figures
        base = read_node(entry.get("node", DEFAULT_NODE))
        if not figures and "price" not in entry:
            return base
        figures = {field: getattr(base, field) for field in NODE_FIELDS.values()} | figures
        shares = {"host memory bandwidth": "host_bandwidth", "disks": "nvme_read"}
        assumed = " and ".join(words for words, key in shares.items() if key not in entry)
        source += f"; {assumed} assumed as in a {base.name}" if assumed else ""
    if entry.get("price") is not None:
        published = str(entry.get("price_source", path))
        date = str(entry.get("price_date", "undated"))
        price = ListPrice(usd=entry["price"] * figures["gpus"], date=date, source=published)
    return Node(name=str(entry.get("name", f"the node of {path.name}")), source=source, price=price, **figures)


def _source(path: Path, entry: dict[str, object]) -> str:
    if "source" not in entry:
        return str(path)
    return f"{entry['source']} ({entry['date']})" if "date" in entry else str(entry["source"])
