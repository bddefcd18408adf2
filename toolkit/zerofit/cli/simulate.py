"""`zerofit simulate`: what one rank of a run allocates, to the byte, before any GPU is there."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.app.requests import read_request
from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.hardware_options import clusters, hardware_options
from zerofit.cli.options import run_options
from zerofit.spec.errors import Problems
from zerofit.spec.events import Event
from zerofit.spec.load import RunRequest

if TYPE_CHECKING:
    from zerofit.simulate.result import Simulation
    from zerofit.spec.cluster import Cluster

FINDING = 1
HARDWARE = ("gpus", "nodes", "host_memory", "device_memory")
RUN_FIELDS = (
    *("model_args", "loss", "data", "data_root", "tokenizer", "image_size", "steps", "micro_batch"),
    *("gradient_accumulation_steps", "global_batch", "seq_len", "optimizer", "gradient_clipping", "precision"),
    *("activation_checkpointing", "loss_chunk", "ds_config", "ranks"),
    *("tensor_parallel", "pipeline", "sequence_parallel"),
)


@click.command()
@click.argument("target", metavar="MODEL | RUN.yaml")
@hardware_options(*HARDWARE, kinds="h100-80gb, ..., cpu (default: this machine)")
@click.option("--rank", type=click.IntRange(min=0), help="the rank to simulate (default: one of each pipeline stage)")
@click.option("--input", "image", metavar="image:CxHxW", help="what an image model is fed, where no --data is named")
@click.option("--exact", is_flag=True, help="simulate every layer of a large model instead of extending from few")
@click.option("--knobs/--no-knobs", default=True, help="simulate what could be changed, too")
@click.option("--plot", type=click.Path(path_type=Path), help="picture of the memory over the run (implies --exact)")
@run_options(RUN_FIELDS)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def simulate(target: str, as_json: bool, **options: Any) -> None:
    """Run the real DeepSpeed engine as one rank of MODEL's training (or RUN.yaml's), without memory and without GPUs.

    Exit code 0: it fits, 1: it does not, or only within the margin, 2: bad input.
    """
    from zerofit.cli.simulate_show import show_knobs

    result = answer(lambda: _simulate(target, as_json, options), as_json, show_knobs)
    sys.exit(0 if result.fits else FINDING)


def _simulate(target: str, as_json: bool, options: dict[str, Any]) -> Simulation:
    """Simulate, and show the answer before its knobs, which take longer."""
    start = time.perf_counter()
    asked, cluster = _asked(target, options)
    with EventConsole() as console:
        console(Event(kind="status", text="checking the run and the model ..."))  # importing torch takes seconds
        from zerofit.app.simulation import simulate as run

        exact = options["exact"] or options["plot"] is not None
        result = run(asked, cluster, rank=options["rank"], image=options["image"], exact=exact, on_event=console)
    if options["plot"]:
        result.plot(options["plot"])
        result = replace(result, picture=options["plot"])
    if not as_json:
        from zerofit.cli.simulate_show import show

        show(result)
    if options["knobs"]:
        with EventConsole() as console:
            result.knobs(console)
    return replace(result, seconds=round(time.perf_counter() - start, 1))


def _asked(target: str, options: dict[str, Any]) -> tuple[RunRequest, Cluster]:
    """Return the run and the hardware that are named. Raises UserError with all that is wrong."""
    problems = Problems()
    flags = {name: options[name] for name in RUN_FIELDS if options[name] is not None}
    asked = problems.attempt(lambda: read_request(target, flags))
    hardware = {name: options[name] for name in ("kinds", *HARDWARE)}
    if hardware["gpus"] is None and asked and asked.run.ranks:
        hardware["gpus"] = asked.run.ranks // (hardware["nodes"] or 1)
    found = problems.attempt(lambda: clusters(**hardware))
    if found and len(found) > 1:
        problems.add("usage", "--gpu names several kinds", "`zerofit plan` compares several", "--gpu")
    problems.raise_if_any()
    assert asked and found
    return asked, found[0]
