"""How much host memory the start of a training takes, real and simulated; see README.md.

python benchmarks/start_memory.py [--model NAME] [--ranks 1 2 4] [--stages 0 1 2 3] [--limit GB] [--quantize nf4]
    [--out FILE --label L]

Each start is real: ranks on CPUs under an exact allocator meter build the model in bf16, drawn from a seed or read from
a pretrained folder, and hand it to the engine; no step is trained. The same ranks are simulated. Figures are bytes of
tensors, the most that a rank has had while it built the model and while the engine took it over. Where the forecast of
the engine's part is over the limit for all ranks together, a start ends when the model is built; where that is over it
too, it is left out. Exit code 1 where simulation and start differ by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from meter.pool import Ranks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from zerofit.app.training.train import prepare
from zerofit.data.opening import open_data
from zerofit.models.build import build
from zerofit.models.catalog import find
from zerofit.models.inputs import TextInputs
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.events import Reporter
from zerofit.spec.run import load_run

GOAL = 0.02
PHASES = ("build", "init")
SEQ_LEN = 128


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: the highest peak of its ranks in each phase, in bytes."""

    stage: int
    ranks: int
    weights: str  # drawn, or read from a pretrained folder
    real: dict[str, int]
    simulated: dict[str, int]

    @property
    def error(self) -> float:
        """The relative error of the simulation that is furthest from 0."""
        return max((self.simulated[p] / self.real[p] - 1 for p in self.real), key=abs)


def main() -> int:
    """0, or 1 where a simulation is off by more than the goal."""
    asked = parse()
    console = Console()
    found = list(run(asked, console))
    console.print(table(found))
    if asked.out:
        kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        kept[asked.label] = {"model": asked.model, "torch": torch.__version__, "starts": [asdict(one) for one in found]}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(abs(one.error) > GOAL for one in found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset of transformers")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--quantize", choices=["nf4", "int8"], help="keep the weights so, beside adapters of rank 8")
    parser.add_argument("--limit", type=float, default=16.0, help="GB that all ranks together may take")
    parser.add_argument("--out", type=Path, help="a JSON file to which the figures are added")
    parser.add_argument("--label", default="now", help="their name in that file")
    return parser.parse_args()


def run(asked: argparse.Namespace, console: Console) -> Iterator[Start]:
    """Start each combination that the limit allows."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cases = [(w, s, n) for w in ("drawn", "read") for s in asked.stages for n in asked.ranks]
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bar = progress.add_task("", total=len(cases))
        with Ranks(folder / "ranks", lambda text: progress.update(bar, description=text)) as ranks:
            progress.update(bar, description="writing the pretrained folder")
            save(asked.model, folder / "pretrained")
            for weights, stage, count in cases:
                model = asked.model if weights == "drawn" else str(folder / "pretrained")
                one = target(model, stage, count, folder / f"{weights}-{stage}-{count}", asked.quantize)
                simulated = highest(ranks.simulated(one))
                needed = [simulated[phase] * count / 1e9 for phase in PHASES]
                if needed[0] > asked.limit:
                    progress.print(f"{weights}, stage {stage}, {count} ranks: left out, {needed[0]:.1f} GB")
                else:
                    real = highest(ranks.real(one) if max(needed) <= asked.limit else ranks.built(one))
                    start = Start(stage=stage, ranks=count, weights=weights, real=real, simulated=simulated)
                    progress.print(f"{weights}, stage {stage}, {count} ranks: {100 * start.error:+.3f} %")
                    yield start
                progress.advance(bar)


def save(model: str, folder: Path) -> None:
    """Write a pretrained folder in bf16 with random weights."""
    built: Any = build(find(model), TextInputs(vocab_size=256, seq_len=SEQ_LEN), {})
    built.bfloat16().save_pretrained(folder)


def target(model: str, stage: int, ranks: int, output: Path, quantize: str | None) -> SimulationTarget:
    """Return the first rank of a start."""
    options = {"model": model, "data": "pysource", "tokenizer": "bytes", "seq_len": SEQ_LEN, "precision": "bf16"}
    options |= {"ds_config": f"zero{stage}", "ranks": ranks, "micro_batch": 1, "output": output}
    options |= {"lora": 8, "quantize": quantize} if quantize else {}
    prepared = prepare(load_run(None, options), Reporter())
    inputs = open_data(prepared.job.run, prepared.job.facts.task, SEQ_LEN, Reporter()).inputs
    return SimulationTarget(job=prepared.job, rank=0, inputs=inputs, accelerator="cpu", device_bytes=64 << 30, steps=0)


def highest(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Return the highest peak of the ranks in each phase, over what was alive when they began to build."""
    begun = [answer["phases"][0]["start_bytes"] for answer in answers]
    found: dict[str, int] = {}
    for answer, start in zip(answers, begun, strict=True):
        for one in answer["phases"]:
            found[one["name"]] = max(found.get(one["name"], 0), one["peak_bytes"] - start)
    return found


def table(found: list[Start]) -> Table:
    """Return the figures in GB."""
    shown = Table("weights", "stage", "ranks", "build", "simulated", "init", "simulated", "worst error")
    for one in found:
        pairs = [(one.real.get(phase), one.simulated[phase]) for phase in PHASES]
        cells = [f"{size / 1e9:.3f}" if size else "-" for pair in pairs for size in pair]
        shown.add_row(one.weights, str(one.stage), str(one.ranks), *cells, f"{100 * one.error:+.3f} %")
    return shown


if __name__ == "__main__":
    sys.exit(main())
