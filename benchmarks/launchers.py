"""Has each launcher train LeNet on two ranks, kills one of them, and gives the same command once more.

    python -m benchmarks.launchers                          # all that are installed; root, for hosts and for Slurm
    python -m benchmarks.launchers torchrun srun --out benchmarks/results/launchers.json

Exit code 1 unless the killed rank was named each time, no rank was left, and the second start went on from the newest
checkpoint to the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launch import hosts as network
from tests.launch import slurm
from tests.launch.worlds import BIN, LOCAL, ONE_THREAD, SRUN, Start, missing
from zerofit.spec.local_machine import versions

STEPS, SAVE_EVERY, KILL_AFTER = 600, 50, 120
JOB = ["train", "lenet", "--data", "digits", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
Begin = Callable[[Path], Start]


def main() -> int:
    """Try the launchers and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PLACES)}")
    parser.add_argument("--out", type=Path, help="JSON file to write; what it has of other launchers stays")
    asked = parser.parse_args()
    found = {}
    if asked.out and asked.out.exists():
        found = {one["launcher"]: one for one in json.loads(asked.out.read_text())["runs"]}
    for name in asked.names or PLACES:
        with tempfile.TemporaryDirectory() as folder, PLACES[name](name, Path(folder)) as begin:
            found[name] = {"launcher": name, "date": f"{datetime.date.today()}", **tried(begin, Path(folder))}
        print(json.dumps(found[name]), flush=True)
        if asked.out:
            written = {"versions": versions(), "cores": os.cpu_count(), "runs": list(found.values())}
            asked.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(one["ok"] for one in found.values()) else 1


def tried(begin: Begin, folder: Path) -> dict[str, Any]:
    """Kill a rank of a first start, and let a second one come to its end."""
    first = begin(folder)
    first.after(KILL_AFTER)
    killed_at, killed = first.steps()[-1], time.monotonic()
    first.kill(1)
    code = first.wait()
    ended_s = round(time.monotonic() - killed, 1)
    left = len(first.workers())
    verdict = [line.partition("error: ")[2] for line in first.text.splitlines() if "error: rank 1" in line]
    began = time.monotonic()
    second = begin(folder)
    end = second.wait()
    result = second.result()
    resumed = int(result["resumed_from"][-8:])
    ok = (end, left, result["steps"], len(verdict)) == (0, 0, STEPS, 1) and code != 0 and resumed >= SAVE_EVERY
    return {
        "ok": ok,
        "killed_at_step": killed_at,
        "verdict": verdict,
        "exit_code_of_the_launcher": code,
        "ended_after_s": ended_s,
        "ranks_left": left,
        "resumed_from_step": resumed,
        "second_start_s": round(time.monotonic() - began, 1),
        "exit_code_at_the_end": end,
        "steps": result["steps"],
        "accuracy": result["eval"]["accuracy"],
    }


@contextmanager
def here(name: str, place: Path) -> Iterator[Begin]:
    """This machine alone."""
    assert not missing(name), missing(name)
    yield lambda folder: Start([*LOCAL[name], *JOB, "--output", str(folder / "run")], folder, folder / "run")


@contextmanager
def two_hosts(name: str, place: Path) -> Iterator[Begin]:
    """Two network namespaces with an sshd each."""
    with network.hosts(place / "ssh", 2) as made:
        names = [node.name for node in made.nodes]
        words = [str(BIN / "deepspeed"), "--hostfile", str(made.hostfile()), "--module", "zerofit"]
        if name.startswith("mpirun"):
            words = ["mpirun", "--allow-run-as-root", "-x", f"MASTER_ADDR={names[0]}", "-n", "2"]
            words += ["--host", ",".join(names), "-x", "OMP_NUM_THREADS=1", str(BIN / "zerofit")]
        (place / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in ONE_THREAD.items()))
        yield lambda folder: Start([*words, *JOB, "--output", str(folder / "run")], folder, folder / "run", made.env)


@contextmanager
def in_slurm(name: str, place: Path) -> Iterator[Begin]:
    """A slurmctld and a slurmd of its own."""
    with slurm.slurm_of_one_node(place) as one:
        env = os.environ | {"SLURM_CONF": str(one.config)}
        yield lambda folder: Start([*SRUN, *JOB, "--output", str(folder / "run")], folder, folder / "run", env)


PLACES = {
    **dict.fromkeys(LOCAL, here),
    "deepspeed, two hosts": two_hosts,
    "mpirun, two hosts": two_hosts,
    "srun": in_slurm,
}

if __name__ == "__main__":
    sys.exit(main())
