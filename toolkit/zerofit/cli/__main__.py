"""Run the `zerofit` command as `python -m zerofit.cli`."""

from __future__ import annotations

from functools import partial

from zerofit.cli.main import main
from zerofit.spec.process import run_and_exit


def run() -> None:
    """Run the `zerofit` command, and end the process."""
    run_and_exit(partial(main, prog_name="zerofit"))


if __name__ == "__main__":
    run()
