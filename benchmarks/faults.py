"""Break a run on three hosts in every known way, and record how zerofit reacts.

    python -m benchmarks.faults [--only WORD] [--out FILE]

The hosts are network namespaces with an sshd each (needs root; see tests/launch/hosts.py); the run is a real one,
started by `zerofit launch` through pdsh and ssh. After each fault: was the cause named, how long did it take to see
it, to stop all ranks and to train on, is anything left on any host, and does the next start go on from the newest
checkpoint that had been reported as saved? A silent fault is seen `--heartbeat` seconds later.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch.hosts import Hosts, Node, hosts, missing, start_sshd, stop_sshd
from zerofit.spec.local_machine import versions
from zerofit.spec.run_folder import RunFolder

RUN = ["mlp", "--data", "digits", "--global-batch", "48", "--steps", "1000000", "--save-every", "25"]
RUN += ["--log-every", "1000000", "--eval-every", "0"]
STEPS_BEFORE, STEPS_AFTER = 40, 10
START_S, PATIENCE_S = 180.0, 240.0
THROWS = """
import torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 40 and torch.distributed.get_rank() == 1:
            raise ValueError("no luck today")
        return super().forward(x.flatten(1))
"""


@dataclass
class Trial:
    """One run on the hosts."""

    made: Hosts
    place: Path
    heartbeat: float
    model: list[str] = field(default_factory=lambda: RUN)
    restarts: int = 1
    process: subprocess.Popen[str] | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.place / "run")

    def start(self) -> None:
        """Start the command."""
        argv = [sys.executable, "-m", "zerofit.cli", "launch", *self.model, "--output", str(self.folder.path)]
        argv += ["--hostfile", str(self.made.hostfile()), "--heartbeat-timeout", str(self.heartbeat)]
        argv += ["--max-restarts", str(self.restarts), "--json"]
        self.process = subprocess.Popen(
            argv, env=self.made.env, cwd=self.place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def steps(self) -> int:
        """Steps recorded so far."""
        try:
            lines = self.folder.metrics.read_text().splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What rank 0 has noted."""
        try:
            lines = self.folder.events.read_text().splitlines()
        except OSError:
            return []
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def fault(self) -> dict[str, Any] | None:
        """What the command has seen go wrong."""
        try:
            found = [json.loads(line) for line in self.folder.faults.read_text().splitlines()]
        except OSError:
            return None
        return next((one for one in found if "kind" in one), None)

    def until(self, done: Callable[[], Any], seconds: float) -> bool:
        """Wait for something while the command runs."""
        deadline = time.monotonic() + seconds
        assert self.process
        while time.monotonic() < deadline and self.process.poll() is None:
            if done():
                return True
            time.sleep(0.05)
        return bool(done())

    def end(self) -> tuple[int, dict[str, Any]]:
        """Ask the run to save and stop, if it is still there; exit code and last line."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        (self.made.place / "stderr.txt").write_text(err)
        lines = out.strip().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}

    def end_of_itself(self) -> tuple[int, dict[str, Any]]:
        """Exit code and last line of a command that ends without being asked."""
        self.until(lambda: False, PATIENCE_S)
        return self.end()


def rank_on(node: Node) -> Any:
    """The training process on a host."""
    return node.processes("zerofit.worker")[0]


def kill_rank(made: Hosts) -> None:
    rank_on(made.nodes[1]).kill()


def kill_launcher(made: Hosts) -> None:
    node = made.nodes[1]
    next(p for p in node.processes("deepspeed.launcher.launch") if "--node_rank=1" in p.cmdline()).kill()


def cut(made: Hosts) -> None:
    made.nodes[1].cut()


def cut_one_way(made: Hosts) -> None:
    made.nodes[1].deafen()


def stop_rank(made: Hosts) -> None:
    rank_on(made.nodes[1]).suspend()


def mended(made: Hosts) -> None:
    """Put a host right again."""
    node = made.nodes[1]
    node.mend()
    if node.sshd is not None and node.sshd.poll() is not None:
        start_sshd(node, made.place)


@dataclass(frozen=True)
class Fault:
    """What is done to a run, and what is to be said of it."""

    do: Callable[[Hosts], None]
    kinds: tuple[str, ...]  # of the verdict
    names: Callable[[Hosts], str]  # what its message must hold


BEARABLE: dict[str, Callable[[Node], None]] = {
    "link slowed to 1 Mbit/s": lambda node: node.slow("1mbit"),
    "20 % of packets lost": lambda node: node.lose(0.2),
    "sshd and all its sessions killed": stop_sshd,
}


def host_2(made: Hosts) -> str:
    return made.nodes[1].name


FAULTS = {
    "SIGKILL of a rank": Fault(kill_rank, ("killed",), lambda made: f"rank 1 on {host_2(made)}"),
    "SIGKILL of a node's launcher": Fault(kill_launcher, ("vanished",), host_2),
    "link cut both ways": Fault(cut, ("host-unreachable",), host_2),
    "link cut one way": Fault(cut_one_way, ("host-unreachable",), host_2),
    "SIGSTOP of a rank": Fault(stop_rank, ("rank-stopped",), lambda made: f"rank 1 on {host_2(made)}"),
}


def broken(name: str, made: Hosts, place: Path, heartbeat: float) -> dict[str, Any]:
    """One repetition of a fault that a restart gets over."""
    fault, trial = FAULTS[name], Trial(made, place, heartbeat)
    trial.start()
    if not trial.until(lambda: trial.steps() >= STEPS_BEFORE, START_S):
        return {"fault": name, "problem": f"did not start: {trial.end()}"}
    began = time.time()
    fault.do(made)
    trial.until(trial.fault, PATIENCE_S)
    seen = trial.fault()
    mended(made)
    saved = max((e["step"] for e in trial.events("saved")), default=0)
    starts = len(trial.events("training"))
    trial.until(lambda: any(e.get("done") for e in trial.events("training")[starts:]), PATIENCE_S)
    again = next((e for e in trial.events("training")[starts:] if e.get("done")), None)
    trial.until(lambda: trial.steps() >= (again or {}).get("done", 0) + STEPS_AFTER, PATIENCE_S)
    code, answer = trial.end()
    row: dict[str, Any] = {"fault": name, "code": code, "verdict": seen and seen["kind"]}
    if not seen or not again:
        return row | {"problem": f"no verdict or no restart: {answer}"}
    wrong = []
    if seen["kind"] not in fault.kinds or fault.names(made) not in seen["message"]:
        wrong.append(f"verdict: {seen['message']}")
    if again["done"] < saved:
        wrong.append(f"went on from step {again['done']}, step {saved} was saved")
    if code != 75:
        wrong.append(f"exit code {code}: {answer}")
    row |= {"message": seen["message"], "wrong": wrong + left_behind(made, trial)}
    row["seen_s"] = round(seen["time_s"] - seen["stopped_after_s"] - began, 1)
    row["stopped_s"] = seen["stopped_after_s"]
    row["training_again_s"] = round(again["time_s"] - seen["time_s"], 1)
    return row


def goes_on(name: str, made: Hosts, place: Path, heartbeat: float) -> dict[str, Any]:
    """One repetition of a fault that must not end the run."""
    trial = Trial(made, place, heartbeat, restarts=0)
    trial.start()
    if not trial.until(lambda: trial.steps() >= STEPS_BEFORE, START_S):
        return {"fault": name, "problem": f"did not start: {trial.end()}"}
    BEARABLE[name](made.nodes[1])
    began, before = time.monotonic(), trial.steps()
    trial.until(lambda: trial.steps() >= before + 60, 4 * heartbeat)
    steps, seconds = trial.steps() - before, time.monotonic() - began
    code, answer = trial.end()
    mended(made)
    wrong = [] if code == 75 else [f"exit code {code}: {answer}"]
    wrong += [] if steps else ["it made no step"]
    return {
        "fault": name,
        "code": code,
        "steps": steps,
        "seconds": round(seconds, 1),
        "wrong": wrong + left_behind(made, trial),
    }


def refused(name: str, made: Hosts, place: Path, heartbeat: float) -> dict[str, Any]:
    """One repetition of something that is seen before any rank starts."""
    trial = Trial(made, place, heartbeat, restarts=0)
    node = made.nodes[1]
    began = time.monotonic()
    with taken_port(made.nodes[0]) if "port" in name else other_version(node, made.place):
        began = time.monotonic()
        trial.start()
        code, answer = trial.end_of_itself()
    seconds = round(time.monotonic() - began, 1)
    said = json.dumps(answer)
    wrong = [] if code == 2 else [f"exit code {code}: {answer}"]
    if ("29500" if "port" in name else node.name) not in said:
        wrong.append(f"not named: {said}")
    return {
        "fault": name,
        "code": code,
        "seen_s": seconds,
        "message": answer.get("error", {}).get("message"),
        "wrong": wrong,
    }


def throws(name: str, made: Hosts, place: Path, heartbeat: float) -> dict[str, Any]:
    """A rank that throws in forward, and does so again after a restart."""
    (place / "mine.py").write_text(THROWS)
    model = ["mine:Net", "--data", "digits", "--global-batch", "48", "--steps", "100000", "--save-every", "20"]
    trial = Trial(made, place, heartbeat, model=model, restarts=1)
    trial.start()
    began = time.monotonic()
    trial.until(trial.fault, START_S)
    code, answer = trial.end_of_itself()
    message = answer.get("error", {}).get("message", "")
    wrong = [] if code == 3 and "rank 1" in message and "no luck today" in message else [f"{code}: {answer}"]
    seen = trial.fault() or {}
    return {
        "fault": name,
        "code": code,
        "message": message,
        "stopped_s": seen.get("stopped_after_s"),
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong + left_behind(made, trial),
    }


def full_disk(name: str, made: Hosts, place: Path, heartbeat: float) -> dict[str, Any]:
    """The file system of the run folder fills up while the run saves."""
    with tempfile.TemporaryDirectory(dir=made.place.parent / "small") as small:
        trial = Trial(made, Path(small), heartbeat, restarts=0)
        trial.start()
        if not trial.until(lambda: len(trial.events("saved")) >= 1, START_S):
            return {"fault": name, "problem": f"did not start: {trial.end()}"}
        filler = trial.folder.path / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError:
                pass
        trial.until(lambda: trial.events("save-failed") or (trial.process and trial.process.poll() is not None), 60)
        code, answer = trial.end()
        error = answer.get("error", {})
        said = error.get("kind") in ("disk-full", "save-failed") and code == 3
        wrong = [] if said else [f"exit code {code}: {answer}"]
        saved = max(e["step"] for e in trial.events("saved"))
        filler.unlink()
        starts = len(trial.events("training"))
        trial.start()
        trial.until(lambda: len(trial.events("training")) > starts, START_S)
        trial.until(lambda: trial.steps() >= saved + STEPS_AFTER, START_S)
        code, answer = trial.end()
        wrong += [] if code == 75 else [f"next start: exit code {code}: {answer}"]
        again = max(e.get("done", 0) for e in trial.events("training")[starts:])
        wrong += [] if again >= saved else [f"went on from step {again}, step {saved} was saved"]
        return {"fault": name, "message": error.get("message"), "wrong": wrong + left_behind(made, trial)}


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of 400 MB, which hosts see that are made within the block."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def left_behind(made: Hosts, trial: Trial) -> list[str]:
    """Processes and ports that are still there."""
    found = [f"{host}: {' '.join(argv)}" for host, all_of_it in made.left().items() for argv in all_of_it]
    for node in made.nodes:
        found += [f"{node.name} listens on {port}" for port in node.listening()]
    return found


@contextmanager
def taken_port(node: Node) -> Iterator[None]:
    """Somebody else listens where ranks would meet."""
    code = "import socket, time; s = socket.create_server(('', 29500)); print('ready', flush=True); time.sleep(600)"
    argv = ["ip", "netns", "exec", node.space, sys.executable, "-c", code]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def other_version(node: Node, ssh: Path) -> Iterator[None]:
    """A host that sees another version of DeepSpeed than the others."""
    real = Path(str(importlib.metadata.distribution("deepspeed")._path)) / "METADATA"  # type: ignore[attr-defined]
    fake = ssh / "METADATA"
    fake.write_text(re.sub(r"^Version: .*$", "Version: 0.18.0", real.read_text(), count=1, flags=re.M))
    stop_sshd(node)
    start_sshd(node, ssh, over={real: fake})
    try:
        yield
    finally:
        stop_sshd(node)
        start_sshd(node, ssh)


SPECIAL = {
    **dict.fromkeys(BEARABLE, goes_on),
    "master port taken": refused,
    "another version on one node": refused,
    "a rank throws in forward": throws,
    "disk full while saving": full_disk,
}


def main() -> int:
    """Exit code 1 unless every repetition of every fault went as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--heartbeat", type=float, default=10.0, help="seconds")
    parser.add_argument("--only", help="part of a fault's name")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    asked = parser.parse_args()
    if missing():
        sys.exit(missing())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as top, small_disk(Path(top) / "small"), hosts(Path(top) / "ssh") as made:
        for name in [n for n in (*FAULTS, *SPECIAL) if (asked.only or "") in n]:
            for number in range(asked.repetitions):
                place = Path(top) / f"{len(rows)}"
                place.mkdir()
                if name in FAULTS:
                    rows.append(broken(name, made, place, asked.heartbeat))
                else:
                    rows.append(SPECIAL[name](name, made, place, asked.heartbeat))
                print(f"{datetime.datetime.now():%H:%M:%S} {number + 1}: {json.dumps(rows[-1])}", flush=True)
                if rows[-1].get("wrong") or "problem" in rows[-1]:
                    print((made.place / "stderr.txt").read_text()[-3000:], flush=True)
    good = not any(row.get("wrong") or "problem" in row for row in rows)
    summary = {name: summed([r for r in rows if r["fault"] == name]) for name in {r["fault"]: 0 for r in rows}}
    about = {"date": datetime.date.today().isoformat(), "versions": versions(), "cpu_cores": os.cpu_count()}
    about |= {"hosts": 3, "heartbeat_timeout_s": asked.heartbeat, "all_well": good}
    print(json.dumps(summary, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps({**about, "summary": summary, "trials": rows}, indent=1) + "\n")
    return 0 if good else 1


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst of the times of one fault's repetitions."""
    well = sum(not r.get("wrong") and "problem" not in r for r in rows)
    found: dict[str, Any] = {"repetitions": len(rows), "well": well}
    for key in ("seen_s", "stopped_s", "training_again_s", "steps", "seconds"):
        figures = [r[key] for r in rows if r.get(key) is not None]
        if figures:
            found[key] = {"median": statistics.median(figures), "worst": max(figures)}
    return found


if __name__ == "__main__":
    sys.exit(main())
