"""The run folder over all hosts: one folder, writable, with room for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofit.doctor.check import FAIL, WARN, Check, check
from zerofit.spec.units import shown_bytes

Facts = dict[str, dict[str, Any]]


def disk(facts: Facts, checkpoint_bytes: int | None) -> list[Check]:
    """Room for checkpoints where the run folder is."""
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
    """Whether the run folder is one folder that all hosts can write to; `seen`: whose files have come up here."""
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
