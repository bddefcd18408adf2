"""`zerofit compare`: ways to train in parallel, batch sizes and numbers of ranks, side by side on the same work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerofit.cli.answer import answer
from zerofit.cli.options import run_options
from zerofit.compare.job import WARM

WORK = ("model_args", "data", "data_root", "image_size", "seq_len", "tokenizer", "seed")
SCALES = ("none", "linear", "sqrt")
LR_HELP = "learning rate of SGD with momentum 0.9"


def worked(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options that all comparisons have."""
    rate = click.option("--lr", type=click.FloatRange(0, min_open=True), default=0.02, show_default=True, help=LR_HELP)
    place = click.option("--output", type=click.Path(path_type=Path), help="folder for results [runs/compare-...]")
    return place(rate(command))


def stepped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options of comparisons that train for some steps."""
    positive = click.IntRange(min=1)
    batch = click.option("--global-batch", type=positive, default=64, show_default=True, help="samples of a step")
    steps = click.option("--steps", type=click.IntRange(min=WARM + 1), default=60, show_default=True, help="of SGD")
    limit = click.option(
        "--eval-samples", type=positive, default=1000, show_default=True, help="of the validation data"
    )
    return batch(steps(limit(command)))


@click.group()
def compare() -> None:
    """Measure ways to train on the same model, data, initial weights and order of samples."""


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        found = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 16,32,64") from None
    if min(found) < 1 or len(set(found)) < len(found):
        raise click.BadParameter(f"{value!r}: numbers of 1 or more, each once")
    return found


def _list(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from zerofit.compare.catalog import STRATEGIES

    for one in STRATEGIES.values():
        click.echo(f"{one.name:24} {one.title}")
    context.exit()


@compare.command()
@click.argument("model")
@click.option("--strategies", "names", metavar="NAME,...", help="only these [all]")
@click.option("--list", "listing", is_flag=True, is_eager=True, expose_value=False, callback=_list)
@run_options((*WORK, "ranks"))
@stepped
@worked
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def strategies(model: str, as_json: bool, names: str | None, **options: Any) -> None:
    """Train MODEL in every classic way for the same samples: speed, memory, bytes on the wire, difference of weights.

    One that fails, or that these devices cannot run, is a row with its reason. The same command goes on after a kill.
    """
    from zerofit.app.comparing.comparisons import compare_strategies
    from zerofit.cli.compare_show import show_strategies

    answer(lambda: compare_strategies(model, names, _given(options)), as_json, show_strategies)


@compare.command(name="batch-size")
@click.argument("model")
@click.option("--sizes", callback=_numbers, default="16,32,64,128,256,512", show_default=True, help="samples of a step")
@click.option("--target", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="accuracy")
@click.option("--scale-lr", type=click.Choice(SCALES), default="none", show_default=True, help="lr with the batch size")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="runs of each size")
@click.option("--epochs", type=click.IntRange(min=1), default=5, show_default=True, help="of every run")
@click.option("--eval-samples", type=click.IntRange(min=1), help="validation samples an evaluation looks at [all]")
@run_options(WORK)
@worked
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def batch_size(model: str, as_json: bool, **options: Any) -> None:
    """Which batch size reaches the target accuracy first, and where larger ones stop helping.

    Each run is on one device. --lr is that of the smallest size; --scale-lr raises it for larger ones.
    """
    from zerofit.app.comparing.comparisons import compare_sizes
    from zerofit.cli.compare_show import show_sizes

    own = {name: options.pop(name) for name in ("sizes", "target", "scale_lr", "seeds", "epochs")}
    answer(lambda: compare_sizes(model, own, _given(options)), as_json, show_sizes)


@compare.command()
@click.argument("model")
@click.option("--strategy", "name", default="ddp", show_default=True, help="one that shares the batch out over ranks")
@run_options((*WORK, "ranks"))
@stepped
@worked
@click.option("--json", "as_json", is_flag=True, help="print one JSON object as the last line")
def scaling(model: str, as_json: bool, name: str, **options: Any) -> None:
    """1 to --ranks ranks, weak (the batch grows with them) and strong (it does not), with their efficiency."""
    from zerofit.app.comparing.comparisons import compare_scaling
    from zerofit.cli.compare_show import show_scaling

    answer(lambda: compare_scaling(model, name, _given(options)), as_json, show_scaling)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
