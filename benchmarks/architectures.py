"""Every architecture of the installed transformers: do parameters and peaks agree, and what is refused; see README.md.

python benchmarks/architectures.py [--only WORD ...] [--plan-only] [--seconds S] [--out FILE]

Each is its config class with default widths and few layers, as transformers writes it to a config.json. Its parameters
are counted by transformers, by zerofit and in plan's profile; one layout's peak is forecast by plan and by simulate.
Exit code 1 where two counts differ, two peaks differ by more than TOLERANCE, or zerofit ends in an error of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from meter.planned import traced
from transformers.models.auto import modeling_auto

from zerofit.app.simulation.runs import prepare_simulation
from zerofit.models.catalog import ModelError
from zerofit.plan.layout import PlannedLayout
from zerofit.plan.memory import Forecaster
from zerofit.simulate.forecast.run import simulate_ranks
from zerofit.simulate.record import SimulationTarget
from zerofit.spec.cluster import Cluster
from zerofit.spec.errors import Problem, UserError, reason_of
from zerofit.spec.run import Run, RunRequest

TASKS = {
    "IMAGE_CLASSIFICATION": "AutoModelForImageClassification",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
}
LAYERS = 3  # more than plan traces of equal layers
DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "depth")
SEQ_LEN = 64
TOLERANCE = 0.03
LIMIT_S = 300.0
OK, REFUSED, DIFFERENT, ERROR, UNFINISHED = "ok", "refused", "different", "error", "unfinished"
NOT_BUILT = "not built by transformers"


@dataclass(kw_only=True)
class Row:
    """What was found of one architecture."""

    task: str
    model_type: str
    architecture: str
    status: str = ERROR
    reason: str = ""
    parameters: int | None = None  # as transformers builds the model
    counted: int | None = None  # by zerofit, of the model that is trained
    profiled: int | None = None  # in plan's profile
    planned_bytes: int | None = None
    simulated_bytes: int | None = None
    seconds: float = 0.0


def architectures() -> Iterator[Row]:
    """Yield each model type of each task's table, with the classes' name."""
    for task in TASKS:
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            yield Row(task=task, model_type=model_type, architecture=name if isinstance(name, str) else name[0])


def small_config(model_type: str, architecture: str) -> Any:
    """Return the default config of a kind with few layers, of models within it, too."""
    cls = transformers.CONFIG_MAPPING[model_type]
    default = cls()
    within = {key: _few_layers(getattr(default, key)) for key in getattr(cls, "sub_configs", {})}
    wanted: dict[str, Any] = _few_layers(default) | {key: value for key, value in within.items() if value}
    none: dict[str, Any] = {}
    for values in (wanted, none):  # where a config has a list for each of its layers, other numbers do not go with it
        with suppress(Exception), torch.device("meta"):
            config = cls(**values)  # pyright: ignore[reportArgumentType]  # names of the class's own numbers
            config.architectures = [architecture]
            config.num_labels = 1000  # of the images that classifiers are fed
            getattr(transformers, architecture)(config)
            return config
    default.architectures = [architecture]
    return default


def _few_layers(config: Any) -> dict[str, Any]:
    known = config.to_dict() if config is not None else {}
    if isinstance(known.get("depths"), list | tuple):  # of stages
        return {}
    return {key: LAYERS for key in DEPTHS if isinstance(known.get(key), int) and known[key] > LAYERS}


def examined(row: Row, folder: Path) -> SimulationTarget | None:
    """Fill in what needs no simulation; return what is to be simulated."""
    try:
        config = small_config(row.model_type, row.architecture)
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = getattr(transformers, TASKS[row.task]).from_config(config)
        row.parameters = sum(p.numel() for p in model.parameters())
    except Exception as error:
        row.status, row.reason = NOT_BUILT, f"{type(error).__name__}: {reason_of(error)}"
        return None
    with refusals(row):
        config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
        seq_len = None if row.task == "IMAGE_CLASSIFICATION" else SEQ_LEN
        run = Run(model=str(folder), ds_config=config, optimizer="adamw", micro_batch=4, seq_len=seq_len)
        target = prepare_simulation(RunRequest.of(run), Cluster("h100-80gb", gpus=1)).target(0)
        row.counted = target.job.facts.parameters
        profile = traced(target)
        row.profiled = profile.parameters
        forecaster = Forecaster(profile, target.accelerator, target.workspace_bytes)
        row.planned_bytes = forecaster.memory(PlannedLayout.of(target.job)).peak_bytes
        return target


def judge(row: Row, target: SimulationTarget, simulated_too: bool) -> None:
    """Compare all figures, those of a simulation among them."""
    with refusals(row):
        near = True
        if simulated_too:
            simulated = simulate_ranks([target], lambda text: None)[0]
            if isinstance(simulated, Problem):
                raise UserError(simulated)
            row.simulated_bytes = simulated.record.peaks[0].bytes
            near = abs((row.planned_bytes or 0) / row.simulated_bytes - 1) <= TOLERANCE
        agree = row.parameters == row.counted == row.profiled
        row.status, row.reason = (OK, "") if agree and near else (DIFFERENT, "parameters" if near else "peak")


@contextmanager
def refusals(row: Row) -> Iterator[None]:
    """Note what zerofit refuses, and its own errors."""
    try:
        yield
    except (UserError, ModelError) as error:
        row.status, row.reason = REFUSED, str(error).replace(f"{tempfile.gettempdir()}/", "")
    except TimeoutError:
        raise
    except Exception as error:
        row.status, row.reason = ERROR, f"{type(error).__name__}: {reason_of(error)}"


def measure(row: Row, seconds: float, simulated_too: bool) -> Row:
    """Examine a row in a process of its own, forked from this one, which has imported everything; then simulate."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "row"
        pid = os.fork()
        if pid == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends the process
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            target = examined(row, Path(name) / row.model_type)
            result.write_bytes(pickle.dumps((row, target)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not result.exists():
            row.status = UNFINISHED if status & 127 == signal.SIGALRM else ERROR
            row.reason = f"ended by signal {status & 127} after {time.monotonic() - start:.0f} s"
            return row
        row, target = pickle.loads(result.read_bytes())
        if target is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                judge(row, target, simulated_too)
            except TimeoutError:
                row.status, row.reason = UNFINISHED, f"a simulation takes more than {seconds:.0f} s"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _ended(*_: Any) -> None:
    raise TimeoutError


def main() -> int:
    """0, or 1 where something differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="model types, or a task's name")
    parser.add_argument("--plan-only", action="store_true", help="simulate none, which takes most of the time")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="limit for each")
    parser.add_argument("--out", type=Path, help="JSON of all rows; those that it has stay, but for what is done again")
    asked = parser.parse_args()
    for name in (
        "transformers.integrations.deepspeed",
        "transformers.modeling_layers",
        "zerofit.simulate.costs.profile",
    ):
        import_module(name)
    signal.signal(signal.SIGALRM, _ended)
    kept = json.loads(asked.out.read_text())["each"] if asked.out and asked.out.is_file() else []
    rows = {(row["task"], row["model_type"]): Row(**row) for row in kept}
    for row in architectures():
        if asked.only and not {row.model_type, row.task} & set(asked.only):
            continue
        row = rows[row.task, row.model_type] = measure(row, asked.seconds, not asked.plan_only)
        print(f"{row.status:10} {row.task[:7]} {row.model_type} {row.seconds} s {shown(row)} {row.reason}", flush=True)
        if asked.out:
            write(asked.out, rows.values())
    counts = Counter(row.status for row in rows.values())
    print(json.dumps(counts))
    return int(counts[DIFFERENT] + counts[ERROR] > 0)


def shown(row: Row) -> str:
    """Return how far plan's peak is from simulate's."""
    return (
        f"peak {row.planned_bytes / row.simulated_bytes - 1:+.2%}" if row.planned_bytes and row.simulated_bytes else ""
    )


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write all rows, in the order of transformers' tables, and what they were found with."""
    versions = {name: version(name) for name in ("transformers", "torch", "deepspeed")}
    order = [(row.task, row.model_type) for row in architectures()]
    each = [asdict(row) for row in sorted(rows, key=lambda row: order.index((row.task, row.model_type)))]
    counts = Counter(row["status"] for row in each)
    file.write_text(json.dumps({"versions": versions, "counts": counts, "each": each}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
