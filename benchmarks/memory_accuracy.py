"""How far `zerofit simulate` and `zerofit plan` are from what real runs allocate; see README.md.

python benchmarks/memory_accuracy.py [--configs WORDS] [--ranks 1 2 4] [--out FILE]

Each configuration is trained for three steps by real ranks under an exact allocator meter, and simulated and forecast
for every rank. Exit code 1 where a figure misses its target.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from meter.comparison import TARGETS, Comparison, compare
from meter.configurations import NAMES, target
from meter.pool import Ranks
from meter.report import draw, summary, table, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def main() -> int:
    """0, or 1 where a figure misses its target or a configuration fails."""
    asked = parse()
    names = [name for name in NAMES if chosen(name, asked.configs, asked.ranks)]
    if not names:
        raise SystemExit(f"no configuration has all of: {' '.join(asked.configs)}")
    found: list[Comparison] = []
    for one in run(names):
        found.append(one)
        if asked.out:
            write(found, asked.out)
    console = Console()
    console.print(table(found))
    console.print(summary(found))
    if asked.out and found:
        draw(found, asked.out.with_suffix(".png"))
    return 0 if len(found) == len(names) and all(goal.met(found) for goal in TARGETS) else 1


def chosen(name: str, words: list[str], ranks: list[int]) -> bool:
    """Whether a configuration has one of each word's alternatives, and one of these numbers of ranks."""
    has = set(name.split())
    return all(has & set(word.split(",")) for word in words) and int(name.rpartition("x")[2]) in ranks


def run(names: list[str]) -> Iterator[Comparison]:
    """Train, simulate and forecast each configuration; those that fail say so, and are left out."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, tempfile.TemporaryDirectory() as folder:
        bar = progress.add_task("", total=len(names))
        with Ranks(Path(folder), lambda text: progress.update(bar, description=text)) as ranks:
            for name in names:
                ranks.show = lambda text, name=name: progress.update(bar, description=f"{name}: {text}")
                started = time.monotonic()
                try:
                    found = compare(name, target(name), ranks)
                except RuntimeError as error:
                    progress.print(f"{name}: {error}", markup=False)
                else:
                    progress.print(f"{found.line()}  {time.monotonic() - started:.0f} s", markup=False)
                    yield found
                progress.advance(bar)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--configs", nargs="*", default=[], help="only those with all these: llama zero2,zero3")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4], help="only those with so many ranks")
    parser.add_argument("--out", type=Path, help="write a JSON file, and a plot beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
