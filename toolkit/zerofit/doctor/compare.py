"""Checks of hosts from their facts: each host alone, compared with the other hosts, and compared with this machine."""

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
FREE_SHARE = 0.2  # share of a GPU's memory; with less free memory no run can start
USED_BYTES = 2**30  # a display and a driver use less than this
WARN_S, FAIL_S = 2.0, 60.0  # clock difference; logs, and builds on shared disks, are ordered by time


def checks(hosts: Sequence[Host], facts: Facts, own: dict[str, object], accelerator: str | None) -> list[Check]:
    """Check versions, code, run file, slots, processes and GPUs of all hosts.

    Run folder, clock and network are checked elsewhere.
    """
    cuda = any(host_facts["gpus"] for host_facts in facts.values()) if accelerator is None else accelerator == "cuda"
    names = [host_facts["gpus"][0]["name"] for host_facts in facts.values() if host_facts["gpus"]]
    found: list[Check] = []
    for host in hosts:
        if host.name not in facts:
            continue
        host_facts = facts[host.name]
        found += [_versions(host.name, host_facts, own), _code(host.name, host_facts, own)]
        found += _run_file(host.name, host_facts, own)
        found += [slots(host, host_facts, cuda=cuda), _strays(host.name, host_facts)]
        found += gpus(host, host_facts, names)
    return found


def _versions(host: str, host_facts: dict[str, Any], own: dict[str, Any]) -> Check:
    theirs, here = host_facts["versions"], own["versions"]
    hard, soft = (
        [f"{name} {theirs.get(name)} (here {here[name]})" for name in names if theirs.get(name) != here[name]]
        for names in (SAME, ALIKE)
    )
    good = ", ".join(
        f"{name} {theirs.get(name)}" for name in ("torch", "deepspeed", "nccl", "cuda") if theirs.get(name)
    )
    hint = "no failure is known with this combination, but the same environment on all hosts is safer"
    if hard:
        differ = [name for name in ("torch", "deepspeed") if here[name] not in (None, theirs.get(name))]
        wanted = [f"{name}=={here[name]}" for name in differ]
        hint = f"install the same environment on {host}"
        hint += f": {host_facts['python']} -m pip install {' '.join(wanted)}" if wanted else ""
    status, expected = FAIL if hard else WARN, "the same versions as on this machine"
    return check("versions", host, ", ".join(hard + soft), good, status, expected, hint)


def _code(host: str, host_facts: dict[str, Any], own: dict[str, Any]) -> Check:
    words = {"zerofit": "zerofit's source", "model": "the model's source"}
    theirs, here = host_facts["code"], own["code"]
    wrong = [
        f"{word} is missing" if theirs[name] is None else f"{word} differs ({theirs[name][:HASH]})"
        for name, word in words.items()
        if theirs[name] != here[name]
    ]
    good = here["zerofit"][:HASH]
    hint = f"copy this folder to {host}, or keep it on a file system that all hosts share"
    return check("code", host, ", ".join(wrong), good, FAIL, f"as here ({good})", hint)


def _run_file(host: str, host_facts: dict[str, object], own: dict[str, Any]) -> Iterator[Check]:
    """Check that a host's run file, if there is one, is the same as here.

    It may be missing, because ranks read the run folder.
    """
    if own["run_file"] is None:
        return
    other = host_facts["run_file"] not in (None, own["run_file"])
    problem, good = (
        "the host's file of the same name differs",
        "the same" if host_facts["run_file"] else "only on this machine",
    )
    expected, hint = f"as here ({own['run_file'][:HASH]})", "this machine's file is used; update the file on the host"
    yield check("run-file", host, problem if other else "", good, WARN, expected, hint)


def _strays(host: str, host_facts: dict[str, Any]) -> Check:
    count = Counter((stray["user"], stray["run"]) for stray in host_facts["strays"])
    shown = [f"{n} of {user}" + (f" (run {run[:HASH]})" if run else "") for (user, run), n in count.items()]
    pids = " ".join(str(stray["pid"]) for stray in host_facts["strays"][:PIDS])
    more = " ..." if len(host_facts["strays"]) > PIDS else ""
    hint = f"wait for that run, or stop it on {host}: kill {pids}{more}"
    expected = "no rank of another run"
    return check("processes", host, ", ".join(shown), "no other run", WARN, expected=expected, hint=hint)


def slots(host: Host, host_facts: dict[str, Any], *, cuda: bool) -> Check:
    """Check whether the host has a GPU for each of its slots. If `cuda` is False, check its cores instead."""
    count, what = (len(host_facts["gpus"]), "GPUs") if cuda else (host_facts["cores"]["usable"], "cores")
    problem, hint = "", f"write slots={count} in the hostfile"
    if cuda and host_facts["gpu_error"]:
        problem = f"nvidia-smi fails: {host_facts['gpu_error']}"
        hint = f"repair the driver on {host} (after an update: reboot), or leave the host out with --exclude"
    elif cuda and not count:
        problem, hint = "no GPU found", f"run nvidia-smi on {host}, or leave the host out with --exclude"
    elif cuda and max(host.ids) >= count:
        problem = f"there is no device {max(host.ids)}: the host has {count} {what}"
    elif host.slots > count:
        problem = f"{host.slots} slots, {count} {what}"
    good, expected = f"{host.slots} of {count} {what}", f"at most as many slots as {what}"
    return check("slots", host.name, problem, good, FAIL if cuda else WARN, expected=expected, hint=hint)


def gpus(host: Host, host_facts: dict[str, Any], names: list[str]) -> Iterator[Check]:
    """Check memory and processes of each GPU that ranks will use, and whether all hosts have the same kind."""
    for gpu in host_facts["gpus"]:
        if gpu["index"] in host.ids:
            yield _memory(host.name, gpu)
    if host_facts["gpus"]:
        kind = host_facts["gpus"][0]["name"]
        problem = f"{kind}; other hosts have {names[0]}" if kind != names[0] else ""
        hint = "all ranks run at the speed of the slowest GPU and must fit the smallest memory"
        yield check("gpu-kind", host.name, problem, kind, WARN, expected="one kind of GPU", hint=hint)


def _memory(host: str, gpu: dict[str, Any]) -> Check:
    total, used = gpu["total_bytes"], gpu["used_bytes"] or 0
    by = ", ".join(f"{p['name']} (process {p['pid']})" for p in gpu["processes"])
    problem = ""
    if used > USED_BYTES or by:
        problem = f"GPU {gpu['index']}: {shown_bytes(used)} in use" + (f" by {by}" if by else "")
    status = FAIL if total and total - used < FREE_SHARE * total else WARN
    good = f"GPU {gpu['index']}: {gpu['name']}, free"
    hint = "stop the processes on it, or leave the device out with --exclude"
    return check("gpu-memory", host, problem, good, status, expected="nothing else on it", hint=hint)


def clock(host: str, difference_s: float, error_s: float) -> Check:
    """Check a clock that differs from this machine's clock by `difference_s`, measured to within `error_s` seconds."""
    sure = max(0.0, abs(difference_s) - error_s)
    words = f"{abs(difference_s):.3g} s {'ahead' if difference_s > 0 else 'behind'} (±{error_s:.1g} s)"
    problem = words if sure > WARN_S else ""
    status, hint = FAIL if sure > FAIL_S else WARN, f"run chrony or systemd-timesyncd on {host}"
    return check("clock", host, problem, words, status, expected=f"within {WARN_S:g} s", hint=hint)


def disk(facts: Facts, checkpoint_bytes: int | None) -> list[Check]:
    """Check the free space for checkpoints on the run folder's file system; no check if `checkpoint_bytes` is None."""
    if checkpoint_bytes is None:
        return []
    return [
        _space(host, host_facts["run_folder"]["free_bytes"], checkpoint_bytes) for host, host_facts in facts.items()
    ]


def _space(host: str, free: int, checkpoint_bytes: int) -> Check:
    short = f"{shown_bytes(free)} free, a checkpoint needs {shown_bytes(checkpoint_bytes)}"
    tight = free < 2 * checkpoint_bytes  # a new checkpoint is written before an old checkpoint is removed
    status, good = FAIL if free < checkpoint_bytes else WARN, f"{shown_bytes(free)} free"
    expected, hint = "space for two checkpoints", "delete files, or choose another folder with --output"
    return check("disk", host, short if tight else "", good, status, expected=expected, hint=hint)


def folders(facts: Facts, folder: Path, seen: set[str]) -> list[Check]:
    """Check that all hosts can write to the same run folder.

    `seen`: the hosts whose files in the folder have appeared on this machine.
    """
    found = []
    for host, host_facts in facts.items():
        seen_folder = host_facts["run_folder"]
        problem, hint = "", "with --output, choose a folder on a file system that all hosts share"
        if not seen_folder["same"]:
            problem = f"not shared: {folder} is {'another folder' if seen_folder['exists'] else 'missing'} on {host}"
        elif not seen_folder["writable"]:
            problem = f"{host} cannot write to {folder}: {seen_folder['error']}"
            hint = f"give your user on {host} write permission"
        elif host not in seen:
            problem = f"not shared: a file written to {folder} on {host} does not appear here"
        good = "shared and writable"
        expected = "one folder for all hosts: all ranks write their checkpoints and logs to it"
        found.append(check("run-folder", host, problem, good, expected=expected, hint=hint))
    return found
