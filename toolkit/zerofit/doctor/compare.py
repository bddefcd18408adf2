"""What is wrong with hosts, from their facts: each by itself, with each other, and with the asking side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from zerofit.doctor import devices
from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.launch.hostfile import Host

SAME = ("zerofit", "torch", "torch_git", "deepspeed", "cuda", "hip", "nccl")  # ranks that differ fail or hang
ALIKE = ("python", "transformers", "torchvision", "numpy")
HASH = 12  # digits shown
PIDS = 8
Facts = dict[str, dict[str, Any]]


def checks(hosts: Sequence[Host], facts: Facts, own: dict[str, Any], accelerator: str | None) -> list[Check]:
    """Everything but the folder and the network."""
    cuda = any(one["gpus"] for one in facts.values()) if accelerator is None else accelerator == "cuda"
    names = [one["gpus"][0]["name"] for one in facts.values() if one["gpus"]]
    found: list[Check] = []
    for host in hosts:
        if host.name not in facts:
            continue
        one = facts[host.name]
        found += [_versions(host.name, one, own), _code(host.name, one, own)]
        found += _run_file(host.name, one, own)
        found += [devices.slots(host, one, cuda=cuda), _strays(host.name, one)]
        found += devices.gpus(host, one, names)
    return found


def _versions(host: str, one: dict[str, Any], own: dict[str, Any]) -> Check:
    there, here = one["versions"], own["versions"]
    hard, soft = (
        [f"{name} {there.get(name)} (here {here[name]})" for name in names if there.get(name) != here[name]]
        for names in (SAME, ALIKE)
    )
    good = ", ".join(f"{name} {there.get(name)}" for name in ("torch", "deepspeed", "nccl", "cuda") if there.get(name))
    return check(
        "versions",
        host,
        ", ".join(hard + soft),
        good,
        FAIL if hard else WARN,
        expected="the same versions on all hosts as here",
        hint=f"install the same environment there: {one['python']} -m pip install "
        + " ".join(f"{name}=={here[name]}" for name in ("torch", "deepspeed") if there.get(name) != here[name])
        if hard
        else "nothing is known to fail with it; the same environment everywhere is safer",
    )


def _code(host: str, one: dict[str, Any], own: dict[str, Any]) -> Check:
    words = {"zerofit": "zerofit's source", "model": "the model's source"}
    there, here = one["code"], own["code"]
    wrong = [
        f"{word} is missing there" if there[name] is None else f"{word} differs ({there[name][:HASH]})"
        for name, word in words.items()
        if there[name] != here[name]
    ]
    return check(
        "code",
        host,
        ", ".join(wrong),
        here["zerofit"][:HASH],
        expected=f"as here ({here['zerofit'][:HASH]})",
        hint="copy this folder there, or keep it on a file system that all hosts share",
    )


def _run_file(host: str, one: dict[str, Any], own: dict[str, Any]) -> Iterator[Check]:
    """A run file that is not there is no problem, since ranks read the run folder; another one there is."""
    if own["run_file"] is None:
        return
    problem = (
        "another run file lies there under the same name" if one["run_file"] not in (None, own["run_file"]) else ""
    )
    yield check(
        "run-file",
        host,
        problem,
        "the same" if one["run_file"] else "only here",
        WARN,
        expected=f"as here ({own['run_file'][:HASH]})",
        hint="this side's is used; the other one is out of date",
    )


def _strays(host: str, one: dict[str, Any]) -> Check:
    """Processes of other runs, as many as each run has."""
    count = Counter((stray["user"], stray["run"]) for stray in one["strays"])
    shown = [f"{n} of {user}" + (f" (run {run[:HASH]})" if run else "") for (user, run), n in count.items()]
    pids = " ".join(str(stray["pid"]) for stray in one["strays"][:PIDS])
    hint = f"wait for that run, or end it there: kill {pids}" + (" ..." if len(one["strays"]) > PIDS else "")
    expected = "no rank of another run"
    return check("processes", host, ", ".join(shown), "no other run", WARN, expected=expected, hint=hint)
