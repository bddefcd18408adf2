"""Check hosts by their facts: alone, against each other, and against this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.doctor.facts import HostFacts
from zerofit.doctor.system import GpuFacts
from zerofit.launch.hostfile import Host
from zerofit.spec.units import shown_bytes

SAME = ("zerofit", "torch", "torch_git", "deepspeed", "cuda", "hip", "nccl")  # ranks that differ fail or hang
ALIKE = ("python", "transformers", "torchvision", "numpy")
HASH = 12  # digits shown
PIDS = 8
Facts = dict[str, HostFacts]
FREE_SHARE = 0.2  # share of a GPU's memory; with less free memory no run can start
USED_BYTES = 2**30  # a display and a driver use less than this
WARN_S, FAIL_S = 2.0, 60.0  # clock difference; logs, and builds on shared disks, are ordered by time


def checks(hosts: Sequence[Host], facts: Facts, own: HostFacts) -> list[Check]:
    """Check versions, code, run file, slots, processes and GPUs of all hosts.

    Run folder, clock, disk and network are checked elsewhere.
    """
    # If one host has GPUs, the run is meant for GPUs. A host without them is then a failure, not a host for CPU ranks.
    names = [host_facts["gpus"][0]["name"] for host_facts in facts.values() if host_facts["gpus"]]
    found: list[Check] = []
    for host in hosts:
        if host.name not in facts:
            continue
        host_facts = facts[host.name]
        found += [_versions(host.name, host_facts, own), _code(host.name, host_facts, own)]
        found += _run_file(host.name, host_facts, own)
        found += [slots(host, host_facts, cuda=bool(names)), _strays(host.name, host_facts)]
        found += gpus(host, host_facts, names)
    return found


def _versions(host: str, host_facts: HostFacts, own: HostFacts) -> Check:
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
        # torch's wheel brings CUDA and NCCL, so the command for pip names only these two packages.
        differ = [name for name in ("torch", "deepspeed") if here[name] not in (None, theirs.get(name))]
        wanted = [f"{name}=={here[name]}" for name in differ]
        hint = f"install the same environment on {host}"
        hint += f": {host_facts['python']} -m pip install {' '.join(wanted)}" if wanted else ""
    status, expected = FAIL if hard else WARN, "the same versions as on this machine"
    return check("versions", host, ", ".join(hard + soft), good, status, expected, hint)


def _code(host: str, host_facts: HostFacts, own: HostFacts) -> Check:
    wrong = []
    for name, word in (("zerofit", "zerofit's source"), ("model", "the model's source")):
        theirs = host_facts["code"][name]
        if theirs != own["code"][name]:
            wrong.append(f"{word} is missing" if theirs is None else f"{word} differs ({theirs[:HASH]})")
    good = own["code"]["zerofit"][:HASH]
    hint = f"copy this folder to {host}, or keep it on a file system that all hosts share"
    return check("code", host, ", ".join(wrong), good, FAIL, f"as here ({good})", hint)


def _run_file(host: str, host_facts: HostFacts, own: HostFacts) -> Iterator[Check]:
    if own["run_file"] is None:
        return
    theirs = host_facts["run_file"]
    # a host without the file is fine, because ranks read the run folder
    problem = "the host's file of the same name differs" if theirs not in (None, own["run_file"]) else ""
    good = "the same" if theirs else "only on this machine"
    expected, hint = f"as here ({own['run_file'][:HASH]})", "this machine's file is used; update the file on the host"
    yield check("run-file", host, problem, good, WARN, expected, hint)


def _strays(host: str, host_facts: HostFacts) -> Check:
    strays = host_facts["strays"]
    count = Counter((stray["user"], stray["run"]) for stray in strays)
    shown = [f"{n} of {user}" + (f" (run {run[:HASH]})" if run else "") for (user, run), n in count.items()]
    pids = " ".join(str(stray["pid"]) for stray in strays[:PIDS])
    hint = f"wait for that run, or stop it on {host}: kill {pids}{' ...' if len(strays) > PIDS else ''}"
    expected = "no rank of another run"
    return check("processes", host, ", ".join(shown), "no other run", WARN, expected=expected, hint=hint)


def slots(host: Host, host_facts: HostFacts, *, cuda: bool) -> Check:
    """Check that the host has a GPU for each of its slots, or a core if `cuda` is False."""
    count, what = (len(host_facts["gpus"]), "GPUs") if cuda else (host_facts["cores"]["usable"], "cores")
    problem, hint = "", f"write slots={count} in the hostfile"
    if cuda and host_facts["gpu_error"]:
        problem = f"nvidia-smi fails: {host_facts['gpu_error']}"
        hint = f"repair the driver on {host} (after an update: reboot), or leave the host out with --exclude"
    elif cuda and not count:
        problem, hint = "no GPU found", f"run nvidia-smi on {host}, or leave the host out with --exclude"
    # Selected devices can be missing although there are enough of them: device 7 of a host with 4 GPUs.
    elif cuda and max(host.ids) >= count:
        problem = f"there is no device {max(host.ids)}: the host has {count} {what}"
    elif host.slots > count:
        problem = f"{host.slots} slots, {count} {what}"
    good, expected = f"{host.slots} of {count} {what}", f"at most as many slots as {what}"
    return check("slots", host.name, problem, good, FAIL if cuda else WARN, expected=expected, hint=hint)


def gpus(host: Host, host_facts: HostFacts, names: list[str]) -> Iterator[Check]:
    """Check memory and processes of each GPU that ranks will use, and its kind.

    `names`: a GPU's name from each host.
    """
    for gpu in host_facts["gpus"]:
        if gpu["index"] in host.ids:
            yield _gpu_memory(host.name, gpu)
    if host_facts["gpus"]:
        kind = host_facts["gpus"][0]["name"]
        problem = f"{kind}; other hosts have {names[0]}" if kind != names[0] else ""
        hint = "all ranks run at the speed of the slowest GPU and must fit the smallest memory"
        yield check("gpu-kind", host.name, problem, kind, WARN, expected="one kind of GPU", hint=hint)


def _gpu_memory(host: str, gpu: GpuFacts) -> Check:
    total, used = gpu["total_bytes"], gpu["used_bytes"] or 0
    by = ", ".join(f"{p['name']} (process {p['pid']})" for p in gpu["processes"])
    problem = ""
    if used > USED_BYTES or by:
        problem = f"GPU {gpu['index']}: {shown_bytes(used)} in use" + (f" by {by}" if by else "")
    # Another process may leave enough memory for this run, so some use is only a warning.
    status = FAIL if total and total - used < FREE_SHARE * total else WARN
    good = f"GPU {gpu['index']}: {gpu['name']}, free"
    hint = "stop the processes on it, or leave the device out with --exclude"
    return check("gpu-memory", host, problem, good, status, expected="nothing else on it", hint=hint)


def clock(host: str, difference_s: float, error_s: float) -> Check:
    """Check a host's clock, which differs from this machine's by `difference_s` ± `error_s`."""
    # The difference is at least this large. A slow network alone must not fail the check.
    least_s = max(0.0, abs(difference_s) - error_s)
    words = f"{abs(difference_s):.3g} s {'ahead' if difference_s > 0 else 'behind'} (±{error_s:.1g} s)"
    problem = words if least_s > WARN_S else ""
    status, hint = FAIL if least_s > FAIL_S else WARN, f"run chrony or systemd-timesyncd on {host}"
    return check("clock", host, problem, words, status, expected=f"within {WARN_S:g} s", hint=hint)


def disk(facts: Facts, checkpoint_bytes: int) -> list[Check]:
    """Check the free space for checkpoints of this size in the run folder."""
    found = []
    expected, hint = "space for two checkpoints", "delete files, or choose another folder with --output"
    for host, host_facts in facts.items():
        assert host_facts["run_folder"]
        free = host_facts["run_folder"]["free_bytes"]
        good, problem = f"{shown_bytes(free)} free", ""
        if free < 2 * checkpoint_bytes:  # a new checkpoint is written before an old checkpoint is removed
            problem = f"{good}, a checkpoint needs {shown_bytes(checkpoint_bytes)}"
        status = FAIL if free < checkpoint_bytes else WARN
        found.append(check("disk", host, problem, good, status, expected=expected, hint=hint))
    return found


def folders(facts: Facts, folder: Path, seen: set[str]) -> list[Check]:
    """Check that all hosts can write to the same run folder.

    `seen`: the hosts whose files in the folder have appeared on this machine.
    """
    found = []
    for host, host_facts in facts.items():
        seen_folder = host_facts["run_folder"]
        assert seen_folder
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
