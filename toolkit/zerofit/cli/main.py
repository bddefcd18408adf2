"""The `zerofit` command."""

from __future__ import annotations

import json

import click

from zerofit.cli.answer import fail_internally
from zerofit.cli.calibrate import calibrate
from zerofit.cli.check import check, schema
from zerofit.cli.ckpt import ckpt
from zerofit.cli.compare import compare
from zerofit.cli.doctor import doctor
from zerofit.cli.eval import evaluate
from zerofit.cli.generate import generate
from zerofit.cli.launch import launch
from zerofit.cli.models import models
from zerofit.cli.plan import plan
from zerofit.cli.plot import plot
from zerofit.cli.simulate import simulate
from zerofit.cli.train import train
from zerofit.cli.tune import tune
from zerofit.spec.errors import Problem


class Commands(click.Group):
    """A group whose usage errors are JSON too where a command is asked for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember whether `--json` stands among the arguments."""
        ctx.meta["json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; click prints its errors and exits with 2, an error of zerofit itself ends with 70."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError) as error:
            if ctx.meta["json"] and isinstance(error, click.UsageError):
                problem = Problem(kind="usage", message=error.format_message(), hint="see --help")
                print(json.dumps({"error": problem.as_dict()}), flush=True)
            raise
        except Exception as error:
            fail_internally(error, ctx.meta["json"])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="zerofit")
def main() -> None:
    """Train CNNs and Transformers that no longer fit, through the DeepSpeed engine."""


RUNS = (train, launch, tune, compare, ckpt, evaluate, generate, plot, models)
JUDGES = (plan, simulate, check, schema, doctor, calibrate)
for command in (*RUNS, *JUDGES):
    main.add_command(command)
