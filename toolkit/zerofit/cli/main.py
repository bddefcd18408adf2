"""The `zerofit` command."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import pairwise
from typing import Any

import click

from zerofit.cli.answer import fail, fail_internally
from zerofit.cli.terminal import safe_output
from zerofit.launch.world import World, given_world, leave_world, refused_in
from zerofit.spec.errors import Problem, UserError

NO_SSH = "--no-ssh"
MAY_BE_EMPTY = ("--prompt", "--setup")  # `generate` may continue an empty text; a job may need no set-up

# name -> module of zerofit.cli, whose function has the command's name ("evaluate" for eval), and the line in --help
COMMANDS = {
    "calibrate": ("machine", "Measure this machine's kernels and links for `zerofit plan` (under a minute)."),
    "check": ("check", "Find all faults in a DeepSpeed JSON before a run starts."),
    "ckpt": ("ckpt", "List, verify, compare, convert and export checkpoints."),
    "compare": ("compare", "Compare ways to train by measuring them with the same model, data and weights."),
    "data": ("data", "Show the tokens that a language model trains on."),
    "doctor": ("machine", "Check and measure this machine, or all hosts of a hostfile."),
    "eval": ("inference", "Evaluate a run, a checkpoint, an exported model or a Hugging Face folder."),
    "explain": ("explain", "Explain an out-of-memory error from a log, a memory snapshot or a run folder."),
    "generate": ("inference", "Generate text with a run, a checkpoint or a causal language model."),
    "launch": ("launch", "Train on many hosts with the deepspeed launcher."),
    "mcp": ("mcp", "Start an MCP server: a coding agent can call simulate, plan, check and explain."),
    "models": ("train", "List the named models with their parameter counts."),
    "plan": ("plan", "List the layouts of a model that fit a cluster, fastest first."),
    "plot": ("train", "Plot loss, throughput and memory of run folders."),
    "replay": ("replay", "Repeat the steps before a loss that is not finite, and name the cause."),
    "report": ("report", "Write one page about runs, simulations, plans, explanations and checks."),
    "schema": ("check", "Print a JSON Schema of DeepSpeed's configuration, for editors."),
    "simulate": ("simulate", "Forecast the memory of one rank to the byte, without a GPU."),
    "train": ("train", "Train a model on the devices of this machine."),
    "tune": ("tune", "Measure short runs and write the fastest configuration that fits."),
}


# A command's module is imported when it runs: together they import rich, pydantic and YAML, which takes
# half a second. `zerofit --help` and completion must answer in 0.2 s, so the lines above repeat the commands' help.
class Commands(click.Group):
    """A group that imports a command only when the user calls it, and that supports `--json`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"zerofit.cli.{COMMANDS[cmd_name][0]}")
        return getattr(module, "evaluate" if cmd_name == "eval" else cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raises UsageError for an unknown name, with the nearest, and for an empty argument."""
        if ctx.resilient_parsing:  # the shell completes a line that is not finished
            return super().resolve_command(ctx, args)
        for before, word in pairwise(["zerofit", *_before_dashes(args)]):
            # "" would be read as this folder, or as the default.
            option = before if word == "" else word[:-1] if re.fullmatch("--[a-z-]+=", word) else None
            if option is not None and option not in MAY_BE_EMPTY:
                ctx.fail(f"the value after {option!r} is empty. Is a shell variable not set?")
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{guess}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in --help without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Record whether `--json` and `--no-ssh` are among the arguments."""
        own = _before_dashes(args)
        ctx.meta["json"], ctx.meta["no_ssh"] = "--json" in own, NO_SSH in own
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *arguments: Any, **options: Any) -> object:
        """Run the command line with safe output; under a launcher only the first rank prints.

        click's errors exit with code 2, bugs in zerofit with 70.
        """
        own = _before_dashes(sys.argv if args is None else args)
        # click has not parsed anything yet, but its errors must not appear once per rank either.
        with safe_output(), ExitStack() as stack:
            world = _world(NO_SSH in own)
            if world and world.rank:
                # Every process of the launcher runs this command, but the answer should appear only once.
                null = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(null))
                stack.enter_context(redirect_stderr(null))
            # --help, --version and shell completion print before `invoke`, so their errors are handled here, too.
            try:
                return super().main(args, *arguments, **options)
            except BrokenPipeError:  # click handles it, except in shell completion
                sys.exit(1)
            except Exception as error:
                fail_internally(error, "--json" in own)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and print errors of its usage as JSON if `--json` is given."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:  # click prints its own errors. Only their JSON is missing.
            if ctx.meta["json"]:
                option = getattr(error, "param", None)
                where = option.opts[-1] if isinstance(option, click.Option) else ""
                problem = Problem(kind="usage", message=error.format_message(), hint="see --help", where=where)
                print(json.dumps({"error": problem.as_dict()}), flush=True)
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="zerofit")
@click.option("--local_rank", "--local-rank", hidden=True, expose_value=False, type=int)  # the deepspeed launcher's
@click.pass_context
def main(context: click.Context) -> None:
    """Train CNNs and Transformers that do not fit on one GPU, with DeepSpeed.

    Without a GPU: plan (which layout?), simulate (does it fit?), check (is my JSON right?). Then: train, launch (train
    on many hosts), ckpt export (write the model).
    """
    if context.invoked_subcommand != "train":  # train joins the processes of a launcher
        _act_alone(context.invoked_subcommand or "", context)


def _before_dashes(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments before `--`. Those after it belong to another program."""
    return args[: args.index("--")] if "--" in args else args


def _world(no_ssh: bool) -> World | None:
    """Return the world that a launcher gives this process; None without a launcher."""
    # `launch --no-ssh` runs on every node, and is not part of a launcher's world.
    try:
        return None if no_ssh else given_world(os.environ)
    except UserError:
        return None  # `train` reports this error


def _act_alone(command: str, context: click.Context) -> None:
    """Run a command other than `train` only in the first process of a launcher."""
    world = _world(context.meta["no_ssh"])
    if world is None:
        return
    if command == "launch":
        error = refused_in(world, command)
        fail(list(error.problems), error.exit_code, context.meta["json"])
    if world.rank:
        sys.exit(0)  # the other processes
    others = f"{world.launcher} has started {world.size} processes, but `zerofit {command}` runs only in the first"
    click.echo(f"note: {others}; only `zerofit train` uses all of them", err=True)
    # A command that starts ranks of its own must not pass on the rank of this process.
    leave_world(os.environ)
