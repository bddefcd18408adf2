"""zerofit's command line inside this process."""

from __future__ import annotations

import json

from click.testing import CliRunner

from zerofit.cli.main import main


def answer(*words: object, code: int = 0) -> dict:
    """Return the JSON that a command prints last; it ends with this exit code."""
    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])
