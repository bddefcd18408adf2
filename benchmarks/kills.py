"""Kills a run at random moments and starts it again, until it is done; then compares it with one that was left alone.

Each kill is a SIGKILL to one rank, to all ranks, to the launcher, or to the `zerofit train` command itself; part of
them fall while a checkpoint is being written. Checked at each: every checkpoint that is visible is whole to the byte,
the newest is not older than the last that was reported as saved, and the next start goes on from it by itself. At the
end: final weights, losses and every value of the last checkpoint equal those of the uninterrupted run bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from zerofit.checkpoint.store import STAGING, Store, verify
from zerofit.spec.local_machine import versions
from zerofit.spec.run_folder import RunFolder

MODEL = {"n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 512, "resid_pdrop": 0.1}
GPT2 = ["gpt2", "--model-args", json.dumps(MODEL), "--ranks", "2"]
LLAMA = [
    "llama-tiny",
    "--model-args",
    '{"vocab_size": 512}',
    "--ranks",
    "4",
]  # tensor parallelism beside a pipeline takes the models that transformers plans
RUN = ["--data", "synthetic:512", "--seq-len", "64", "--micro-batch", "2", "--gradient-accumulation-steps", "2"]
RUN += ["--eval-every", "50", "--eval-samples", "8"]
KINDS = {
    "zero2": [*GPT2, "--ds-config", "zero2"],
    "zero3, bf16, async": [*GPT2, "--ds-config", "zero3", "--precision", "bf16", "--save-async"],
    "pipeline": [*GPT2, "--pipeline", "2"],
    "pipeline x tensor": [*LLAMA, "--pipeline", "2", "--tensor-parallel", "2"],
    "lora beside 4 bits": [*LLAMA, "--ranks", "2", "--ds-config", "zero2", "--lora", "8", "--quantize", "nf4"],
    "pipeline x tensor x data": [*LLAMA, "--ranks", "8", "--pipeline", "2", "--tensor-parallel", "2"],
}
WHO = ("one rank", "all ranks", "launcher", "command")
EXACT = ("step", "samples", "loss", "lr", "grad_norm")
START_S = 600.0  # a start of four ranks on two busy cores takes minutes
A_RUN = 20  # kills; so that each kind of run gets some


def main() -> int:
    """Exit code 1 unless every kill was survived and every run ended as the one that was left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of a run")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS)[:3], help="of runs, in turn")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    chance, kills, ends = random.Random(asked.seed), [], []
    with tempfile.TemporaryDirectory() as place:
        references = {}
        for number in range(1000):
            if len(kills) >= asked.kills:
                break
            kind = asked.kinds[number % len(asked.kinds)]
            if kind not in references:
                references[kind] = Run(kind, Path(place) / f"reference-{len(references)}", asked)
                references[kind].to_its_end()
            run = Run(kind, Path(place) / f"run-{number}", asked)
            kills += run.with_kills(chance, min(A_RUN, asked.kills - len(kills)))
            ends.append(run.compared_with(references[kind]))
            say(f"run {number} ({kind}): {ends[-1]}")
    return report(asked, kills, ends)


def say(text: str) -> None:
    """A line with the time."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


@dataclass
class Run:
    """One run folder, started as often as it takes."""

    kind: str
    path: Path
    asked: argparse.Namespace
    kills: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """The command, which makes the run or goes on with it."""
        flags = ["--steps", str(self.asked.steps), "--save-every", str(self.asked.save_every), "--keep-last", "2"]
        argv = [
            sys.executable,
            "-m",
            "zerofit.cli",
            "train",
            *KINDS[self.kind],
            *RUN,
            *flags,
            "--output",
            str(self.path),
        ]
        log = (self.path.parent / f"{self.path.name}.log").open("ab")
        return subprocess.Popen([*argv, "--json"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def to_its_end(self) -> None:
        """Train what is left without a kill."""
        code = self.start().wait()
        if code:
            raise SystemExit(
                f"{self.path} ended with {code}: {(self.path.parent / f'{self.path.name}.log').read_text()[-3000:]}"
            )

    def with_kills(self, chance: random.Random, at_most: int) -> list[dict[str, Any]]:
        """Start, kill, start again until the last step is done or there were enough kills."""
        while len(self.kills) < at_most and not RunFolder(self.path).result.exists():
            process = self.start()
            kill = self._kill_once(process, chance)
            if kill is None:
                break
            self.kills.append(kill)
            say(f"  kill {len(self.kills)}: {kill}")
        self.to_its_end()
        return self.kills

    def _kill_once(self, process: subprocess.Popen[bytes], chance: random.Random) -> dict[str, Any] | None:
        """Wait for a random moment, kill, look at what is left; None if the run came to its end before."""
        before, who = self._newest(), chance.choice(WHO)
        while_saving = chance.random() < 0.5
        if not self._reached(process, chance, while_saving):
            return None
        saving = self._is_saving()
        said = self._last_said()
        victims = victims_of(process, who)
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_gone(self.path)
        found = Store(RunFolder(self.path).checkpoints).entries()
        damaged = [entry.path.name for entry in found if verify(entry.path)]
        newest = found[-1].step if found else 0
        return {
            "run": self.kind,
            "who": who,
            "killed": len(victims),
            "while_saving": saving,
            "went_on_from": self._went_on_from(),
            "should_have": before,
            "newest": newest,
            "last_said": said,
            "damaged": damaged,
        }

    def _reached(self, process: subprocess.Popen[bytes], chance: random.Random, while_saving: bool) -> bool:
        """Whether a random moment was reached with the run still going: most often in training, now and then before."""
        if chance.random() < 0.1:
            return sleep_while(process, chance.uniform(1.0, 8.0))
        events = RunFolder(self.path).events
        size = events.stat().st_size if events.exists() else 0
        deadline = time.monotonic() + START_S
        while not (events.exists() and '"training"' in events.read_text()[size:]):
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        if not sleep_while(process, chance.uniform(0.0, 3.0)):
            return False
        if while_saving:
            while not self._is_saving():
                if process.poll() is not None:
                    return False
                time.sleep(0.0005)
            time.sleep(chance.uniform(0.0, 0.06))
        return process.poll() is None

    def _is_saving(self) -> bool:
        folder = RunFolder(self.path).checkpoints
        return folder.is_dir() and any(name.startswith(STAGING) for name in os.listdir(folder))

    def _newest(self) -> int:
        found = Store(RunFolder(self.path).checkpoints).entries()
        return found[-1].step if found else 0

    def _last_said(self) -> int:
        """The last checkpoint that the run reported as saved."""
        return max([e["step"] for e in self._events() if e["event"] == "saved"], default=0)

    def _went_on_from(self) -> int | None:
        """Where the start that was just killed had begun; None if it did not come that far."""
        begun = [e["done"] for e in self._events() if e["event"] == "training" and "done" in e]
        return begun[-1] if len(begun) > len([k for k in self.kills if k["went_on_from"] is not None]) else None

    def _events(self) -> list[dict[str, Any]]:
        file = RunFolder(self.path).events
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def compared_with(self, other: Run) -> dict[str, Any]:
        """What of the final state is the same, bit for bit, as in the run that was left alone."""
        mine, theirs = (RunFolder(run.path) for run in (self, other))
        weights = [load_file(next(folder.model.glob("*model.safetensors"))) for folder in (mine, theirs)]
        records = [
            [[json.loads(line)[key] for key in EXACT] for line in f.metrics.read_text().splitlines()]
            for f in (mine, theirs)
        ]
        return {
            "run": self.kind,
            "kills": len(self.kills),
            "weights_equal": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1]),
            "records_equal": records[0] == records[1],
            "steps": len(records[0]),
        }


def victims_of(process: subprocess.Popen[bytes], who: str) -> list[psutil.Process]:
    """The processes that a kill is for; the command's own where none of those has been started yet."""
    if who == "command":
        return [psutil.Process(process.pid)]
    try:
        launchers = psutil.Process(process.pid).children()
        ranks = [rank for launcher in launchers for rank in launcher.children()]
    except psutil.NoSuchProcess:
        return []
    found = {"launcher": launchers, "all ranks": ranks, "one rank": ranks[-1:]}[who]
    return found or [psutil.Process(process.pid)]  # there are none yet


def wait_until_gone(path: Path) -> None:
    """Until no process of this run is left; nothing but the kernel ends ranks whose launcher was killed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        words = ((p, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
        left = [p for p, of in words if any(word == str(path) or f"{path}/" in word for word in of)]
        if not left:
            return
        time.sleep(0.05)
    raise SystemExit(f"processes of {path} are left: {left}")


def sleep_while(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process still runs after so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def report(asked: argparse.Namespace, kills: list[dict[str, Any]], ends: list[dict[str, Any]]) -> int:
    """Print and write the results; 1 if anything is not as it must be."""
    lost = [k for k in kills if k["newest"] < k["last_said"] or k["damaged"]]
    lost += [k for k in kills if k["went_on_from"] not in (None, k["should_have"])]
    wrong = [end for end in ends if not (end["weights_equal"] and end["records_equal"] and end["steps"] == asked.steps)]
    summary = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "hardware": f"{os.cpu_count()} CPU cores, gloo",
        "seed": asked.seed,
        "kills": len(kills),
        # one that came before training had begun may have seen what an earlier kill left half written
        "kills_while_saving": sum(k["while_saving"] and k["went_on_from"] is not None for k in kills),
        "by_victim": dict(Counter(k["who"] for k in kills)),
        "runs": len(ends),
        "kills_that_lost_something": len(lost),
        "runs_that_ended_differently": len(wrong),
    }
    print(json.dumps(summary, indent=1))
    for row in [*lost, *wrong]:
        print(f"WRONG: {row}")
    if asked.out:
        asked.out.write_text(json.dumps({**summary, "each_kill": kills, "each_run": ends}, indent=1) + "\n")
    return bool(lost or wrong)


if __name__ == "__main__":
    sys.exit(main())
