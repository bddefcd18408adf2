"""`python -m zerofit.cli` is the `zerofit` command."""

from zerofit.cli.main import main

main(prog_name="zerofit")
