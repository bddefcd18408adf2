"""What zerofit costs beside a hand-written DeepSpeed loop, Accelerate and transformers' Trainer; see README.md.

python benchmarks/overhead.py [--quick] [--output FILE.json]

Each contender is a process group of its own, started through the deepspeed launcher. All are alive at once and take
turns of a second or so, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turns import TIMEOUT_S, Line, Turn

from zerofit.app.training.train import prepare
from zerofit.launch.host import environment, this_machine
from zerofit.launch.local import free_port, launcher
from zerofit.spec.events import Reporter
from zerofit.spec.model_facts import Machine
from zerofit.spec.run import load_run
from zerofit.spec.run_folder import Job, RunFolder

HERE = Path(__file__).parent
CONTENDERS = ("hand-written", "zerofit", "accelerate", "trainer")
# over four rounds each contender takes each place once and comes once behind each other one (a Williams design)
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
LOSS_TOLERANCE = 1e-3  # relative: the same sums in another order, after thousands of steps
LOSS_FLOOR = 0.1  # smaller losses are compared as if they were this large


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model on one data set, and how long a turn is."""

    options: dict[str, Any]  # of `zerofit train`
    turn: Turn
    unit: str  # of throughput
    accelerator: str = "cpu"  # that it is for

    def amount(self, job: Job) -> int:
        """Units in one step."""
        return job.batch.total * ((job.run.seq_len or 1) if self.unit == "tokens" else 1)


LLAMA = {  # 0.5 billion parameters: four contenders at once, of 17 GiB each, are in one GPU of 80 GB
    "model": "llama-3.2-1b",
    "model_args": {"num_hidden_layers": 4},
    "data": "synthetic",
    "micro_batch": 2,
    "seq_len": 1024,
    "lr": 1e-5,
}
RESNET50 = {
    "model": "resnet50",
    "data": "synthetic",
    "micro_batch": 64,
    "image_size": 224,
    "lr": 1e-4,
    "precision": "fp32",  # in bf16 the batch norms of zerofit are others
}
ON_GPU = Turn(settle=2, timed=10)
# a turn is long enough for several of zerofit's exchanges of losses (one in half a second) and of the others' log lines
WORKLOADS = {
    "lenet": Workload(
        options={"model": "lenet", "data": "digits", "micro_batch": 8, "lr": 1e-4},
        turn=Turn(settle=10, timed=200),
        unit="samples",
    ),
    "llama-tiny": Workload(
        options={"model": "llama-tiny", "data": "pysource", "micro_batch": 4, "seq_len": 128, "lr": 1e-3},
        turn=Turn(settle=2, timed=20),
        unit="tokens",
    ),
    "llama-0.5b": Workload(options={**LLAMA, "precision": "bf16"}, turn=ON_GPU, unit="tokens", accelerator="cuda"),
    "llama-0.5b-fp16": Workload(options={**LLAMA, "precision": "fp16"}, turn=ON_GPU, unit="tokens", accelerator="cuda"),
    "resnet50": Workload(options=RESNET50, turn=ON_GPU, unit="samples", accelerator="cuda"),
}
COMMON = {"schedule": "linear", "warmup_steps": 0, "eval_samples": 64}
DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    # no decay: the Trainer would apply it to norms and biases, which the others spare
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.0, "torch_adam": True}},
}


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What the timed steps of one turn took: seconds on the slowest rank, CPU seconds of all ranks."""

    wall_s: float
    cpu_s: float


class Contender:
    """The ranks of one contender, as the referee sees them."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path):
        self.name, self.log, self._process = name, log, process
        self.lines: dict[int, Line] = {}  # by rank

    def play(self) -> Taken:
        """One turn."""
        with self.telling():
            for line in self.lines.values():
                line.send("go")
        wall, cpu = zip(*self.answers(), strict=True)
        return Taken(wall_s=max(wall), cpu_s=sum(cpu))

    def answers(self) -> list[Any]:
        """What each rank says next."""
        with self.telling():
            return [self.lines[rank].receive() for rank in sorted(self.lines)]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """End with this contender's log where one of its ranks is gone."""
        try:
            yield
        except (ConnectionError, TimeoutError) as error:
            raise SystemExit(f"{self.name}: {error}\n{self.log.read_text()[-4000:]}") from None

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"{self.name} ended early\n{self.log.read_text()[-4000:]}")


@contextmanager
def started(name: str, plan: Path, ranks: int, machine: Machine) -> Iterator[Contender]:
    """A contender's ranks behind the deepspeed launcher; none is left afterwards."""
    log = plan.with_name(f"{name}.log")
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))  # zerofit may lie on it
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher(ranks, free_port()), str(HERE / "contenders.py"), name, str(plan)],
            env=environment(machine.accelerator, machine.cores, ranks) | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield Contender(name, process, log)
        process.wait(TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def greet(server: socket.socket, contenders: dict[str, Contender], ranks: int) -> None:
    """Wait until every rank has said who it is."""
    server.settimeout(1)
    for _ in range(ranks * len(contenders)):
        connection = accept(server, contenders)
        connection.settimeout(TIMEOUT_S)
        line = Line(connection)
        who = line.receive()
        contenders[who["contender"]].lines[who["rank"]] = line


def accept(server: socket.socket, contenders: dict[str, Contender]) -> socket.socket:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for contender in contenders.values():
            contender.check_alive()
        try:
            return server.accept()[0]
        except TimeoutError:
            continue
    raise SystemExit("some ranks did not start")


def measure(
    name: str, workload: Workload, launches: int, rounds: int, machine: Machine, folder: Path
) -> dict[str, Any]:
    """One workload: some launches of all contenders, since a process may be lucky in where its memory lies."""
    played = [launch(workload, rounds, machine, folder / str(number)) for number in range(launches)]
    job, losses = played[0].job, played[0].losses
    taken = [each for one in played for each in one.taken]
    return {
        "workload": name,
        "ranks": job.layout.world_size,
        "global_batch": job.batch.total,
        "seq_len": job.run.seq_len,
        "turn": asdict(workload.turn),
        "launches": launches,
        "rounds_a_launch": rounds,
        "ds_config": job.ds_config,
        **figures(taken, workload.amount(job) * workload.turn.timed, workload.unit, workload.turn.timed),
        "losses": losses,
        "largest_relative_loss_difference": {
            c: max(difference(one.losses[c], one.losses[CONTENDERS[0]]) for one in played) for c in CONTENDERS[1:]
        },
    }


@dataclass(frozen=True, kw_only=True)
class Played:
    """One launch of all contenders: what each turn took, round by round, and the loss of each step."""

    job: Job
    taken: list[dict[str, Taken]]
    losses: dict[str, list[float]]


def launch(workload: Workload, rounds: int, machine: Machine, folder: Path) -> Played:
    """Start all contenders and play all rounds; the first, which warms up, is not counted.

    Nor is the last: a contender that has played it is not held back any more, and ends while others still play.
    """
    ranks, played = min(2, machine.devices), rounds + 2
    steps = played * workload.turn.steps + 1  # the last turn ends where one more step begins
    options = {**COMMON, **workload.options, "ranks": ranks, "steps": steps, "ds_config": DS_CONFIG}
    prepared = prepare(load_run(None, {**options, "output": folder / "run"}), Reporter())
    job, run = prepared.job, prepared.folder
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(folder / "socket"))
        server.listen(ranks * len(CONTENDERS))
        plan = folder / "plan.json"
        plan.write_text(json.dumps(make_plan(run, folder / "socket", workload.turn, played)))
        contenders = {c: stack.enter_context(started(c, plan, ranks, machine)) for c in CONTENDERS}
        greet(server, contenders, ranks)
        taken = [play_round(number, contenders) for number in range(played)][1:-1]
        losses = {c: mean_losses(contender.answers()) for c, contender in contenders.items()}
    return Played(job=job, taken=taken, losses=losses)


def make_plan(run: RunFolder, path: Path, turn: Turn, turns: int) -> dict[str, Any]:
    return {"run": str(run.path), "socket": str(path), "turn": asdict(turn), "turns": turns}


def play_round(number: int, contenders: dict[str, Contender]) -> dict[str, Taken]:
    """Each contender has one turn."""
    order = [CONTENDERS[place] for place in ORDERS[number % len(ORDERS)]]
    taken = {name: contenders[name].play() for name in order}
    told = "  ".join(f"{name} {taken[name].wall_s:.3f} ({taken[name].cpu_s:.3f})" for name in CONTENDERS)
    print(f"  {'round ' + str(number) if number else 'warm-up'}, seconds (of CPUs): {told}", flush=True)
    return taken


def mean_losses(by_rank: Sequence[list[float] | None]) -> list[float]:
    """The loss of each step over the ranks that told one."""
    told = [losses for losses in by_rank if losses is not None]
    return [sum(step) / len(step) for step in zip(*told, strict=True)]


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(a - b) / max(abs(b), LOSS_FLOOR) for a, b in zip(losses, reference, strict=True))


def figures(rounds: Sequence[dict[str, Taken]], amount: int, unit: str, steps: int) -> dict[str, Any]:
    """Throughput of each contender in each round, and zerofit's over each peer's of the same round.

    CPU time hardly depends on what else the machine does, but leaves out waiting.
    """
    wall = {c: [taken[c].wall_s for taken in rounds] for c in CONTENDERS}
    cpu = {c: [taken[c].cpu_s for taken in rounds] for c in CONTENDERS}
    return {
        "unit": f"{unit}/s",
        "rounds": {c: [round(amount / s, 1) for s in wall[c]] for c in CONTENDERS},
        "median": {c: round(amount / statistics.median(wall[c]), 1) for c in CONTENDERS},
        "step_ms": {c: round(1000 * statistics.median(wall[c]) / steps, 3) for c in CONTENDERS},
        "cpu_step_ms": {c: round(1000 * statistics.median(cpu[c]) / steps, 3) for c in CONTENDERS},
        "zerofit_over": {c: ratio(wall[c], wall["zerofit"]) for c in CONTENDERS if c != "zerofit"},
        "zerofit_over_by_cpu_time": {c: ratio(cpu[c], cpu["zerofit"]) for c in CONTENDERS if c != "zerofit"},
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Their time over ours, round by round: the median with a 95 % bootstrap interval, and the extremes."""
    draw, values = random.Random(0), [a / b for a, b in zip(theirs, ours, strict=True)]
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    found = {"median": statistics.median(values), "low": medians[50], "high": medians[-51]}
    return {k: round(v, 4) for k, v in {**found, "min": min(values), "max": max(values)}.items()}


def surroundings(machine: Machine) -> dict[str, Any]:
    """When, on what and with which versions; nothing that names a machine or a person."""
    names = ("zerofit", "torch", "deepspeed", "transformers", "accelerate")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {"device": device_name(machine), "devices": machine.devices, "cores": machine.cores},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def device_name(machine: Machine) -> str:
    if machine.accelerator != "cpu":
        return machine.device_name
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else machine.device_name


def table(result: dict[str, Any]) -> str:
    """The README's rows of one workload."""
    rows = []
    for name in CONTENDERS:
        over = result["zerofit_over"].get(name)
        cell = f"{over['median']:.3f} ({over['low']:.3f} to {over['high']:.3f})" if over else ""
        speed, step_ms = result["median"][name], result["step_ms"][name]
        cells = [result["workload"], name, f"{speed:,.0f} {result['unit']}", f"{step_ms:.2f} ms", cell]
        rows.append("| " + " | ".join([*cells, by_cpu(result, name)]) + " |")
    return "\n".join(rows)


def by_cpu(result: dict[str, Any], name: str) -> str:
    over = result["zerofit_over_by_cpu_time"].get(name)
    return f"{result['cpu_step_ms'][name]:.2f} ms" + (f" ({over['median']:.3f})" if over else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--launches", type=int, default=3, help="times that all ranks are started anew (default 3)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a launch that are counted (default 8)")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all for this accelerator")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file and the losses beside it")
    return parser.parse_args()


def main() -> int:
    """0, or 1 where the contenders did not do the same work."""
    asked, machine = parse(), this_machine()
    results = []
    for name in asked.workload or [name for name, one in WORKLOADS.items() if one.accelerator == machine.accelerator]:
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            launches, rounds = (1, 2) if asked.quick else (asked.launches, asked.rounds)
            results.append(measure(name, WORKLOADS[name], launches, rounds, machine, Path(folder)))
    print("\n| workload | contender | throughput | step | zerofit's ratio to it | CPU time a step (ratio) |")
    print("|---|---|---|---|---|---|")
    print("\n".join(table(result) for result in results))
    agree = all(gap <= LOSS_TOLERANCE for r in results for gap in r["largest_relative_loss_difference"].values())
    for result in results:
        gaps = ", ".join(f"{c} {gap:.1e}" for c, gap in result["largest_relative_loss_difference"].items())
        print(f"{result['workload']}: largest relative difference to the hand-written loop's losses: {gaps}")
    if asked.output:
        write(asked.output, {**surroundings(machine), "results": results})
    if not agree:
        print(f"the losses differ by more than {LOSS_TOLERANCE}: the contenders did not do the same work")
    return 0 if agree else 1


def write(path: Path, found: dict[str, Any]) -> None:
    """The figures, and the losses of every step side by side in one CSV file a workload."""
    for result in found["results"]:
        losses = result.pop("losses")
        lines = [",".join(["step", *losses])]
        for step, values in enumerate(zip(*losses.values(), strict=True), 1):
            lines.append(",".join([str(step), *(f"{v:.6g}" for v in values)]))
        path.with_name(f"{path.stem}-losses-{result['workload']}.csv").write_text("\n".join(lines) + "\n")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
