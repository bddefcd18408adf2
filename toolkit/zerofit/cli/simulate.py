"""`zerofit simulate`: what one rank of a run allocates, to the byte, before any GPU is there."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.hardware_options import clusters, hardware_options
from zerofit.cli.options import run_options
from zerofit.spec.events import Reporter

if TYPE_CHECKING:
    from zerofit.simulate.result import KnobResult, Simulation

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

    found: list[Simulation] = []

    def work() -> dict[str, Any]:
        found.append(_simulate(target, {**options, "as_json": as_json}))
        return found[0].to_dict()

    answer(work, as_json, lambda _: show_knobs(found[0]))
    sys.exit(0 if found[0].fits else FINDING)


def _simulate(target: str, options: dict[str, Any]) -> Simulation:
    start = time.perf_counter()
    from zerofit.app.requests import is_run_file
    from zerofit.spec.errors import Problem, Problems, UserError
    from zerofit.spec.load import load_run

    problems = Problems()
    flags = {name: options[name] for name in RUN_FIELDS if options[name] is not None}
    file = Path(target) if is_run_file(target) else None
    asked = problems.attempt(lambda: load_run(file, flags if file else {"model": target, **flags}))
    if options["gpus"] is None and asked and asked.run.ranks:
        options["gpus"] = asked.run.ranks // (options["nodes"] or 1)
    found = problems.attempt(lambda: clusters(**{name: options[name] for name in ("kinds", *HARDWARE)}))
    problems.raise_if_any()
    if len(found) > 1:
        hint = "`zerofit plan` compares several"
        raise UserError(Problem(kind="usage", message="--gpu names several kinds", hint=hint, where="--gpu"))
    result = _on(asked, found[0], options)
    return replace(result, seconds=round(time.perf_counter() - start, 1))


def _on(asked: Any, cluster: Any, options: dict[str, Any]) -> Simulation:
    click.echo("checking the run and the model ...", err=True)  # importing torch alone takes seconds
    from zerofit.app.simulation import prepare_target, ranks_of
    from zerofit.cli.progress import StatusLine
    from zerofit.cli.simulate_show import show
    from zerofit.simulate.assess import assess, is_inconclusive
    from zerofit.simulate.result import StagePeak
    from zerofit.simulate.run import simulate as run
    from zerofit.spec.errors import Problem, Problems

    prepared = prepare_target(asked, cluster, options["image"], Reporter(EventConsole()))
    targets = [prepared.target(rank, cluster) for rank in ranks_of(prepared, options["rank"])]
    with StatusLine() as line:
        simulated = run(targets, line.show, exact=options["exact"] or options["plot"] is not None)
        for n, found in enumerate(simulated):
            if not isinstance(found, Problem) and is_inconclusive(found, cluster):
                simulated[n] = run([targets[n]], line.show, exact=True)[0]
        failed = Problems()
        failed.extend(s for s in simulated if isinstance(s, Problem))
        failed.raise_if_any()
        stages = [assess(rank, cluster) for rank in simulated if not isinstance(rank, Problem)]
        worst = max(range(len(stages)), key=lambda n: stages[n].reserved_bytes)
        result = stages[worst]
        if len(stages) > 1:
            names = ("rank", "peak_bytes", "peak_phase", "reserved_bytes", "fits")
            peaks = tuple(StagePeak(**{name: getattr(stage, name) for name in names}) for stage in stages)
            result = replace(result, stages=peaks, fits=all(stage.fits for stage in stages))
    if options["plot"]:
        result.plot(options["plot"])
        result = replace(result, picture=options["plot"])
    if not options["as_json"]:
        show(result)  # knobs take longer than the answer itself
    knobs = _knobs(asked, prepared, cluster, targets[worst], options) if options["knobs"] else ()
    return replace(result, knobs=tuple(knobs))


def _knobs(asked: Any, prepared: Any, cluster: Any, target: Any, options: dict[str, Any]) -> list[KnobResult]:
    """What each change would bring, the most helpful first; a rank of the same pipeline stage is simulated."""
    from zerofit.app.simulation import turned
    from zerofit.cli.progress import StatusLine
    from zerofit.simulate.assess import assess
    from zerofit.simulate.knobs import knobs
    from zerofit.simulate.result import KnobResult
    from zerofit.simulate.run import SimulatedRank
    from zerofit.simulate.run import simulate as run

    tried = []
    for knob in knobs(prepared.job, prepared.written):
        job = turned(asked, knob, cluster, options["image"])
        if job is not None:
            tried.append((knob.change, job.target(target.rank, cluster)))
    with StatusLine() as line:
        targets = [target for _, target in tried]
        simulated = run(targets, lambda text: line.show(f"knobs: {text}"), exact=options["exact"])
    rows = []
    for (change, _), rank in zip(tried, simulated, strict=True):
        if isinstance(rank, SimulatedRank):
            found = assess(rank, cluster)
            names = ("peak_bytes", "reserved_bytes", "host_node_bytes", "fits")
            rows.append(KnobResult(change=change, **{name: getattr(found, name) for name in names}))
    return sorted(rows, key=lambda row: row.peak_bytes)
