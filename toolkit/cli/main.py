"""The `zerofit` command."""

from __future__ import annotations

import click

from zerofit.cli.models import models
from zerofit.cli.plot import plot
from zerofit.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="zerofit")
def main() -> None:
    """Train CNNs and Transformers that no longer fit, through the DeepSpeed engine."""


for command in (train, models, plot):
    main.add_command(command)
