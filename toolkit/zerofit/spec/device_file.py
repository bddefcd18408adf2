"""A user's own kind of GPU, described in a YAML file for `--gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofit.spec import nodes
from zerofit.spec.device import Device
from zerofit.spec.errors import Problem, Problems, UserError, nearest
from zerofit.spec.units import parse_bytes

SUFFIXES = (".yaml", ".yml")
# keys of the file; the first six are required
KEYS = {
    "memory": "of one device, as its driver reports it: 80GiB",
    "tflops": "dense peaks: {bf16: 989, fp16: 989, fp32: 67}",
    "bandwidth": "of the device's memory, per second: 3.35TB",
    "link": "to the other devices of its node, per second and direction: 450GB",
    "pcie": "to host memory, per second and direction: 63GB; NVLink-C2C 450GB",
    "network": "to other nodes, per second and device: 50GB",
    "gpus": "devices per node [8]",
    "host_memory": "per node [1TiB]",
    "host_bandwidth": "of a node's host memory, per second: 512GB [614.4GB]",
    "price": "US dollars per device and hour",
    "price_date": "date of the price: 2026-11-01",
}
REQUIRED = tuple(KEYS)[:6]
SIZES = ("memory", "bandwidth", "link", "pcie", "network", "host_memory", "host_bandwidth")
MOST_GPUS = 1024  # per node
LARGEST = 1e18  # largest figure that the file may have
PRECISIONS = ("bf16", "fp16", "fp32")


def read_device(path: Path, where: str = "--gpu") -> Device:
    """Return the device that a file describes, of kind `own:NAME`. Raises UserError with all problems."""
    found, problems = _read(path, where), Problems()
    for key in found.keys() - KEYS.keys():
        hint = nearest(str(key), KEYS)
        problems.add("unknown-key", f"{path}: unknown key {key!r}", hint or f"known: {', '.join(KEYS)}", where)
    for key in REQUIRED:
        if found.get(key) is None:
            problems.add("missing-key", f"{path}: {key} is missing", f"{key}: {KEYS[key]}", where)
    sizes = {
        key: problems.attempt(lambda key=key: _size(path, key, found[key], where)) for key in SIZES if key in found
    }
    tflops = _tflops(path, found["tflops"], problems, where) if found.get("tflops") is not None else {}
    gpus, price = found.get("gpus", 8), found.get("price")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= MOST_GPUS:
        problems.add("bad-value", f"{path}: gpus: got {gpus!r}", f"use 1 to {MOST_GPUS}", where)
    if price is not None and not _positive(price):
        problems.add("bad-value", f"{path}: price: got {price!r}", f"price: {KEYS['price']}", where)
    problems.raise_if_any()
    return _device(path, {key: float(size or 0) for key, size in sizes.items()}, tflops, found)


def _read(path: Path, where: str) -> dict[Any, Any]:
    from zerofit.spec.foreign_yaml import read_own_values  # only this kind of device needs PyYAML

    return read_own_values(path, hint="write it as lines of `key: value`; keys: " + ", ".join(KEYS), where=where)


def _size(path: Path, key: str, value: Any, where: str) -> int:
    try:
        return parse_bytes(str(value), where)
    except UserError as error:
        message, hint = f"{path}: {key}: {error.problems[0].message}", f"{key}: {KEYS[key]}"
        raise UserError(Problem(kind="bad-size", message=message, hint=hint, where=where)) from None


def _tflops(path: Path, value: Any, problems: Problems, where: str) -> dict[str, float]:
    peaks = value if isinstance(value, Mapping) else {}
    if "fp32" not in peaks or peaks.keys() - set(PRECISIONS) or not all(map(_positive, peaks.values())):
        hint = f"tflops: {KEYS['tflops']}; fp32 is required, bf16 and fp16 if the device supports them"
        problems.add("bad-value", f"{path}: tflops: got {value!r}", hint, where)
        return {}
    return {str(name): float(peak) for name, peak in peaks.items()}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def _device(path: Path, sizes: Mapping[str, float], tflops: dict[str, float], found: Mapping[Any, Any]) -> Device:
    price, gpus, base = found.get("price"), found.get("gpus", 8), nodes.H100_PCIE_SERVER
    if price is not None:
        price = nodes.ListPrice(usd=price * gpus, date=str(found.get("price_date", "undated")), source=str(path))
    assumed = "disks" if "host_bandwidth" in sizes else "host memory bandwidth and disks"
    node = replace(
        base,
        name=f"the node of {path.name}",
        gpus=gpus,
        host_bytes=int(sizes.get("host_memory", base.host_bytes)),
        host_bandwidth=sizes.get("host_bandwidth", base.host_bandwidth),
        network=sizes["network"],
        source=f"{path}; {assumed} assumed as in a {base.name}",
        price=price,
    )
    return Device(
        kind=f"own:{path.stem}",
        name=path.stem,
        memory_bytes=int(sizes["memory"]),
        tflops=tflops,
        bandwidth=sizes["bandwidth"],
        link=sizes["link"],
        pcie=sizes["pcie"],
        link_name="PCIe" if sizes["link"] <= sizes["pcie"] else "its own links",
        node=node,
        source=str(path),
        memory_source=str(path),
    )
