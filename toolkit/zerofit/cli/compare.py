"""`zerofit compare`: measure strategies, batch sizes and numbers of ranks on one task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from zerofit.cli.answer import R
from zerofit.cli.console import EventConsole, answer_watched, fitting_table, out, print_facts, print_verdict
from zerofit.cli.options import ANYWAY, AS_JSON, PATH, Group, Number, add_options, given, run_options
from zerofit.compare.job import STRATEGIES, WARM, CompareJob
from zerofit.spec.run import load_run
from zerofit.spec.units import counted

if TYPE_CHECKING:
    from zerofit.app.comparing.laboratory import Laboratory
    from zerofit.app.comparing.rows import Comparison, ScalingRow, SizeRow, SizeSummary, StrategyRow

FIELDS = ("model_args", "data", "data_root", "image_size", "seq_len", "tokenizer", "seed")  # options of a run
SCALES = ("none", "linear", "sqrt")
LR_HELP = "learning rate of SGD with momentum 0.9"
POSITIVE = click.IntRange(min=1)
AGAIN = "repeat the command: zerofit keeps finished rows"
STYLES = {"failed": "red", "does-not-fit": "red", "not-here": "dim"}
# columns by importance: a narrow terminal shows only the first columns; results.csv has all
KEEP = ("samples/s", "speed-up", "accuracy", "memory a rank", "sent a step", "weights differ by", "loss", "tokens/s")


def job_default(field: str, words: str) -> dict[str, Any]:
    """Return arguments for `click.option`: the default of a field of `CompareJob`, and its help."""
    return {"default": getattr(CompareJob, field), "show_default": True, "help": words}


common_options = add_options(
    click.option("--lr", type=Number(0, min_open=True), **job_default("lr", LR_HELP)),
    click.option("--output", type=PATH, help="folder for results [runs/compare-...]"),
    click.option(
        "--hostfile", type=PATH, help="file of hosts to run on over ssh, with lines like `node1 slots=2` [this machine]"
    ),
    ANYWAY,
    AS_JSON,
)
step_options = add_options(  # of comparisons that train for some steps
    click.option("--global-batch", type=POSITIVE, **job_default("global_batch", "samples per step")),
    # The first WARM steps are not timed, so one more is the least.
    click.option(
        "--steps", type=click.IntRange(min=WARM + 1), **job_default("steps", "optimizer steps of each strategy")
    ),
    click.option("--eval-samples", type=POSITIVE, **job_default("eval_samples", "validation samples per evaluation")),
)


@click.group(cls=Group)
def compare() -> None:
    """Compare ways to train, each with the same model, data, initial weights and order of samples."""


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    return [name.strip() for name in value.split(",")] if value else None


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of integers such as 16,32,64") from None
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{value!r} is not a list of different integers of at least 1")
    return numbers


def _list(context: click.Context, parameter: click.Parameter, listing: bool) -> None:
    if not listing or context.resilient_parsing:
        return
    # An eager option: it needs no MODEL, and ends the command.
    for strategy in STRATEGIES.values():
        click.echo(f"{strategy.name:24} {strategy.title}")
    context.exit()


def _paces(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[int, float]:
    try:
        return {int(rank): float(times) for rank, _, times in (value.partition("=") for value in values)}
    except ValueError:
        raise click.BadParameter(f"{' '.join(values)!r} is not RANK=FACTOR, such as 1=4") from None


def _finish(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    size, _, epochs = value.partition("=")
    if not (size.isdecimal() and epochs.isdecimal() and int(size)):
        raise click.BadParameter(f"{value!r} is not SIZE=EPOCHS, such as 16=2")
    return int(size), int(epochs)


@compare.command()
@click.argument("model")
@click.option("--strategies", metavar="NAME,...", callback=_names, help="strategies to run [all]")
@click.option(
    "--slow", multiple=True, callback=_paces, metavar="RANK=FACTOR", help="multiply the step time of RANK by FACTOR"
)
@click.option("--straggle", type=float, default=0.0, metavar="P", help="probability that a step is 5 times slower")
@click.option("--target", type=Number(0, 1, min_open=True), help="report when parameter servers reach this accuracy")
@click.option(
    "--list", "listing", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="list the strategies"
)
@run_options((*FIELDS, "ranks"))
@step_options
@common_options
def strategies(model: str, as_json: bool, **options: object) -> None:
    """Train MODEL with each strategy on the same samples, and compare speed, memory, traffic and weights.

    If a strategy fails or cannot run on these devices, the table shows the reason. Repeat the command to resume.
    """
    from zerofit.app.comparing.comparisons import compare_strategies

    own = ("strategies", "slow", "straggle", "target")
    _compare(partial(compare_strategies, **_pop(options, own)), model, options, as_json, show_strategies)


@compare.command(name="batch-size")
@click.argument("model")
@click.option("--sizes", callback=_numbers, default="16,32,64,128,256,512", show_default=True, help="samples per step")
@click.option("--target", type=Number(0, 1, min_open=True), default=0.95, show_default=True, help="accuracy")
@click.option(
    "--scale-lr", type=click.Choice(SCALES), default="none", show_default=True, help="how --lr grows with the size"
)
@click.option("--per-rank", type=POSITIVE, help="train on DDP ranks with this many samples per step each [one device]")
@click.option(
    "--finish",
    callback=_finish,
    metavar="SIZE=EPOCHS",
    help="train the last EPOCHS epochs of every run with batches of SIZE",
)
@click.option("--seeds", type=POSITIVE, default=3, show_default=True, help="runs of each batch size")
@click.option("--epochs", type=POSITIVE, default=5, show_default=True, help="epochs of every run")
@click.option("--eval-samples", type=POSITIVE, help="validation samples per evaluation [all]")
@run_options(FIELDS)
@common_options
def batch_size(model: str, as_json: bool, **options: object) -> None:
    """Show the batch size that reaches the target accuracy first, and the size above which training gets no faster.

    --lr is the learning rate of the smallest size; --scale-lr raises it for larger sizes.
    """
    from zerofit.app.comparing.comparisons import compare_sizes

    own = ("sizes", "target", "scale_lr", "per_rank", "finish", "seeds")
    _compare(partial(compare_sizes, **_pop(options, own)), model, options, as_json, show_sizes)


@compare.command()
@click.argument("model")
@click.option("--strategy", default="ddp", show_default=True, help="a strategy that divides the batch among ranks")
@run_options((*FIELDS, "ranks"))
@step_options
@common_options
def scaling(model: str, as_json: bool, **options: object) -> None:
    """Measure weak scaling (the batch grows with the ranks) and strong scaling (it does not) on 1 to --ranks ranks."""
    from zerofit.app.comparing.comparisons import compare_scaling

    _compare(partial(compare_scaling, **_pop(options, ("strategy",))), model, options, as_json, show_scaling)


@compare.command(name="all")
@click.argument("model", default="lenet")
@click.option("--target", type=Number(0, 1, min_open=True), default=0.9, show_default=True, help="accuracy")
@click.option("--seeds", type=POSITIVE, default=3, show_default=True, help="runs of each batch size")
@click.option("--epochs", type=POSITIVE, default=10, show_default=True, help="epochs of each of these runs")
@run_options((*FIELDS, "ranks"))
@step_options
@common_options
def all_experiments(model: str, as_json: bool, **options: object) -> None:
    """Run every experiment with MODEL, on 1, 2, 4, ... --ranks ranks, and write one page about all of them.

    --lr is the learning rate for --global-batch. Repeat the command to resume.
    """
    from zerofit.app.comparing.laboratory import compare_all

    _compare(partial(compare_all, **_pop(options, ("target", "seeds"))), model, options, as_json, show_laboratory)


def _pop(options: dict[str, object], names: Sequence[str]) -> dict[str, object]:
    """Remove the options that do not belong to the run, and return them: `names` and the hosts."""
    return {name: options.pop(name) for name in (*names, "hostfile", "anyway")}


def _compare(
    work: Callable[..., R], model: str, options: dict[str, object], as_json: bool, show: Callable[[R], None]
) -> None:
    """Call `work` with a run from the other options, show its events, and print its answer."""

    def watched(events: EventConsole) -> R:
        return work(load_run(None, {"model": model, **given(options)}), on_event=events)

    answer_watched(watched, as_json, show, AGAIN)


def show_strategies(result: Comparison[StrategyRow]) -> None:
    """Print the fastest strategy, a table of all strategies, and why some differ or did not run."""
    console = out()
    ran = [row for row in result.rows if row.samples_per_s]
    best = max(ran, key=lambda row: row.samples_per_s or 0, default=None)
    words = f"{best.strategy}, {best.samples_per_s:,.0f} samples/s" if best else "see the reasons below"
    gain = f", {best.speedup:.2f} times as fast as one device" if best and (best.speedup or 0) > 1 else ""
    print_verdict(console, "FASTEST" if best else "NOTHING RAN", words + gain, good=best is not None)
    _print_rows(console, result)
    for row in result.rows:
        # `agrees` is None if the weights need not be equal, as for asynchronous strategies.
        if row.agrees is False:
            words = f"{row.strategy}: weights differ by {row.max_weight_difference:.1e} from those of a single device"
            # Each rank normalizes by its own part of the batch, so other weights are no fault of the strategy.
            words += "; the cause is batch norm over each rank's own part of the batch" if row.batch_norm else ""
            console.print(words, style="yellow")
        if row.staleness:
            mean, most = sum(row.staleness) / len(row.staleness), max(row.staleness)
            console.print(f"{row.strategy}: staleness {mean:.2f} updates on average, {most} at most")
        if row.dropped:
            console.print(f"{row.strategy}: {row.dropped} gradients were dropped because they came too late")
        if row.curve:
            when = "not reached" if row.seconds_to_target is None else f"after {row.seconds_to_target:.1f} s"
            console.print(f"{row.strategy}: accuracy {result.about['target']:.1%} {when}")
    _print_files(console, result)


def show_sizes(result: Comparison[SizeRow]) -> None:
    """Print the batch size that reached the target first, all runs, and the critical size."""
    console, target = out(), f"{result.about['target']:.1%}"
    reached, words = _first_to_target(result.summary or (), target, result.about["epochs"])
    print_verdict(console, "FIRST" if reached else "NOT REACHED", words, good=reached)
    _print_rows(console, result)
    names, rows = result.short_table()
    medians = [dict(zip(names, row, strict=True)) for row in rows]
    console.print(fitting_table(console, medians, (), names, names[0]))
    if result.critical_batch:
        words = f"critical batch size: {result.critical_batch:,.0f} samples; reaching {target} at this size needs twice"
        print_facts(console, [("", f"{words} as many samples as with the smallest batches")], 0)
    _print_files(console, result)


def show_laboratory(result: Laboratory) -> None:
    """Print the path of the page, and each experiment's question and number of rows."""
    console = out()
    print_verdict(console, "DONE", f"{counted(len(result.experiments), 'experiment')} in {result.written[0]}")
    for done in result.experiments:
        rows = done.compared.rows
        ran = sum(row.status == "ok" for row in rows)
        words = f"{done.experiment.name}: {done.experiment.question} {ran} of {len(rows)} rows have figures"
        print_facts(console, [("", words)], 0, hang=2)


def show_scaling(result: Comparison[ScalingRow]) -> None:
    """Print the efficiency on the most ranks, and all rows of weak and strong scaling."""
    console = out()
    ran = [row for row in result.rows if row.efficiency is not None]
    most = max((row.ranks for row in ran), default=0)
    shares = [f"{row.efficiency:.0%} in {row.mode} scaling" for row in ran if row.ranks == most]
    words = f"{', '.join(shares)} on {most} ranks" if shares else "see the reasons below"
    print_verdict(console, "EFFICIENCY" if shares else "NOTHING RAN", words, good=bool(shares))
    _print_rows(console, result)
    _print_files(console, result)


def _first_to_target(summary: Sequence[SizeSummary], target: str, epochs: int) -> tuple[bool, str]:
    """Return whether a batch size reached the target with every seed, and a sentence about it."""
    # A size that missed the target with one seed is not a reliable choice.
    medians = {
        size.batch_size: size.seconds_to_target[0]
        for size in summary
        if size.seconds_to_target and size.reached == size.runs
    }
    if not medians:
        return False, f"no batch size reached {target} in {epochs} epochs with every seed: raise --epochs or --lr"
    best = min(medians, key=lambda size: medians[size])
    words = f"batch size {best} reached {target} after {medians[best]:.1f} s (median)"
    larger = [size.batch_size for size in summary if size.batch_size > best]
    return True, words + (f"; sizes of {larger[0]} and more are no faster" if larger else "")


def _print_rows(console: Console, result: Comparison[Any]) -> None:
    names, rows = result.table()
    # Rows without figures are shorter. Their reasons follow below the table.
    filled = [dict(zip(names, [*row, *["-"] * (len(names) - len(row))], strict=True)) for row in rows]
    styles = [STYLES.get(row.status) for row in result.rows]
    console.print(fitting_table(console, filled, names[1:], (names[0], *KEEP), names[0], styles))
    for row in result.rows:
        if row.status != "ok":
            print_facts(console, [("", f"{result.name_of(row)}: {row.reason}")], 0, hang=2, style="dim")


def _print_files(console: Console, result: Comparison[Any]) -> None:
    for path in result.written:
        console.print(f"written: {path}", soft_wrap=True)
