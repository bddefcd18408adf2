"""All-reduces written by hand against message size, with the lines of alpha and beta (docs/formulas.md).

python benchmarks/all_reduce.py [--ranks 2 4]

Processes on this machine, connected by gloo. Alpha (seconds a message) and beta (bytes a second) are those of messages
that two of them send to and fro in the same run; from them alone come the lines. Points are medians of what an
all-reduce took on the slowest rank; gloo's own is measured beside them. Every sum is checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofit.compare.strategies.all_reduce_central import central
from zerofit.compare.strategies.all_reduce_halving import halving
from zerofit.compare.strategies.all_reduce_ring import ring
from zerofit.compare.strategies.all_reduce_tree import tree
from zerofit.launch.local import free_port
from zerofit.spec.files import write_json
from zerofit.spec.local_machine import versions

AllReduce = Callable[[Tensor, int, int], None]  # adds up in place, given rank and number of ranks
OUT = Path(__file__).parent / "results" / "all-reduce"
WAYS: dict[str, AllReduce] = {"central": central, "tree": tree, "ring": ring, "halving": halving}
SIZES = tuple(2**power for power in range(10, 27, 2))  # bytes: 1 KiB to 64 MiB
SMALL, LARGE = SIZES[0], SIZES[-1]
REPEATS, LEAST_S = 15, 0.3  # of a size: so often, or for so long


def predicted(way: str, ranks: int, size: int, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes (docs/formulas.md)."""
    rounds = 2 * (ranks - 1) if way in ("central", "ring") else 2 * log2(ranks)
    share = 2 * (ranks - 1) / ranks if way in ("ring", "halving") else rounds
    return rounds * alpha + share * size / beta


def gloo(vector: Tensor, rank: int, ranks: int) -> None:
    """Add up as torch does."""
    dist.all_reduce(vector)


def serve(rank: int, ranks: int, port: int, answers: Any) -> None:
    """Measure as one rank; the first one answers."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {"pings": {size: ping(rank, size) for size in (SMALL, LARGE)}, "rows": []}
    for way, all_reduce in {**WAYS, "gloo": gloo}.items():
        found["rows"] += [
            {"way": way, "ranks": ranks, "bytes": size, "seconds": measured(all_reduce, rank, ranks, size)}
            for size in SIZES
        ]
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def ping(rank: int, size: int) -> float:
    """Return the median seconds of a message between ranks 0 and 1; the others wait."""
    message, seconds = torch.zeros(size // 4), []
    for _ in range(REPEATS if rank < 2 else 0):
        started = time.perf_counter()
        for sender in (0, 1):
            dist.send(message, 1 - rank) if rank == sender else dist.recv(message, 1 - rank)
        seconds.append((time.perf_counter() - started) / 2)
    dist.barrier()
    return statistics.median(seconds or [0.0])


def measured(all_reduce: AllReduce, rank: int, ranks: int, size: int) -> float:
    """Return the median over repeats of the slowest rank's seconds."""
    seconds, repeats = [], torch.tensor(1)
    for number in range(REPEATS + 1):
        vector = torch.full((size // 4,), float(rank + 1))
        dist.barrier()
        started = time.perf_counter()
        all_reduce(vector, rank, ranks)
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        assert (vector == ranks * (ranks + 1) / 2).all()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number == 0:  # connections are made; all ranks do as many more as one of them has time for
            repeats.fill_(min(REPEATS, max(3, round(LEAST_S / slowest.item()))))
            continue
        seconds.append(slowest.item())
        if number == repeats:
            break
    return statistics.median(seconds)


def main() -> None:
    """Measure, write results.json and table.md, draw all-reduce.png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4], help="powers of two")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    groups = {}
    for ranks in asked.ranks:
        print(f"{ranks} ranks ...", flush=True)
        found = started(ranks)
        beta = LARGE / (found["pings"][LARGE] - found["pings"][SMALL])
        groups[ranks] = {"alpha_s": found["pings"][SMALL], "beta_bytes_s": beta, "rows": found["rows"]}
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {"cores": os.cpu_count(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    write_json(asked.out / "results.json", {**about, "groups": groups})
    (asked.out / "table.md").write_text(table(groups), encoding="utf-8")
    draw(groups, asked.out / "all-reduce.png")
    print(table(groups))


def started(ranks: int) -> dict[str, Any]:
    """Start the ranks and return what the first one has found."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), free_port()
    processes = [context.Process(target=serve, args=(rank, ranks, port, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = answers.get(timeout=600)
    for process in processes:
        process.join()
    return found


def table(groups: dict[int, dict[str, Any]]) -> str:
    """Return a table of the smallest and the largest message, in milliseconds, with the formula's beside it."""
    lines = []
    for ranks, group in groups.items():
        alpha, beta = group["alpha_s"], group["beta_bytes_s"]
        lines += [f"{ranks} ranks: alpha {1e6 * alpha:.0f} us, beta {beta / 1e9:.2f} GB/s", ""]
        lines += ["| way | 1 KiB, ms | formula | 64 MiB, ms | formula |", "|---|---|---|---|---|"]
        for way in (*WAYS, "gloo"):
            cells = []
            for size in (SMALL, LARGE):
                (row,) = (one for one in group["rows"] if (one["way"], one["bytes"]) == (way, size))
                line = f"{1e3 * predicted(way, ranks, size, alpha, beta):.3g}" if way in WAYS else ""
                cells += [f"{1e3 * row['seconds']:.3g}", line]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(groups: dict[int, dict[str, Any]], file: Path) -> None:
    """Draw one picture for each number of ranks: measured points, the formulas' lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(groups), 4.2), layout="constrained")
    for axes, (ranks, group) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        for number, way in enumerate((*WAYS, "gloo")):
            rows = [one for one in group["rows"] if one["way"] == way]
            sizes = [one["bytes"] for one in rows]
            axes.plot(sizes, [1e3 * one["seconds"] for one in rows], "o", color=f"C{number}", label=way, markersize=4)
            if way in WAYS:
                lines = [1e3 * predicted(way, ranks, s, group["alpha_s"], group["beta_bytes_s"]) for s in sizes]
                axes.plot(sizes, lines, color=f"C{number}", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{ranks} ranks")
        axes.set_xlabel("bytes")
        axes.set_ylabel("milliseconds")
        axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
