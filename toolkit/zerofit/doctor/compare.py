"""Checks of hosts, from their facts: each by itself, with each other, and with the asking side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.launch.hostfile import Host
from zerofit.spec.units import shown_bytes

SAME = ("zerofit", "torch", "torch_git", "deepspeed", "cuda", "hip", "nccl")  # ranks that differ fail or hang
ALIKE = ("python", "transformers", "torchvision", "numpy")
HASH = 12  # digits shown
PIDS = 8
Facts = dict[str, dict[str, Any]]
FREE_SHARE = 0.2  # of a GPU's memory, below which nothing trains
USED_BYTES = 2**30  # more is more than a display and a driver hold
WARN_S, FAIL_S = 2.0, 60.0  # logs are ordered by time; builds on a shared file system go by it too


def checks(hosts: Sequence[Host], facts: Facts, own: dict[str, Any], accelerator: str | None) -> list[Check]:
    """Check everything but the folder, the clock and the network."""
    cuda = any(one["gpus"] for one in facts.values()) if accelerator is None else accelerator == "cuda"
    names = [one["gpus"][0]["name"] for one in facts.values() if one["gpus"]]
    found: list[Check] = []
    for host in hosts:
        if host.name not in facts:
            continue
        one = facts[host.name]
        found += [_versions(host.name, one, own), _code(host.name, one, own)]
        found += _run_file(host.name, one, own)
        found += [slots(host, one, cuda=cuda), _strays(host.name, one)]
        found += gpus(host, one, names)
    return found


def _versions(host: str, one: dict[str, Any], own: dict[str, Any]) -> Check:
    there, here = one["versions"], own["versions"]
    hard, soft = (
        [f"{name} {there.get(name)} (here {here[name]})" for name in names if there.get(name) != here[name]]
        for names in (SAME, ALIKE)
    )
    good = ", ".join(f"{name} {there.get(name)}" for name in ("torch", "deepspeed", "nccl", "cuda") if there.get(name))
    hint = "nothing is known to fail with it; the same environment everywhere is safer"
    if hard:
        wanted = [f"{name}=={here[name]}" for name in ("torch", "deepspeed") if there.get(name) != here[name]]
        hint = f"install the same environment there: {one['python']} -m pip install {' '.join(wanted)}"
    status, expected = FAIL if hard else WARN, "the same versions on all hosts as here"
    return check("versions", host, ", ".join(hard + soft), good, status, expected, hint)


def _code(host: str, one: dict[str, Any], own: dict[str, Any]) -> Check:
    words = {"zerofit": "zerofit's source", "model": "the model's source"}
    there, here = one["code"], own["code"]
    wrong = [
        f"{word} is missing there" if there[name] is None else f"{word} differs ({there[name][:HASH]})"
        for name, word in words.items()
        if there[name] != here[name]
    ]
    good = here["zerofit"][:HASH]
    hint = "copy this folder there, or keep it on a file system that all hosts share"
    return check("code", host, ", ".join(wrong), good, FAIL, f"as here ({good})", hint)


def _run_file(host: str, one: dict[str, Any], own: dict[str, Any]) -> Iterator[Check]:
    """Check the run file: none there is no problem, since ranks read the run folder; another one is."""
    if own["run_file"] is None:
        return
    other = one["run_file"] not in (None, own["run_file"])
    problem, good = "another run file lies there under the same name", "the same" if one["run_file"] else "only here"
    expected, hint = f"as here ({own['run_file'][:HASH]})", "this side's is used; the other one is out of date"
    yield check("run-file", host, problem if other else "", good, WARN, expected, hint)


def _strays(host: str, one: dict[str, Any]) -> Check:
    """Count processes of other runs, by run."""
    count = Counter((stray["user"], stray["run"]) for stray in one["strays"])
    shown = [f"{n} of {user}" + (f" (run {run[:HASH]})" if run else "") for (user, run), n in count.items()]
    pids = " ".join(str(stray["pid"]) for stray in one["strays"][:PIDS])
    hint = f"wait for that run, or end it there: kill {pids}" + (" ..." if len(one["strays"]) > PIDS else "")
    expected = "no rank of another run"
    return check("processes", host, ", ".join(shown), "no other run", WARN, expected=expected, hint=hint)


def slots(host: Host, one: dict[str, Any], *, cuda: bool) -> Check:
    """Check whether there is a device, or else a core, for each rank."""
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
    """Check memory and processes on each GPU that ranks will have, and whether all hosts have the same kind."""
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


def clock(host: str, difference_s: float, error_s: float) -> Check:
    """Compare its clock with this side's; what the way there leaves open does not count against it."""
    sure = max(0.0, abs(difference_s) - error_s)
    words = f"{abs(difference_s):.3g} s {'ahead' if difference_s > 0 else 'behind'} (±{error_s:.1g} s)"
    problem = words if sure > WARN_S else ""
    status, hint = FAIL if sure > FAIL_S else WARN, "let chrony or systemd-timesyncd run there"
    return check("clock", host, problem, words, status, expected=f"within {WARN_S:g} s", hint=hint)


def disk(facts: Facts, checkpoint_bytes: int | None) -> list[Check]:
    """Check the room for checkpoints where the run folder is."""
    if checkpoint_bytes is None:
        return []
    return [_room(host, one["run_folder"]["free_bytes"], checkpoint_bytes) for host, one in facts.items()]


def _room(host: str, free: int, checkpoint_bytes: int) -> Check:
    short = f"{shown_bytes(free)} free, a checkpoint takes {shown_bytes(checkpoint_bytes)}"
    tight = free < 2 * checkpoint_bytes  # the new one is written before the old one is removed
    status, good = FAIL if free < checkpoint_bytes else WARN, f"{shown_bytes(free)} free"
    expected, hint = "room for two checkpoints", "free some, or name another --output"
    return check("disk", host, short if tight else "", good, status, expected=expected, hint=hint)


def folders(facts: Facts, folder: Path, seen: set[str]) -> list[Check]:
    """Check that the run folder is one that all hosts can write to; `seen`: whose files have come up here."""
    found = []
    for host, one in facts.items():
        there = one["run_folder"]
        problem, hint = "", "name a folder on a file system that all hosts share with --output"
        if not there["same"]:
            problem = f"not shared: {folder} there is {'another folder' if there['exists'] else 'missing'}"
        elif not there["writable"]:
            problem = f"{folder} cannot be written there: {there['error']}"
            hint = "give your user there the right to write"
        elif host not in seen:
            problem = f"not shared: what is written to {folder} there does not appear here"
        good = "shared and writable"
        expected = "one folder for all hosts: checkpoints and logs of all ranks come together in it"
        found.append(check("run-folder", host, problem, good, expected=expected, hint=hint))
    return found
