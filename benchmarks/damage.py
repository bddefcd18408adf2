"""Damages checkpoints in every way a disk or a person can, and looks whether each is noticed and passed over.

Trains three small runs on 2 ranks (ZeRO 2, ZeRO 3, a pipeline) with three checkpoints each. For every kind of file and
every kind of damage a copy is damaged in its newest checkpoint; `zerofit ckpt verify` must find it, and the checkpoint
before it must be the one from which the run would go on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerofit.checkpoint.store import Store, verify
from zerofit.spec.local_machine import versions

MODEL = ["--model-args", json.dumps({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64})]
COMMON = ["gpt2", *MODEL, "--data", "synthetic:64", "--seq-len", "16", "--micro-batch", "2", "--ranks", "2"]
RUNS = {
    "zero2": ["--ds-config", "zero2"],
    "zero3, bf16": ["--ds-config", "zero3", "--precision", "bf16"],
    "pipeline": ["--pipeline", "2"],
}
STEPS, EVERY = 6, 2


def truncate(file: Path, before: Path, chance: random.Random) -> None:
    """Cut the file off somewhere."""
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(chance.randrange(size))


def zero(file: Path, before: Path, chance: random.Random) -> None:
    """Same size, all zeros: what a file system may leave after a power cut."""
    file.write_bytes(bytes(file.stat().st_size))


def flip(file: Path, before: Path, chance: random.Random) -> None:
    """One bit."""
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def remove(file: Path, before: Path, chance: random.Random) -> None:
    """The file is gone."""
    file.unlink()


def swap(file: Path, before: Path, chance: random.Random) -> None:
    """The file of the checkpoint before, whole in itself, stands in its place."""
    shutil.copyfile(before, file)


DAMAGE: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "truncated": truncate,
    "zeroed": zero,
    "bit flipped": flip,
    "missing": remove,
    "swapped between steps": swap,
}


def main() -> int:
    """Print a row a case; exit code 1 if damage went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, flags in RUNS.items():
            print(f"training {name} ...", file=sys.stderr, flush=True)
            run = Path(place) / re.sub(r"\W+", "-", name)
            train(run, flags)
            rows += [case(run, name, *one, random.Random(f"{asked.seed}{name}{one}")) for one in cases(run)]
    unnoticed = [row for row in rows if not (row["noticed"] and row["passed_over"])]
    print(f"{len(rows)} damaged checkpoints, {len(rows) - len(unnoticed)} noticed and passed over")
    for row in unnoticed:
        print(f"NOT NOTICED: {row}")
    if asked.out:
        about = {"date": datetime.date.today().isoformat(), "versions": versions(), "seed": asked.seed}
        asked.out.write_text(
            json.dumps({**about, "cases": len(rows), "unnoticed": len(unnoticed), "rows": rows}, indent=1)
        )
    return bool(unnoticed)


def train(output: Path, flags: list[str]) -> None:
    """A run with checkpoints of the steps 2, 4 and 6."""
    argv = [sys.executable, "-m", "zerofit.cli", "train", *COMMON, *flags, "--steps", str(STEPS)]
    subprocess.run([*argv, "--save-every", str(EVERY), "--output", str(output)], check=True, capture_output=True)


def cases(run: Path) -> list[tuple[str, str]]:
    """One file of each kind in a checkpoint, times every damage that would change it."""
    newest, before = run / f"checkpoints/step-{STEPS:08}", run / f"checkpoints/step-{STEPS - EVERY:08}"
    kinds: dict[str, str] = {}
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        name = path.relative_to(newest).as_posix()
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    same = {name for name in kinds.values() if (newest / name).read_bytes() == (before / name).read_bytes()}
    return [
        (name, damage)
        for name in kinds.values()
        for damage in DAMAGE
        if not (damage.startswith("swap") and name in same)
    ]


def case(run: Path, name: str, file: str, damage: str, chance: random.Random) -> dict[str, Any]:
    """Damage a copy of the run's newest checkpoint; what comes of it."""
    copy = run.with_name(f"{run.name}-copy")
    shutil.copytree(run / "checkpoints", copy)
    newest, before = copy / f"step-{STEPS:08}", copy / f"step-{STEPS - EVERY:08}"
    DAMAGE[damage](newest / file, before / file, chance)
    found = verify(newest)
    passed_over: list[str] = []
    taken = Store(copy).newest_complete(lambda entry: passed_over.append(entry.path.name))
    shutil.rmtree(copy)
    return {
        "run": name,
        "file": file,
        "damage": damage,
        "noticed": [f"{d.file}: {d.kind}" for d in found if d.file in (file, "manifest.json")],
        "passed_over": passed_over == [newest.name] and taken is not None and taken.step == STEPS - EVERY,
    }


if __name__ == "__main__":
    sys.exit(main())
