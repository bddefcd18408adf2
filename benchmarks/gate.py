"""Whether the memory gate is right: random runs, each really started under memory limits around what it needs.

python benchmarks/gate.py [--runs 60] [--limits 0.9 1.07 ...] [--out benchmarks/results]

Each run is started on CPU ranks at every limit, whatever the gate says. Programs find the limit as the host's free
memory, by which zerofit limits its ranks; this script samples the private memory of every rank besides, and kills one
that takes more than its share, as a control group would. Results are kept in gate.jsonl: the same command goes on.
Exit code 1 where a run that was let through died of memory, or more than 3 % of those refused would have fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from meter.configurations import MODELS, options
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from zerofit.app.job.requests import as_request
from zerofit.app.job.resolve import ResolvedJob, resolve_job
from zerofit.app.training.free_memory import HostMemory
from zerofit.app.training.memory_forecast import forecast_ranks
from zerofit.app.training.memory_gate import judge, prepared_for
from zerofit.simulate.forecast.result import FITS, NOT, WITHIN
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError
from zerofit.spec.events import Reporter
from zerofit.spec.overhead import CPU_LIBRARY_BYTES
from zerofit.spec.run import RunRequest, load_run
from zerofit.spec.units import shown_bytes

RESULTS = Path(__file__).parent / "results"
SEED = 17
# free memory as a share of what all ranks need, libraries' pages aside
LIMITS = (0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 1.0, 1.02, 1.04, 1.07, 1.15, 1.4)
WRONGLY_REFUSED = 0.03
SAMPLE_S = 0.005
PATIENCE_S = 1800.0
OFFLOADS = ((), (), ("offload",), ("offload-all",))
# how programs find the limit: imported by every Python that is started with this folder on PYTHONPATH
SITE = """
import os, psutil
_seen = psutil.virtual_memory
psutil.virtual_memory = lambda: _seen()._replace(available=int(os.environ["GATE_FREE_BYTES"]))
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One run under one limit."""

    run: int
    name: str
    limit: float  # of LIMITS
    free_bytes: int
    verdict: str
    died: bool
    reason: str  # why it died
    forecast_bytes: int  # of rank 0, private
    measured_bytes: int  # the most private memory of a rank that was sampled
    seconds: float


def main() -> int:
    """0, or 1 where the gate misses its target."""
    asked = parse()
    file = asked.out / "gate.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    known = [Start(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    limits = asked.limits
    with Progress(*columns, TimeRemainingColumn()) as progress, tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(SITE)
        bar = progress.add_task("", total=asked.runs * len(limits), completed=0)
        for number, name, request, resolved in runs(asked.runs):
            done = {one.limit for one in known if one.run == number}
            progress.advance(bar, len(done & {*limits}))
            for limit in sorted({*limits} - done):
                progress.update(bar, description=f"{number}: {name} at {limit}")
                one = started(number, name, request, resolved, limit, Path(place))
                known.append(one)
                with file.open("a") as out:
                    out.write(json.dumps(asdict(one)) + "\n")
                progress.print(shown(one), markup=False)
                progress.advance(bar)
    return report(known)


def runs(count: int) -> Iterator[tuple[int, str, RunRequest, ResolvedJob]]:
    """Yield random runs that zerofit accepts, always the same ones."""
    drawn, number = random.Random(SEED), 0
    while number < count:
        name, model = draw(drawn)
        with suppress(UserError):
            request = as_request(load_run(None, {**options(name, {name.split()[0]: model}), "eval_samples": 2}))
            resolved = resolve_job(request)
            yield number, name, request, resolved
            number += 1


def draw(drawn: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a run's name, in the words of meter/configurations.py, and its model with random sizes."""
    key = drawn.choice([one for one in MODELS if one != "lenet"])
    model, times = json.loads(json.dumps(MODELS[key])), drawn.choice([1, 2, 3, 4])
    for field in ("hidden_size", "n_embd", "intermediate_size"):
        if field in model.get("model_args", {}):
            model["model_args"][field] *= times
    stage = drawn.randrange(4)
    offload = drawn.choice(OFFLOADS) if stage == 3 else drawn.choice(OFFLOADS[:3]) if stage else ()
    words = [f"zero{stage}", drawn.choice(["fp32", "bf16"]), f"mb{drawn.choice([1, 2, 4, 8, 16])}", *offload]
    words += ["ckpt"] if drawn.random() < 0.25 else []
    return " ".join([key, *words, f"x{drawn.choice([1, 2])}"]), model


def started(number: int, name: str, request: RunRequest, resolved: ResolvedJob, limit: float, place: Path) -> Start:
    """Start a run with so much of what it needs free, and see whether it comes to its end."""
    ranks, began = resolved.job.layout.world_size, time.monotonic()
    cluster = Cluster("cpu", gpus=ranks)
    found = forecast_ranks(prepared_for(request, resolved, cluster), cluster, Reporter())
    if isinstance(found, Problem):
        raise RuntimeError(found.message)
    needs = [found.host_need(found.of(rank)) for rank in range(ranks)]
    free = CPU_LIBRARY_BYTES + int(limit * sum(needs))
    verdict = judge(found, HostMemory(name="", ranks=range(ranks), host_bytes=free, gpu_bytes=None)).word
    shares = [int((free - CPU_LIBRARY_BYTES) * need / sum(needs)) for need in needs]
    run = place / "run.json"
    run.write_text(request.run.model_copy(update={"output": None}).model_dump_json())
    argv = [sys.executable, "-P", "-m", "zerofit.cli", "train", str(run), "--anyway", "--json", "--output"]
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "GATE_FREE_BYTES": str(free)}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        argv.append(str(Path(folder, "run")))
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            most, beyond = watch(process, shares)
            lines = process.communicate()[0].strip().splitlines()
    answer = json.loads(lines[-1]) if lines else {}
    error = answer.get("error", {})
    if process.returncode and not beyond and error.get("kind") not in ("out-of-memory", "killed"):
        raise RuntimeError(f"{name} at {limit}: {error or lines[-3:]}")
    return Start(
        run=number,
        name=name,
        limit=limit,
        free_bytes=free,
        verdict=verdict,
        died=process.returncode != 0,
        reason="killed at its share" if beyond else error.get("kind", ""),
        forecast_bytes=needs[0],
        measured_bytes=most,
        seconds=round(time.monotonic() - began, 1),
    )


def watch(process: subprocess.Popen[str], shares: Sequence[int]) -> tuple[int, bool]:
    """Sample the ranks of a run until it ends; kill one that takes more than its share.

    Return the most that any took, and whether one was killed.
    """
    ranks: dict[int, int] = {}  # process -> rank
    most, beyond, looked, deadline = 0, False, 0.0, time.monotonic() + PATIENCE_S
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            process.kill()
        if len(ranks) < len(shares) and now - looked > 0.2:
            looked, ranks = now, ranks | found_ranks(process.pid)
        for pid, rank in ranks.items():
            own = private_bytes(pid)
            most = max(most, own)
            if own > shares[rank] and not beyond:
                beyond = True
                with suppress(psutil.Error):
                    psutil.Process(pid).kill()
        time.sleep(SAMPLE_S)
    return most, beyond


def found_ranks(pid: int) -> dict[int, int]:
    """Return the ranks among the descendants of a process."""
    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error, KeyError):
                if "zerofit.worker" in child.cmdline():
                    found[child.pid] = int(child.environ()["RANK"])
    return found


def private_bytes(pid: int) -> int:
    """Return what a process has for itself now, or has had at most, with the pages of libraries taken off."""
    with suppress(OSError):
        sizes = dict(re.findall(r"^(VmHWM|RssFile|RssAnon):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M))
        if len(sizes) == 3:
            return max(int(sizes["RssAnon"]), int(sizes["VmHWM"]) - int(sizes["RssFile"])) * 1024
    return 0


def shown(one: Start) -> str:
    """One start in a line."""
    sizes = f"{shown_bytes(one.forecast_bytes)} forecast, {shown_bytes(one.measured_bytes)} measured"
    end = f"died ({one.reason})" if one.died else "came to its end"
    return f"{one.run:3} {one.name:44} {one.limit:4}  {one.verdict:18} {end}; {sizes}  {one.seconds:.0f} s"


def report(starts: Sequence[Start]) -> int:
    """Print what was refused and what died, by limit; return the exit code."""
    table = Table("limit", "starts", FITS, "of them died", WITHIN, "of them died", NOT, "of them would have fit")
    for limit in [*LIMITS, None]:
        rows = [one for one in starts if limit in (None, one.limit)]
        cells = [str(limit or "all"), str(len(rows))]
        for word, wrong in ((FITS, True), (WITHIN, True), (NOT, False)):
            mine = [one for one in rows if one.verdict == word]
            cells += [str(len(mine)), str(sum(one.died == wrong for one in mine))]
        table.add_row(*cells, end_section=limit == LIMITS[-1])
    Console().print(table)
    refused = [one for one in starts if one.verdict == NOT]
    wrongly = sum(not one.died for one in refused)
    fatal = [one for one in starts if one.verdict == FITS and one.died]
    print(f"let through and died of memory: {len(fatal)}; refused wrongly: {wrongly} of {len(refused)}")
    return 1 if fatal or wrongly > WRONGLY_REFUSED * len(refused) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=60, help="so many runs, always the same ones")
    parser.add_argument("--limits", nargs="+", type=float, choices=LIMITS, default=LIMITS, help="only these of them")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of gate.jsonl (ours: {RESULTS.name}/)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
