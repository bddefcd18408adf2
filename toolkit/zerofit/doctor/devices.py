"""Slots against the devices that a host has, and whether those are free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.launch.hostfile import Host
from zerofit.spec.units import shown_bytes

FREE_SHARE = 0.2  # of a GPU's memory, below which nothing trains
USED_BYTES = 2**30  # more is more than a display and a driver hold


def slots(host: Host, one: dict[str, Any], *, cuda: bool) -> Check:
    """Whether there is a device, or else a core, for each rank."""
    count, what = (len(one["gpus"]), "GPUs") if cuda else (one["cores"]["usable"], "cores")
    problem, hint = "", f"write slots={count} in the hostfile"
    if cuda and one["gpu_error"]:
        problem = f"nvidia-smi fails: {one['gpu_error']}"
        hint = "mend the driver there (after an update: reboot), or leave the host out with --exclude"
    elif cuda and not count:
        problem, hint = "no GPU is seen there", "look at nvidia-smi there, or leave the host out with --exclude"
    elif cuda and max(host.ids) >= count:
        problem = f"device {max(host.ids)} is asked for, {count} {what} are there"
    elif host.slots > count:
        problem = f"{host.slots} slots, {count} {what}"
    good, expected = f"{host.slots} of {count} {what}", f"at most as many slots as {what}"
    return check("slots", host.name, problem, good, FAIL if cuda else WARN, expected=expected, hint=hint)


def gpus(host: Host, one: dict[str, Any], names: list[str]) -> Iterator[Check]:
    """Memory in use and processes on each GPU that ranks will have, and whether all hosts have the same kind."""
    for gpu in one["gpus"]:
        if gpu["index"] in host.ids:
            yield _memory(host.name, gpu)
    if one["gpus"]:
        kind = one["gpus"][0]["name"]
        problem = f"{kind}, where others have {names[0]}" if kind != names[0] else ""
        hint = "the slowest sets the pace, and the smallest memory counts"
        yield check("gpu-kind", host.name, problem, kind, WARN, expected="one kind of GPU", hint=hint)


def _memory(host: str, gpu: dict[str, Any]) -> Check:
    total, used = gpu["total_bytes"], gpu["used_bytes"] or 0
    by = ", ".join(f"{p['name']} (process {p['pid']})" for p in gpu["processes"])
    problem = ""
    if used > USED_BYTES or by:
        problem = f"GPU {gpu['index']}: {shown_bytes(used)} in use" + (f" by {by}" if by else "")
    status = FAIL if total and total - used < FREE_SHARE * total else WARN
    good = f"GPU {gpu['index']}: {gpu['name']}, free"
    hint = "end what is on it, or leave the device out with --exclude"
    return check("gpu-memory", host, problem, good, status, expected="nothing else on it", hint=hint)
