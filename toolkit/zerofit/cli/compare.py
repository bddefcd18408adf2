"""`zerofit compare`: ways to train in parallel, batch sizes and numbers of ranks, side by side on the same work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.console import EventConsole
from zerofit.cli.options import run_options
from zerofit.compare.job import WARM, CompareJob
from zerofit.spec.load import RunRequest, load_run

if TYPE_CHECKING:
    from zerofit.app.comparing.comparisons import ScaleLr
    from zerofit.app.comparing.result import Comparison
    from zerofit.app.comparing.rows import ScalingRow, SizeRow, StrategyRow

FIELDS = ("model_args", "data", "data_root", "image_size", "seq_len", "tokenizer", "seed")  # of a run
SCALES = ("none", "linear", "sqrt")
LR_HELP = "learning rate of SGD with momentum 0.9"
POSITIVE = click.IntRange(min=1)


def usual(field: str, words: str) -> dict[str, Any]:
    """Return the default and the help of an option."""
    return {"default": getattr(CompareJob, field), "show_default": True, "help": words}


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all comparisons have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line"),
        click.option("--output", type=click.Path(path_type=Path), help="folder for results [runs/compare-...]"),
        click.option("--lr", type=click.FloatRange(0, min_open=True), **usual("lr", LR_HELP)),
    ):
        command = option(command)
    return command


def step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of comparisons that train for some steps."""
    for option in (
        click.option("--eval-samples", type=POSITIVE, **usual("eval_samples", "of the validation data")),
        click.option("--steps", type=click.IntRange(min=WARM + 1), **usual("steps", "of SGD")),
        click.option("--global-batch", type=POSITIVE, **usual("global_batch", "samples of a step")),
    ):
        command = option(command)
    return command


@click.group()
def compare() -> None:
    """Measure ways to train on the same model, data, initial weights and order of samples."""


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        found = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 16,32,64") from None
    if min(found) < 1 or len(set(found)) < len(found):
        raise click.BadParameter(f"{value!r}: numbers of 1 or more, each once")
    return found


def _list(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if not given or context.resilient_parsing:
        return
    from zerofit.compare.catalog import STRATEGIES

    for one in STRATEGIES.values():
        click.echo(f"{one.name:24} {one.title}")
    context.exit()


@compare.command()
@click.argument("model")
@click.option("--strategies", "names", metavar="NAME,...", help="only these [all]")
@click.option("--list", "listing", is_flag=True, is_eager=True, expose_value=False, callback=_list)
@run_options((*FIELDS, "ranks"))
@step_options
@common_options
def strategies(model: str, as_json: bool, names: str | None, **options: Any) -> None:
    """Train MODEL in every classic way for the same samples: speed, memory, bytes on the wire, difference of weights.

    One that fails, or that these devices cannot run, is a row with its reason. The same command goes on after a kill.
    """
    from zerofit.app.comparing.comparisons import compare_strategies
    from zerofit.cli.compare_show import show_strategies

    chosen = [name.strip() for name in names.split(",")] if names else None

    def work() -> Comparison[StrategyRow]:
        with EventConsole() as events:
            return compare_strategies(_asked(model, options), strategies=chosen, on_event=events)

    answer(work, as_json, show_strategies)


@compare.command(name="batch-size")
@click.argument("model")
@click.option("--sizes", callback=_numbers, default="16,32,64,128,256,512", show_default=True, help="samples of a step")
@click.option("--target", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="accuracy")
@click.option("--scale-lr", type=click.Choice(SCALES), default="none", show_default=True, help="lr with the batch size")
@click.option("--seeds", type=POSITIVE, default=3, show_default=True, help="runs of each size")
@click.option("--epochs", type=POSITIVE, default=5, show_default=True, help="of every run")
@click.option("--eval-samples", type=POSITIVE, help="validation samples an evaluation looks at [all]")
@run_options(FIELDS)
@common_options
def batch_size(
    model: str,
    as_json: bool,
    sizes: tuple[int, ...],
    target: float,
    scale_lr: ScaleLr,
    seeds: int,
    **options: Any,
) -> None:
    """Show which batch size reaches the target accuracy first, and where larger ones stop helping.

    Each run is on one device. --lr is that of the smallest size; --scale-lr raises it for larger ones.
    """
    from zerofit.app.comparing.comparisons import compare_sizes
    from zerofit.cli.compare_show import show_sizes

    def work() -> Comparison[SizeRow]:
        choice = {"sizes": sizes, "target": target, "scale_lr": scale_lr, "seeds": seeds}
        with EventConsole() as events:
            return compare_sizes(_asked(model, options), **choice, on_event=events)

    answer(work, as_json, show_sizes)


@compare.command()
@click.argument("model")
@click.option("--strategy", default="ddp", show_default=True, help="one that shares the batch out over ranks")
@run_options((*FIELDS, "ranks"))
@step_options
@common_options
def scaling(model: str, as_json: bool, strategy: str, **options: Any) -> None:
    """Train on 1 to --ranks ranks, weak (the batch grows with them) and strong (it does not): their efficiency."""
    from zerofit.app.comparing.comparisons import compare_scaling
    from zerofit.cli.compare_show import show_scaling

    def work() -> Comparison[ScalingRow]:
        with EventConsole() as events:
            return compare_scaling(_asked(model, options), strategy=strategy, on_event=events)

    answer(work, as_json, show_scaling)


def _asked(model: str, options: dict[str, Any]) -> RunRequest:
    return load_run(None, {"model": model, **{name: value for name, value in options.items() if value is not None}})
